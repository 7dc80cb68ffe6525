// Helpers for all modules: elements, number formats, requests to the server, local storage.
// Text of models and users never becomes markup: elements are created one by one.

export const $ = (id) => document.getElementById(id);

export function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

export function say(text) { $("status").textContent = text; }

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function size(bytes) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}

export const count = (number) => number.toLocaleString("en");

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

export function rows(list, entries) {
  list.replaceChildren(...entries.flatMap(([name, value]) => {
    const held = make("dd");
    held.append(value);
    return [make("dt", name), held];
  }));
}

export function headers() {
  return $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
}

export const server = (path, options = {}) => fetch(path, { ...options, headers: headers() });

export function stored(name) {
  try { return localStorage.getItem(`offload-rt ${name}`); } catch { return null; }
}

export function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(`offload-rt ${name}`);
    else localStorage.setItem(`offload-rt ${name}`, value);
    return true;
  } catch { return false; }
}

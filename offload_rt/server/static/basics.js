// Helpers of all modules: elements, number formats, requests to the server, local storage.
// Texts of models and users become markup only in render.js, which sanitizes them.

export const $ = (id) => document.getElementById(id);

export function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

export function button(text, action, label) {
  const made = make("button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

export function say(text) { $("status").textContent = text; }

// Show an error until the next call.
export function complain(text) { $("problem").textContent = text; }

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

export const server = (path, options = {}) => fetch(path, { ...options, headers: { ...headers(), ...options.headers } });

export const post = (path, body, options = {}) => server(path, {
  ...options, method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
});

// Message of an error response.
export function reason(text, status) {
  try { return JSON.parse(text).error.message; } catch { return `The server responded with status ${status}.`; }
}

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

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // pages of other hosts without TLS have no clipboard
    const area = document.body.appendChild(make("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied.");
}

export function download(name, text, kind) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

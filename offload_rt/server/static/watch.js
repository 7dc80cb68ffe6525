// Live trace of a request: prefill progress, attention by layer and step, transferred bytes, and the positions of
// selected tokens in the prompt.
import { $, count, make, percent, rows, size } from "./basics.js";

const STEPS = 150; // maximum number of columns of the picture
const PLACES = 6;
const SHADES = 8;

let head = null; // first trace event: policy, layers, prompt segments
let attended = []; // exact attention fraction `[steps][layers]`
let total = []; // number of selections per segment, in all steps and in the latest one
let latest = [];
let spans = [];
let bytes = 0;
let before = 0;
let steps = 0;
let drawing = false;

export function begin() {
  head = null;
  attended = [];
  [bytes, before, steps] = [0, 0, 0];
  $("looked").hidden = true;
  $("looked-text").textContent = "Reading…";
  redraw();
}

export function end() {
  $("reading").hidden = true;
  if (!head) $("looked-text").textContent = "No trace was received.";
}

export function take(trace) {
  if (trace.segments) return start(trace);
  const [done, layers] = trace.prefill;
  $("reading").hidden = trace.step > 0 || done >= layers;
  $("prefill").value = done / layers;
  $("prefill-text").textContent = `layer ${done} of ${layers}, ${count(head.prompt_tokens)} tokens`;
  attended.push(...trace.attended);
  before = bytes;
  bytes = trace.h2d_bytes;
  steps = trace.step;
  if (trace.selected) {
    latest = trace.selected;
    total = total.map((sum, i) => sum + latest[i]);
  }
  if (!drawing) {
    drawing = true;
    requestAnimationFrame(() => { drawing = false; redraw(); });
  }
}

function start(trace) {
  head = trace;
  total = new Array(trace.segments.length).fill(0);
  latest = total.slice();
  spans = trace.segments.map((text) => make("span", text));
  $("prompt-text").replaceChildren(...spans);
  const selecting = trace.layers - trace.dense_layers.length;
  $("looked-text").textContent = selecting
    ? `The ${count(trace.prompt_tokens)} tokens of the prompt. Darker tokens were selected by more layers, heads and steps. `
      + `${selecting} of ${trace.layers} layers select tokens. The first ${trace.sinks} and the most recent ${trace.recent} tokens are always attended to and not counted.`
    : `The policy ${trace.policy} attends to all ${count(trace.prompt_tokens)} tokens in every layer. There is no selection.`;
  $("looked").hidden = !trace.segments.length;
}

// ------------------------------------------------------------------------------------------------------------- drawing

function redraw() {
  matrix();
  figures();
  if (head && head.segments.length) heat();
}

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function matrix() {
  const canvas = $("matrix"), pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const shown = attended.slice(-STEPS);
  if (!shown.length) {
    canvas.setAttribute("aria-label", "No steps yet");
    $("matrix-text").textContent = "";
    return;
  }
  const layers = shown[0].length, wide = canvas.width / Math.max(40, shown.length), high = canvas.height / layers;
  pen.fillStyle = ink("--accent");
  shown.forEach((step, x) => step.forEach((share, y) => {
    pen.globalAlpha = 0.06 + 0.94 * share;
    pen.fillRect(x * wide, y * high, Math.max(1, wide - 0.5), Math.max(1, high - 0.5));
  }));
  pen.globalAlpha = 1;
  const means = shown[0].map((_, layer) => shown.reduce((sum, step) => sum + step[layer], 0) / shown.length);
  const least = means.indexOf(Math.min(...means)), most = means.indexOf(Math.max(...means));
  const text = `Layers from top to bottom, steps from left to right. Mean ${percent(mean(means))}, `
    + `lowest in layer ${least} (${percent(means[least])}), highest in layer ${most} (${percent(means[most])}).`;
  canvas.setAttribute("aria-label", `Exact attention fraction. ${text}`);
  $("matrix-text").textContent = text;
}

const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / Math.max(1, numbers.length);

function figures() {
  const last = attended.at(-1);
  rows($("answer-figures"), [
    ["Steps", count(steps)],
    ["Exact fraction, last step", last ? percent(mean(last)) : "—"],
    ["KV transferred, this answer", size(bytes)],
    ["in the last step", size(bytes - before)],
  ]);
}

function heat() {
  const counts = $("latest").checked ? latest : total;
  const most = Math.max(1, ...counts);
  counts.forEach((number, i) => { spans[i].className = number ? `h${Math.ceil(SHADES * number / most)}` : ""; });
  strip(counts, most);
  places(counts);
}

function strip(counts, most) {
  const canvas = $("strip"), pen = canvas.getContext("2d"), wide = canvas.width / counts.length;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = ink("--accent");
  counts.forEach((number, i) => {
    pen.globalAlpha = number / most;
    pen.fillRect(i * wide, 0, Math.max(1, wide), canvas.height);
  });
  pen.globalAlpha = 1;
}

// Mean fraction of layers, heads and steps that selected a token of the segment.
function share(number) {
  const made = ($("latest").checked ? 1 : steps) * (head.layers - head.dense_layers.length) * head.kv_heads;
  return number / Math.max(1, made * head.segment_tokens);
}

function places(counts) {
  const order = counts.map((_, i) => i).filter((i) => counts[i]).sort((a, b) => counts[b] - counts[a]).slice(0, PLACES);
  const known = [...$("places").querySelectorAll("button")].map((button) => Number(button.value));
  if (order.join() !== known.join()) {
    const focused = known.indexOf(Number(document.activeElement.value));
    $("places").replaceChildren(...order.map((i) => {
      const item = make("li"), button = make("button");
      button.type = "button";
      button.value = i;
      button.addEventListener("click", () => jump(i));
      item.append(button);
      return item;
    }));
    if (focused >= 0 && document.activeElement === document.body) $("places").querySelectorAll("button")[focused]?.focus();
  }
  $("places").querySelectorAll("button").forEach((button) => {
    const i = Number(button.value);
    button.textContent = `${percent(share(counts[i]))}: ${head.segments[i].trim().slice(0, 60) || "(space)"}`;
  });
}

function jump(i) {
  for (const span of spans) span.removeAttribute("id");
  spans[i].id = "here";
  const text = $("prompt-text");
  text.scrollTop = spans[i].offsetTop - text.clientHeight / 3; // unlike scrollIntoView, scrolls only the text
  text.focus({ preventScroll: true });
}

$("latest").addEventListener("change", redraw);
$("strip").addEventListener("click", (event) => {
  if (!spans.length) return;
  const box = $("strip").getBoundingClientRect();
  jump(Math.min(spans.length - 1, Math.floor((event.clientX - box.left) / box.width * spans.length)));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
figures();

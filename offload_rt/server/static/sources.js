// The panel of sources: which passages of the prompt an answer, or one sentence of it, attended to.
import { $, button, count, make, percent, rows, size } from "./basics.js";
import { sentences } from "./render.js";

const STEPS = 150; // maximum number of columns of the picture
const SOURCES = 6;
const SHADES = 8;

let answer = null; // the message whose sources are shown
let trace = null;
let parts = []; // sentences of the answer, see `sentences`
let chosen = -1; // index into `parts`; -1: the whole answer
let spans = []; // elements of the bins of the prompt of `trace`
let drawing = false;

// Show the newest trace of a running answer.
export function follow(message) {
  [answer, parts, chosen] = [message, [], -1];
  use(message.traces.at(-1));
  draw();
}

// Draw once in the next frame.
export function refresh() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; use(answer?.traces.at(-1)); draw(); });
}

// Show an answer that is complete. Its sentences become clickable. `body`: the element with its rendered text.
export function show(message, body) {
  [answer, chosen] = [message, -1];
  mark([]);
  parts = message.traces?.length ? split(body) : [];
  use(message.traces?.at(-1));
  draw();
}

export function clear() {
  [answer, parts, chosen] = [null, [], -1];
  use(null);
  draw();
}

export const shown = () => answer;

// Select the sentence that contains an element of the shown answer.
export function choose(element) {
  const found = parts.findIndex((part) => part.elements.includes(element));
  if (found >= 0) select(found);
}

function split(body) {
  body.parts ??= sentences(body);
  return body.parts;
}

function select(index) {
  chosen = index;
  const part = parts[index];
  mark(part ? part.elements : []);
  use(answer.traces.findLast((each) => each.offset <= (part ? part.from : Infinity)));
  draw();
}

function mark(elements) {
  for (const old of document.querySelectorAll(".sentence.chosen")) old.classList.remove("chosen");
  for (const element of elements) element.classList.add("chosen");
  elements[0]?.scrollIntoView({ block: "nearest" });
}

function use(next) {
  if (trace === next && spans.length === (next?.head?.bins.length ?? 0)) return;
  trace = next ?? null;
  spans = (trace?.head?.bins || []).map((text) => make("span", text));
  $("prompt-text").replaceChildren(...spans);
}

// ------------------------------------------------------------------------------------------------------------ drawing

function draw() {
  matrix();
  figures();
  const selects = Boolean(trace?.selects && trace.events.length);
  $("looked").hidden = !selects;
  $("sentences").hidden = !parts.length;
  $("looked-text").textContent = explanation();
  if (parts.length) {
    $("sentence-text").textContent = chosen < 0 ? `Whole answer (${count(parts.length)} sentence${parts.length > 1 ? "s" : ""}). Click a sentence of the answer for its sources.`
      : `Sentence ${chosen + 1} of ${parts.length}: ${parts[chosen].text}`;
    $("whole").disabled = chosen < 0;
  }
  if (selects) heat();
}

function explanation() {
  if (!answer) return "Send a message to see which passages of the prompt each sentence of the answer attended to.";
  if (!trace?.head) return answer.traces ? "Reading…" : "The trace of this answer is not kept. Regenerate the answer to see its sources.";
  const { head } = trace, selecting = head.layers - head.dense_layers.length;
  if (!selecting) return `The policy ${head.policy} attends to all ${count(head.prompt_tokens)} tokens in every layer. It selects no sources.`;
  if (!head.bins.length) return "The tokenizer of this model reports no positions, so sources cannot be shown.";
  return `${selecting} of ${head.layers} layers select among the ${count(head.prompt_tokens)} tokens of the prompt. The first ${head.sinks} and the most `
    + `recent ${head.recent} tokens are always attended to and not counted.`;
}

function heat() {
  const part = parts[chosen];
  const found = trace.selected(part?.from, part?.to);
  const most = Math.max(1, ...found.counts);
  found.counts.forEach((number, i) => { spans[i].className = number ? `h${Math.ceil(SHADES * number / most)}` : ""; });
  strip(found.counts, most);
  list(found);
}

const ink = (name) => getComputedStyle($("ink")).getPropertyValue(name);

function strip(counts, most) {
  const canvas = $("strip"), pen = canvas.getContext("2d"), wide = canvas.width / counts.length;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = ink("color");
  counts.forEach((number, i) => {
    pen.globalAlpha = number / most;
    pen.fillRect(i * wide, 0, Math.max(1, wide), canvas.height);
  });
  pen.globalAlpha = 1;
}

// The passages that were selected most. For a sentence: those that it selected more often than the whole answer did.
function list(found) {
  const shares = trace.shares(found), usual = chosen < 0 ? shares.map(() => 0) : trace.shares(trace.selected());
  const gains = shares.map((share, i) => share - usual[i]);
  const differs = chosen >= 0 && gains.some((gain) => gain > 0), ranks = differs ? gains : shares;
  const order = shares.map((_, i) => i).filter((i) => ranks[i] > 0).sort((a, b) => ranks[b] - ranks[a]).slice(0, SOURCES);
  const key = `${chosen} ${order.join()} ${order.map((i) => percent(shares[i])).join()}`;
  $("sources-title").textContent = differs ? "Passages selected more than for the rest" : "Passages selected most";
  if ($("sources").key === key) return; // keep the focus
  $("sources").key = key;
  $("sources").replaceChildren(...order.map((i) => {
    const item = make("li"), link = button("", () => jump(i));
    link.append(make("strong", percent(shares[i])));
    if (chosen >= 0) link.append(make("small", ` (answer ${percent(usual[i])})`));
    link.append(` ${trace.passages[i].text || "(space)"}`);
    item.append(link);
    return item;
  }));
}

function jump(index) {
  for (const span of spans) span.removeAttribute("id");
  const { first, last } = trace.passages[index], text = $("prompt-text");
  for (const old of text.querySelectorAll(".here")) old.classList.remove("here");
  for (const span of spans.slice(first, last + 1)) span.classList.add("here");
  text.scrollTop = spans[first].offsetTop - text.clientHeight / 3; // unlike scrollIntoView, scrolls only the text
  text.focus({ preventScroll: true });
}

const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / Math.max(1, numbers.length);

function matrix() {
  const canvas = $("matrix"), pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const recent = trace?.attended.slice(-STEPS) ?? [];
  if (!recent.length) {
    canvas.setAttribute("aria-label", "No steps yet");
    $("matrix-text").textContent = "";
    return;
  }
  const layers = recent[0].length, wide = canvas.width / Math.max(40, recent.length), high = canvas.height / layers;
  pen.fillStyle = ink("color");
  recent.forEach((step, x) => step.forEach((share, y) => {
    pen.globalAlpha = 0.06 + 0.94 * share;
    pen.fillRect(x * wide, y * high, Math.max(1, wide - 0.5), Math.max(1, high - 0.5));
  }));
  pen.globalAlpha = 1;
  const means = recent[0].map((_, layer) => mean(recent.map((step) => step[layer])));
  const least = means.indexOf(Math.min(...means)), most = means.indexOf(Math.max(...means));
  const text = `Layers from top to bottom, steps from left to right. Mean ${percent(mean(means))}, `
    + `lowest in layer ${least} (${percent(means[least])}), highest in layer ${most} (${percent(means[most])}).`;
  canvas.setAttribute("aria-label", `Exact attention fraction. ${text}`);
  $("matrix-text").textContent = text;
}

function figures() {
  const last = trace?.attended.at(-1);
  rows($("answer-figures"), [
    ["Steps", count(trace?.steps ?? 0)],
    ["Exact fraction, last step", last ? percent(mean(last)) : "—"],
    ["KV transferred, this answer", size(trace?.bytes ?? 0)],
    ["in the last step", size(trace?.lastBytes ?? 0)],
  ]);
}

$("before").addEventListener("click", () => select(chosen <= 0 ? parts.length - 1 : chosen - 1));
$("after").addEventListener("click", () => select((chosen + 1) % parts.length));
$("whole").addEventListener("click", () => select(-1));
$("strip").addEventListener("click", (event) => {
  if (!spans.length) return;
  const box = $("strip").getBoundingClientRect();
  const bin = Math.min(spans.length - 1, Math.floor((event.clientX - box.left) / box.width * spans.length));
  jump(trace.passages.findIndex((passage) => passage.last >= bin));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
figures();

// The chat page: conversation, requests, settings and server statistics.
import { $, count, headers, make, rows, say, server, size } from "./basics.js";
import { markdown } from "./markdown.js";
import { Sessions } from "./sessions.js";
import * as watch from "./watch.js";

const SHOWN_FILE = 2000; // maximum number of characters shown of an attached file

let model = "";
let messages = []; // {role, content, thought, file, failed}
let running = null; // the current request
let added = null; // {name, text}
const sessions = new Sessions((found) => { messages = found; draw(); });

// -------------------------------------------------------------------------------------------------------- conversation

function folded(title, text) {
  const details = make("details");
  details.append(make("summary", title), make("pre", text));
  return details;
}

function drawn(message) {
  const article = make("article", "", message.role);
  article.append(make("h3", { user: "You", system: "System" }[message.role] || model || "Answer"));
  if (message.file) {
    const { name, text } = message.file;
    article.append(folded(`${name} (${count(text.length)} characters)`, text.slice(0, SHOWN_FILE) + (text.length > SHOWN_FILE ? "\n…" : "")));
  }
  if (message.thought) article.append(folded("Thinking", message.thought));
  markdown(article, message.content);
  if (message.failed) {
    article.classList.add("failed");
    article.append(make("p", message.failed));
  }
  return article;
}

function draw() {
  $("log").replaceChildren(...messages.map(drawn));
  $("log").scrollTop = $("log").scrollHeight;
}

function redrawLast() {
  const log = $("log");
  if (!log.lastElementChild) return;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const open = [...log.lastElementChild.querySelectorAll("details")].map((details) => details.open);
  log.lastElementChild.replaceWith(drawn(messages.at(-1)));
  log.lastElementChild.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// Messages to send: the answered questions with their answers, and the newest question.
function sent() {
  const list = messages.slice(0, -1).filter((message, i, all) => {
    const next = messages[i + 1];
    if (message.failed || next.failed || message.role === "system") return false;
    return message.role !== "user" || next.role === "assistant" || i === all.length - 1;
  }).map((message) => !message.file ? { role: message.role, content: message.content } : {
    role: message.role,
    content: `${message.file.text}\n\n${message.content}`,
    file_name: message.file.name,
    file_length: message.file.text.length,
  });
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...list] : list;
}

function asked() {
  const body = { messages: sent(), stream: true, stream_options: { include_usage: true }, trace: true, ...sessions.field };
  if ($("most").value) body.max_tokens = Number($("most").value);
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  return JSON.stringify(body);
}

// Uses XMLHttpRequest because fetch does not report upload progress.
function ask(question) {
  messages.push({ role: "user", content: question, file: added || undefined }, { role: "assistant", content: "" });
  const answer = messages.at(-1), withFile = added !== null, begun = performance.now();
  let read = 0, first = 0;
  draw();
  watch.begin();
  $("log").setAttribute("aria-busy", "true");
  const request = running = new XMLHttpRequest();
  request.open("POST", "v1/chat/completions");
  request.setRequestHeader("Content-Type", "application/json");
  for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
  request.upload.onprogress = (event) => {
    if (withFile && event.lengthComputable) $("file-progress").value = event.loaded / event.total;
    say(event.loaded < event.total ? "Sending…" : "Reading…");
  };
  request.upload.onload = () => { added = null; $("file").hidden = true; };
  request.onprogress = () => {
    if (request.status !== 200) return;
    const end = request.responseText.lastIndexOf("\n\n");
    if (end < read) return;
    const had = answer.content.length + (answer.thought || "").length;
    for (const block of request.responseText.slice(read, end).split("\n\n")) take(block, answer);
    read = end + 2;
    if (answer.content.length + (answer.thought || "").length === had) return;
    if (!first) first = performance.now();
    say("Answering…");
    redrawLast();
  };
  request.onload = () => {
    if (request.status !== 200) answer.failed = problem(request);
    const rate = answer.tokens > 1 && first ? `, ${((answer.tokens - 1) / (performance.now() - first) * 1000).toFixed(1)} tokens/s` : "";
    const reused = answer.cached ? `, ${count(answer.cached)} of ${count(answer.read)} prompt tokens reused` : "";
    ended(answer.failed || (first ? `Done. First token after ${((first - begun) / 1000).toFixed(1)} s${rate}${reused}.` : "Done."));
  };
  request.onerror = () => { answer.failed = "The server does not respond."; ended(answer.failed); };
  request.onabort = () => ended("Stopped.");
  request.send(asked());
  $("send").disabled = true;
  $("stop").disabled = false;
  say("Sending…");
}

function take(block, answer) {
  const line = block.split("\n").find((each) => each.startsWith("data: "));
  if (!line || line === "data: [DONE]") return;
  const data = JSON.parse(line.slice(6));
  if (data.error) answer.failed = data.error.message;
  if (data.trace) watch.take(data.trace);
  if (data.usage) {
    answer.tokens = data.usage.completion_tokens;
    answer.read = data.usage.prompt_tokens;
    answer.cached = data.usage.prompt_tokens_details.cached_tokens;
  }
  for (const choice of data.choices || []) {
    answer.content += choice.delta.content || "";
    if (choice.delta.reasoning_content) answer.thought = (answer.thought || "") + choice.delta.reasoning_content;
  }
}

function problem(request) {
  try { return JSON.parse(request.responseText).error.message; } catch { return `The server responded with status ${request.status}.`; }
}

function ended(text) {
  running = null;
  watch.end();
  $("log").setAttribute("aria-busy", "false");
  $("send").disabled = false;
  $("stop").disabled = true;
  redrawLast();
  say(text);
  sessions.keep(messages);
}

// --------------------------------------------------------------------------------------------------------- the server

function meter(used, most) {
  const found = make("meter");
  found.max = most;
  found.value = used;
  return found;
}

async function figures() {
  if (document.hidden) return;
  try {
    const answer = await server("v1/load");
    if (answer.status === 401) { say("This server requires an API key: enter it under Settings."); $("settings").open = true; return; }
    const load = await answer.json();
    if (!model) await named();
    const held = make("span", `${size(load.pool_used_bytes)} of ${size(load.pool_limit_bytes)} `);
    held.append(meter(load.pool_used_bytes, load.pool_limit_bytes));
    rows($("tiers"), [
      ["Weights", size(load.weight_bytes)], ["KV on the device", size(load.device_kv_bytes)],
      ["KV in host memory", held], ["kept for prefix caching", size(load.kept_bytes)],
      ["KV and sessions on disk", size(load.store_bytes)],
    ]);
    rows($("load"), [
      ["Running", count(load.running)], ["Waiting", count(load.waiting)],
      ["Prompt tokens", count(load.prompt_tokens)], ["reused from the prefix cache", count(load.cached_tokens)],
      ["Cached tokens from host memory", count(load.host_hit_tokens)],
      ["from disk", count(load.disk_hit_tokens)], ["lost and recomputed", count(load.lost_tokens)],
      ["New tokens", count(load.generated_tokens)], ["KV transferred", size(load.h2d_bytes)],
    ]);
  } catch {
    rows($("load"), [["No connection", "—"]]);
  }
}

async function named() {
  const answer = await server("v1/models");
  if (!answer.ok) return;
  model = (await answer.json()).data[0].id;
  $("model").textContent = model;
  if (!running) draw();
  await sessions.list();
}

// ------------------------------------------------------------------------------------------------------------- events

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (running || (!text && !added)) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => { if (running) running.abort(); });
$("fresh").addEventListener("click", () => {
  if (running) running.abort();
  sessions.fresh();
  say("New conversation started.");
  $("text").focus();
});
$("upload").addEventListener("change", () => {
  const [file] = $("upload").files;
  if (!file) return;
  const reader = new FileReader();
  reader.onprogress = (event) => { $("file-progress").value = event.loaded / Math.max(1, event.total); };
  reader.onload = () => {
    added = { name: file.name, text: reader.result };
    $("file-progress").value = 0;
    say(`${file.name} will be sent with the next message.`);
    $("text").focus();
  };
  reader.onerror = () => say(`${file.name} could not be read.`);
  $("file-name").textContent = `${file.name} (${size(file.size)})`;
  $("file").hidden = false;
  reader.readAsText(file);
  $("upload").value = "";
});
$("file-drop").addEventListener("click", () => { added = null; $("file").hidden = true; $("text").focus(); });
$("key").value = sessionStorage.getItem("offload-rt key") || "";
$("key").addEventListener("change", async () => {
  sessionStorage.setItem("offload-rt key", $("key").value);
  await figures();
  await sessions.begin();
});

figures().then(() => sessions.begin()); // first, because answers are labelled with the model name
setInterval(figures, 2000);

// Talks with the server that it came from. No text of the model ever becomes markup: elements are made one by one.
"use strict";

const $ = (id) => document.getElementById(id);
const KEPT = "offload-rt conversation";
const SHOWN_FILE = 2000; // characters of an added file that the page shows

let model = "";
let messages = restored(); // {role, content, thought, file}
let running = null; // the request under way
let added = null; // {name, text}

function restored() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) || "[]");
    return Array.isArray(found) ? found.filter((m) => typeof m.content === "string") : [];
  } catch {
    return [];
  }
}

function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(messages));
  } catch {
    say("This conversation is too long for the browser to keep: it is lost when the page is closed.");
  }
}

function say(text) { $("status").textContent = text; }

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

// ------------------------------------------------------------------------------------------------------------ markdown

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

function inline(parent, text) {
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(from, found.index));
    const [whole, code, strong, emphasis, label, address] = found;
    if (code) parent.append(make("code", code));
    else if (strong) parent.append(make("strong", strong));
    else if (emphasis) parent.append(make("em", emphasis));
    else {
      const link = make("a", label);
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      parent.append(link);
    }
    from = found.index + whole.length;
  }
  parent.append(text.slice(from));
}

function markdown(parent, text) {
  let open = null; // the list or paragraph that lines are added to
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    if (line.startsWith("```")) {
      const code = [];
      while (++i < lines.length && !lines[i].startsWith("```")) code.push(lines[i]);
      const block = make("pre");
      block.append(make("code", code.join("\n")));
      parent.append(block);
      open = null;
      continue;
    }
    const heading = line.match(/^#{1,6}\s+(.*)/);
    const item = line.match(/^\s*(?:[-*+]|(\d+)[.)])\s+(.*)/);
    if (heading) {
      inline(parent.appendChild(make("h4")), heading[1]);
      open = null;
    } else if (item) {
      const tag = item[1] ? "ol" : "ul";
      if (!open || open.localName !== tag) {
        open = parent.appendChild(make(tag));
        if (item[1]) open.start = Number(item[1]);
      }
      inline(open.appendChild(make("li")), item[2]);
    } else if (!line.trim()) {
      open = null;
    } else {
      if (!open || open.localName !== "p") open = parent.appendChild(make("p"));
      else open.append("\n");
      inline(open, line);
    }
  }
}

// -------------------------------------------------------------------------------------------------------- conversation

function drawn(message) {
  const article = make("article", "", message.role);
  article.append(make("h3", message.role === "user" ? "You" : model || "Answer"));
  if (message.file) {
    const details = make("details");
    details.append(make("summary", `${message.file.name} (${message.file.text.length.toLocaleString("en")} characters)`));
    details.append(make("pre", message.file.text.slice(0, SHOWN_FILE) + (message.file.text.length > SHOWN_FILE ? "\n…" : "")));
    article.append(details);
  }
  if (message.thought) {
    const details = make("details");
    details.append(make("summary", "Thinking"), make("p", message.thought));
    article.append(details);
  }
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
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const open = [...log.lastElementChild.querySelectorAll("details")].map((details) => details.open);
  log.lastElementChild.replaceWith(drawn(messages.at(-1)));
  log.lastElementChild.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function sent() {
  const answered = messages.slice(0, -1).filter((message, i) => !message.failed && !messages[i + 1].failed);
  const list = answered.map((message) => ({
    role: message.role,
    content: message.file ? `${message.file.text}\n\n${message.content}` : message.content,
  }));
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...list] : list;
}

function asked() {
  const body = { messages: sent(), stream: true, stream_options: { include_usage: true } };
  if ($("most").value) body.max_tokens = Number($("most").value);
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  return JSON.stringify(body);
}

function authorised(request) {
  request.setRequestHeader("Content-Type", "application/json");
  if ($("key").value) request.setRequestHeader("Authorization", `Bearer ${$("key").value}`);
}

// XMLHttpRequest, for it tells how far an upload is; fetch does not.
function ask(question) {
  messages.push({ role: "user", content: question, file: added || undefined }, { role: "assistant", content: "" });
  const answer = messages.at(-1);
  const withFile = added !== null;
  const begun = performance.now();
  let read = 0;
  let first = 0;
  draw();
  keep();
  $("log").setAttribute("aria-busy", "true");
  const request = running = new XMLHttpRequest();
  request.open("POST", "v1/chat/completions");
  authorised(request);
  request.upload.onprogress = (event) => {
    if (withFile && event.lengthComputable) $("file-progress").value = event.loaded / event.total;
    say(event.loaded < event.total ? "Sending…" : "Reading…");
  };
  request.upload.onload = () => { added = null; $("file").hidden = true; };
  request.onprogress = () => {
    if (request.status !== 200) return;
    const end = request.responseText.lastIndexOf("\n\n");
    if (end < read) return;
    for (const block of request.responseText.slice(read, end).split("\n\n")) take(block, answer);
    read = end + 2;
    if (!first && answer.content) first = performance.now();
    say("Answering…");
    redrawLast();
  };
  request.onload = () => {
    if (request.status !== 200) answer.failed = problem(request);
    const rate = answer.tokens > 1 && first ? `, ${((answer.tokens - 1) / (performance.now() - first) * 1000).toFixed(1)} tokens/s` : "";
    const reused = answer.cached ? `, ${answer.cached.toLocaleString("en")} of ${answer.read.toLocaleString("en")} prompt tokens were there` : "";
    ended(answer.failed || `Done: first token after ${((first - begun) / 1000).toFixed(1)} s${rate}${reused}.`);
  };
  request.onerror = () => { answer.failed = "The server does not answer."; ended(answer.failed); };
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
  try {
    return JSON.parse(request.responseText).error.message;
  } catch {
    return `The server answered ${request.status}.`;
  }
}

function ended(text) {
  running = null;
  $("log").setAttribute("aria-busy", "false");
  $("send").disabled = false;
  $("stop").disabled = true;
  redrawLast();
  keep();
  say(text);
}

// --------------------------------------------------------------------------------------------------------- the server

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function size(bytes) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}

async function figures() {
  if (document.hidden) return;
  const headers = $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
  try {
    const answer = await fetch("v1/load", { headers });
    if (answer.status === 401) { say("This server asks for an API key: enter it under Settings."); return; }
    const load = await answer.json();
    if (!model) await named(headers);
    const rows = {
      "Running": load.running, "Waiting": load.waiting,
      "KV in host memory": `${size(load.pool_used_bytes)} of ${size(load.pool_limit_bytes)}`,
      "Prompt tokens": load.prompt_tokens.toLocaleString("en"), "of them reused": load.cached_tokens.toLocaleString("en"),
      "New tokens": load.generated_tokens.toLocaleString("en"), "Over the link": size(load.link_bytes),
    };
    $("load").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => [make("dt", name), make("dd", String(value))]));
  } catch {
    $("load").replaceChildren(make("dt", "No connection"), make("dd", "—"));
  }
}

async function named(headers) {
  const answer = await fetch("v1/models", { headers });
  if (!answer.ok) return;
  model = (await answer.json()).data[0].id;
  $("model").textContent = model;
  if (!running) draw();
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
  messages = [];
  keep();
  draw();
  say("A new conversation.");
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
    say(`${file.name} goes with the next message.`);
    $("text").focus();
  };
  reader.onerror = () => say(`${file.name} cannot be read.`);
  $("file-name").textContent = `${file.name} (${size(file.size)})`;
  $("file").hidden = false;
  reader.readAsText(file);
  $("upload").value = "";
});
$("file-drop").addEventListener("click", () => { added = null; $("file").hidden = true; $("text").focus(); });
$("key").value = sessionStorage.getItem("offload-rt key") || "";
$("key").addEventListener("change", () => { sessionStorage.setItem("offload-rt key", $("key").value); figures(); });

draw();
figures();
setInterval(figures, 2000);

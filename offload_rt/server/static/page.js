// The chat page: connects the conversation, the message box, requests, the panels and the server's statistics.
import { $, complain, count, make, rows, say, server, size, store, stored } from "./basics.js";
import { Composer } from "./composer.js";
import { Conversation, encodedAll } from "./conversation.js";
import { send } from "./request.js";
import { Sessions, exportAll, exportJson, exportMarkdown } from "./sessions.js";
import * as settings from "./settings.js";
import * as sources from "./sources.js";
import { Trace } from "./trace.js";

const STARTING = 503; // status while the model is loaded

let abort = null; // aborts the current request
let opened; // called when the current conversation is shown
const ready = new Promise((resolve) => { opened = resolve; });
let begun = false;

const chat = new Conversation({
  edit(index) {
    const { content, files } = chat.messages[index];
    composer.load({ text: content, files }, index);
    $("text").focus();
  },
  regenerate() {
    const before = [...chat.messages];
    chat.messages.splice(-1, 1, { role: "assistant", content: "", traces: [] });
    run(() => chat.open(before), "The earlier answer was kept.");
  },
  proceed() {
    const answer = chat.messages.at(-1);
    answer.traces ??= [];
    const { content, thought, finish, failed } = answer, traces = [...answer.traces];
    delete answer.failed; // else the request would not contain the answer
    run(() => { Object.assign(answer, { content, thought, finish, failed, traces }); chat.draw(); }, "The answer was not continued.", true);
  },
  sources(message, body) {
    sources.show(message, body);
    setColumn("aside", true);
    $("looked-title").focus();
  },
});

const composer = new Composer({
  messages: (draft, editing) => withSystem([...chat.messages.slice(0, editing ?? undefined), question(draft)]),
  submit(draft, editing) {
    const before = [...chat.messages];
    if (editing !== null) chat.messages.splice(editing);
    chat.messages.push(question(draft), { role: "assistant", content: "", traces: [] });
    run(() => { chat.open(before); composer.load(draft, editing); });
  },
  answer: () => Number($("most").value) || 1,
  ready,
});

const sessions = new Sessions(() => abort?.(), (messages) => {
  chat.open(messages);
  if (composer.editing === null) composer.changed(); // a draft stays
  else composer.clear();
  sources.clear();
});

const question = ({ text, files }) => ({ role: "user", content: text, files });

function withSystem(messages) {
  const list = encodedAll(messages), system = settings.system();
  return system ? [{ role: "system", content: system }, ...list] : list;
}

// ------------------------------------------------------------------------------------------------------------ requests

function body(messages) {
  const inSession = sessions.kept && !settings.otherPolicy();
  return {
    messages: withSystem(messages), stream: true, stream_options: { include_usage: true }, trace: true,
    ...settings.fields(), ...(inSession && { session: sessions.name }),
  };
}

// Answer the last question, or continue the last answer. `restore` is called if there is no answer. With a text `kept`, there
// was an answer before: `restore` is also called if the new one fails, and the status is this text.
function run(restore, kept = "", continues = false) {
  const answer = chat.messages.at(-1), trace = new Trace(answer.content.length), begun = performance.now();
  const usage = { tokens: 0, read: 0, cached: 0 };
  let first = 0, failure = "", asked;
  try {
    asked = body(continues ? chat.messages : chat.messages.slice(0, -1));
  } catch {
    restore();
    complain("The policy options in the settings are not JSON.");
    return;
  }
  delete answer.finish;
  answer.traces.push(trace);
  chat.busy = true;
  chat.draw();
  sources.follow(answer);
  $("log").setAttribute("aria-busy", "true");
  say("Sending…");

  const take = (data) => {
    if (data.error) failure = data.error.message;
    if (data.trace) { trace.take(data.trace, answer.content.length); progress(trace); sources.refresh(); }
    if (data.usage) Object.assign(usage, { tokens: data.usage.completion_tokens, read: data.usage.prompt_tokens, cached: data.usage.prompt_tokens_details.cached_tokens });
    for (const { delta, finish_reason: finish } of data.choices || []) {
      if (finish) answer.finish = finish;
      if (!delta.content && !delta.reasoning_content) continue;
      answer.content += (delta.content || "").replace(/\r/g, "");
      if (delta.reasoning_content) answer.thought = (answer.thought || "") + delta.reasoning_content;
      if (!first) { first = performance.now(); say("Answering…"); }
      grow();
    }
  };
  // An earlier answer stays as it was before. A first answer is marked: it is not part of later requests.
  const failed = (message) => {
    if (kept) restore();
    else answer.failed = message;
    ended(answer, kept || message, "session" in asked);
    if (kept) complain(message);
  };
  abort = send(asked, {
    uploading: (share) => say(share < 1 ? `Sending… ${Math.round(100 * share)} %` : "Reading…"),
    event: take,
    done: () => (failure ? failed(failure) : ended(answer, summary(usage, begun, first), "session" in asked)),
    stopped: () => ended(answer, "Stopped.", "session" in asked),
    lost() {
      if (first) failed("The connection was lost.");
      else { restore(); ended(answer, "", "session" in asked); }
      complain("The server does not respond.");
    },
    refused(message) {
      restore();
      ended(answer, "The request was refused.", true);
      complain(message);
    },
  });
  $("send").hidden = true;
  $("stop").hidden = false;
}

let growing = false;

function grow() {
  if (growing) return;
  growing = true;
  requestAnimationFrame(() => { growing = false; if (abort) chat.grow(); });
}

function summary({ tokens, read, cached }, begun, first) {
  if (!first) return "Done.";
  const rate = tokens > 1 ? `, ${((tokens - 1) / (performance.now() - first) * 1000).toFixed(1)} tokens/s` : "";
  const reused = cached ? `, ${count(cached)} of ${count(read)} prompt tokens reused` : "";
  return `Done. First token after ${((first - begun) / 1000).toFixed(1)} s${rate}${reused}.`;
}

function progress({ head, prefill, steps }) {
  if (!prefill) return;
  const [done, layers] = prefill;
  $("reading").hidden = steps > 0 || done >= layers;
  $("prefill").value = done / layers;
  $("prefill-text").textContent = `layer ${done} of ${layers}, ${count(head.prompt_tokens)} tokens`;
}

function ended(answer, text, stored) {
  abort = null;
  chat.end();
  $("reading").hidden = true;
  $("log").setAttribute("aria-busy", "false");
  $("send").hidden = false;
  $("stop").hidden = true;
  const body = chat.bodyOf(answer);
  if (body) sources.show(answer, body);
  else sources.clear();
  say(text);
  sessions.keep(chat.messages, stored);
}

// ---------------------------------------------------------------------------------------------------------- the server

function meter(used, most, label) {
  const found = make("meter");
  found.max = most;
  found.value = used;
  found.setAttribute("aria-label", label);
  return found;
}

// Show the task of a server that loads its model. null: the model is loaded.
function loading(state) {
  $("loading").hidden = !state;
  if (!state) return;
  const { task, done, total } = state;
  $("loading-text").textContent = `Loading the model${task ? `: ${task}` : ""}`;
  if (total) $("loaded").value = done / total;
  else $("loaded").removeAttribute("value");
}

async function statistics() {
  if (document.hidden) return;
  try {
    const answer = await server("v1/load");
    const state = answer.status === STARTING ? await answer.json() : null;
    if (state?.status === "loading") { loading(state); return; }
    if (!begun || !$("loading").hidden) { loading(null); await begin(); }
    if (answer.status === 401) { complain("This server requires an API key: enter it in the settings."); settings.open(); return; }
    const load = await answer.json();
    const held = make("span", `${size(load.pool_used_bytes)} of ${size(load.pool_limit_bytes)} `);
    held.append(meter(load.pool_used_bytes, load.pool_limit_bytes, "KV in host memory"));
    rows($("tiers"), [
      ["Weights", size(load.weight_bytes)], ["KV on the device", size(load.device_kv_bytes)],
      ["KV in host memory", held], ["Kept for prefix caching", size(load.kept_bytes)],
      ["KV and sessions on disk", size(load.store_bytes)],
    ]);
    rows($("load"), [
      ["Running", count(load.running)], ["Waiting", count(load.waiting)],
      ["Prompt tokens", count(load.prompt_tokens)], ["Reused from the prefix cache", count(load.cached_tokens)],
      ["Cached tokens from host memory", count(load.host_hit_tokens)],
      ["Cached tokens from disk", count(load.disk_hit_tokens)], ["Lost and recomputed", count(load.lost_tokens)],
      ["New tokens", count(load.generated_tokens)], ["KV transferred", size(load.h2d_bytes)],
    ]);
  } catch {
    rows($("load"), [["No connection", "—"]]);
  }
}

// Show the statistics again and again, more often while the model is loaded.
async function watch() {
  await statistics();
  setTimeout(watch, $("loading").hidden ? 2000 : 300);
}

async function begin() {
  begun = true;
  try {
    await named(); // first, because answers are labelled with the model name
    await sessions.begin();
  } catch (error) {
    begun = false; // the next call of statistics() tries again
    throw error;
  }
  opened();
}

async function named() {
  const answer = await server("v1/models");
  if (!answer.ok) return;
  const [model] = (await answer.json()).data;
  chat.model = model.id;
  composer.limit = model.max_model_len;
  $("model").textContent = model.id;
  settings.offer(model);
  if (!abort) chat.draw();
}

// ------------------------------------------------------------------------------------------------------------- columns

const narrow = matchMedia("(max-width: 60rem)"); // the columns cover the conversation

function setColumn(name, open) {
  $(name).hidden = !open;
  $(`${name}-toggle`).setAttribute("aria-expanded", open);
  if (!narrow.matches) store(`${name} closed`, open ? null : "1");
  else if (open) setColumn(name === "aside" ? "nav" : "aside", false);
}

function setColumns() {
  for (const name of ["nav", "aside"]) {
    const open = !narrow.matches && stored(`${name} closed`) === null;
    $(name).hidden = !open;
    $(`${name}-toggle`).setAttribute("aria-expanded", open);
  }
}

for (const name of ["nav", "aside"]) $(`${name}-toggle`).addEventListener("click", () => setColumn(name, $(name).hidden));
narrow.addEventListener("change", setColumns);
setColumns();

// -------------------------------------------------------------------------------------------------------------- events

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (abort) abort();
  else if (narrow.matches) for (const name of ["nav", "aside"]) setColumn(name, false);
});
$("stop").addEventListener("click", () => { if (abort) abort(); });
$("fresh").addEventListener("click", () => {
  sessions.fresh();
  if (narrow.matches) setColumn("nav", false);
  say("New conversation started.");
  $("text").focus();
});
$("session-list").addEventListener("click", (event) => { if (narrow.matches && event.target.matches(".title")) setColumn("nav", false); });
$("export-markdown").addEventListener("click", () => exportMarkdown(sessions.title, chat.messages));
$("export-json").addEventListener("click", () => exportJson(sessions.title, chat.messages));
$("export-all").addEventListener("click", async () => exportAll(await sessions.all()));
$("log").addEventListener("click", (event) => { // a sentence shows its sources
  const body = event.target.closest("article.assistant .text");
  if (!body || abort || event.target.closest("a, button") || getSelection().toString()) return;
  const message = chat.messages[[...$("log").children].indexOf(body.closest("article"))];
  if (!message.traces) return;
  if (sources.shown() !== message) sources.show(message, body);
  const sentence = document.elementFromPoint(event.clientX, event.clientY)?.closest(".sentence");
  if (sentence) sources.choose(sentence);
  setColumn("aside", true);
});
$("key").addEventListener("change", async () => {
  try { sessionStorage.setItem("offload-rt key", $("key").value); } catch { /* no storage */ }
  complain("");
  await begin();
});

watch();

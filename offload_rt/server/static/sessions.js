// The column of conversations: those of the server if it stores sessions, else one in the browser.
import { $, button, complain, download, make, post, reason, say, server, store, stored } from "./basics.js";
import { decoded, encodedAll } from "./conversation.js";

const UNDO = 8000; // milliseconds until a deletion is final
const WAIT = 250; // milliseconds without input before a search

export class Sessions {
  // leave() ends what runs in the current conversation, open(messages) shows another one.
  constructor(leave, open) {
    this.leave = leave;
    this.open = open;
    this.kept = false; // whether the server stores sessions
    this.found = []; // sessions of the server
    this.matches = null; // those that contain the words of a search
    this.timer = null;
    this.name = stored("session") || fresh();
    this.deleting = new Map(); // name -> timer of its deletion
    $("search").addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.search(), WAIT); });
    $("undo").addEventListener("click", () => this.undo());
    addEventListener("pagehide", () => { for (const name of this.deleting.keys()) this.remove(name, { keepalive: true }); });
  }

  async begin() {
    await this.list();
    if (this.kept) await this.show(this.name, true);
    else this.open(here());
  }

  async list() {
    try {
      const answer = await server("v1/sessions");
      if (!answer.ok) return;
      const { store: kept, data } = await answer.json();
      [this.kept, this.found] = [kept, data];
      $("stored").hidden = $("export-all").hidden = !kept;
      $("unstored").hidden = kept;
      await this.search();
    } catch { /* the statistics of the server show that there is no connection */ }
  }

  async search() {
    const query = $("search").value.trim();
    this.matches = null;
    if (query) {
      const answer = await server(`v1/sessions?query=${encodeURIComponent(query)}`);
      if (query !== $("search").value.trim()) return; // a later search draws
      if (answer.ok) this.matches = (await answer.json()).data;
    }
    this.draw();
  }

  draw() {
    const listed = (this.matches ?? this.found).filter(({ id }) => !this.deleting.has(id));
    $("session-list").replaceChildren(...listed.map((each) => this.entry(each)));
    $("no-session").textContent = listed.length ? "" : this.matches ? "No conversation contains these words." : "No conversations yet.";
  }

  entry(each) {
    const item = make("li"), title = each.title || "Untitled", open = button(title, () => this.show(each.id));
    open.className = "title";
    if (each.excerpt) open.append(make("small", `… ${each.excerpt} …`));
    open.title = `${title}\n${each.turns} questions, ${new Date(each.updated * 1000).toLocaleString()}`;
    const rename = button("✎", () => this.rename(each, item), `Rename ${title}`);
    const away = button("×", () => this.delete(each), `Delete ${title}`);
    away.classList.add("away");
    rename.classList.add("rename");
    if (each.id === this.name) open.setAttribute("aria-current", "true");
    item.append(open, rename, away);
    return item;
  }

  async show(name, quietly = false) {
    this.leave();
    const known = this.found.some(({ id }) => id === name);
    const answer = known ? await server(`v1/sessions/${encodeURIComponent(name)}`) : null;
    this.name = name;
    store("session", name);
    this.open(answer?.ok ? (await answer.json()).messages.map(decoded).filter(({ role }) => role !== "system") : []);
    this.draw();
    if (!quietly) { say("Conversation restored."); $("text").focus(); }
  }

  rename(each, item) {
    const field = make("input");
    field.value = each.title;
    field.maxLength = 200;
    field.setAttribute("aria-label", "New title");
    let ended = false;
    const end = async (save) => {
      if (ended) return;
      ended = true;
      const title = field.value.trim();
      if (save && title && title !== each.title) await this.update(each.id, { title });
      await this.list();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }

  async update(name, changes) {
    const answer = await post(`v1/sessions/${encodeURIComponent(name)}`, changes);
    if (!answer.ok) say(reason(await answer.text(), answer.status));
  }

  // Delete after `UNDO` milliseconds.
  delete(each) {
    this.deleting.set(each.id, setTimeout(() => this.remove(each.id), UNDO));
    $("toast-text").textContent = `Deleted “${(each.title || "Untitled").slice(0, 40)}”.`;
    $("toast").hidden = false;
    this.undone = each.id === this.name ? this.name : null;
    if (each.id === this.name) this.fresh();
    this.draw();
  }

  async undo() {
    const name = [...this.deleting.keys()].at(-1);
    clearTimeout(this.deleting.get(name));
    this.deleting.delete(name);
    $("toast").hidden = true;
    if (this.undone === name) await this.show(name, true);
    this.draw();
    say("Restored.");
  }

  async remove(name, options = {}) {
    clearTimeout(this.deleting.get(name));
    try {
      const answer = await server(`v1/sessions/${encodeURIComponent(name)}`, { method: "DELETE", ...options });
      if (!answer.ok) complain(`The conversation was not deleted. ${reason(await answer.text(), answer.status)}`);
    } catch {
      complain("The conversation was not deleted, because the server does not respond.");
    }
    this.deleting.delete(name);
    $("toast").hidden = this.deleting.size === 0;
    await this.list();
  }

  fresh() {
    this.leave();
    this.name = fresh();
    store("session", this.name);
    this.open([]);
    if (!this.kept) store("conversation", "[]");
    this.draw();
  }

  // Call this after messages have changed. `stored`: whether the server has stored them with the request.
  async keep(messages, stored) {
    store("session", this.name);
    if (this.kept) {
      if (!stored && messages.length) await this.update(this.name, { messages: encodedAll(messages) });
      await this.list();
    } else if (!store("conversation", JSON.stringify(messages.map(({ traces, ...kept }) => kept)))) {
      say("This conversation is too long for the browser's storage and will be lost when the page is closed.");
    }
  }

  // All stored conversations with their messages.
  async all() {
    return Promise.all(this.found.map(async ({ id, title }) => {
      const answer = await server(`v1/sessions/${encodeURIComponent(id)}`);
      return { title, messages: answer.ok ? (await answer.json()).messages.map(decoded) : [] };
    }));
  }

  get title() {
    return this.found.find(({ id }) => id === this.name)?.title || "Conversation";
  }
}

export function exportMarkdown(title, messages) {
  const parts = messages.map(({ role, content, files = [] }) => {
    const attached = files.map(({ name, text }) => `Attached ${name}:\n\n\`\`\`\`\n${text}\n\`\`\`\`\n`);
    return [`## ${role === "user" ? "You" : "Answer"}`, ...attached, content].join("\n\n");
  });
  download(`${fileName(title)}.md`, `${[`# ${title}`, ...parts].join("\n\n")}\n`, "text/markdown");
}

export function exportJson(title, messages) {
  download(`${fileName(title)}.json`, JSON.stringify({ title, messages: messages.map(({ traces, ...kept }) => kept) }, null, 2), "application/json");
}

export function exportAll(conversations) {
  download("conversations.json", JSON.stringify(conversations, null, 2), "application/json");
}

const fileName = (title) => title.replace(/[^\p{L}\p{N} ._-]+/gu, "").trim().slice(0, 60) || "conversation";

function fresh() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function here() {
  try {
    const found = JSON.parse(stored("conversation") || "[]");
    return Array.isArray(found) ? found.filter((m) => typeof m.content === "string") : [];
  } catch { return []; }
}

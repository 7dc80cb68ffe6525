// Stored conversations: those of the server if it stores sessions, else one in the browser.
import { $, make, say, server, store, stored } from "./basics.js";

export class Sessions {
  // open(messages) shows a conversation.
  constructor(open) {
    this.open = open;
    this.kept = false; // whether the server stores sessions
    this.known = []; // ids of the sessions on the server
    this.name = stored("session") || fresh();
  }

  // Session field of a request.
  get field() { return this.kept ? { session: this.name } : {}; }

  async begin() {
    await this.list();
    if (this.kept) await this.show(this.name, true);
    else this.open(here());
  }

  async list() {
    try {
      const answer = await server("v1/sessions");
      if (!answer.ok) return;
      const found = await answer.json();
      this.kept = found.store;
      this.known = found.data.map((each) => each.id);
      $("sessions").hidden = !found.store;
      $("session-list").replaceChildren(...found.data.map((each) => this.entry(each)));
    } catch { /* the server statistics show that there is no connection */ }
  }

  entry(each) {
    const item = make("li"), open = make("button", each.title || "Untitled"), away = make("button", "×", "away");
    open.type = away.type = "button";
    open.title = `${each.turns} questions, ${new Date(each.updated * 1000).toLocaleString()}`;
    if (each.id === this.name) open.setAttribute("aria-current", "true");
    away.setAttribute("aria-label", `Delete ${each.title || "Untitled"}`);
    open.addEventListener("click", () => this.show(each.id));
    away.addEventListener("click", () => this.remove(each.id));
    item.append(open, away);
    return item;
  }

  async show(name, quietly = false) {
    const answer = this.known.includes(name) ? await server(`v1/sessions/${encodeURIComponent(name)}`) : null;
    this.name = name;
    store("session", name);
    this.open(answer?.ok ? (await answer.json()).messages.map(shown) : []);
    await this.list();
    if (!quietly) { say("Conversation restored."); $("text").focus(); }
  }

  async remove(name) {
    await server(`v1/sessions/${encodeURIComponent(name)}`, { method: "DELETE" });
    if (name === this.name) this.fresh();
    await this.list();
    say("Deleted.");
  }

  fresh() {
    this.name = fresh();
    store("session", this.name);
    this.open([]);
    if (!this.kept) store("conversation", "[]");
    for (const button of $("session-list").querySelectorAll("[aria-current]")) button.removeAttribute("aria-current");
  }

  // Call this after messages have changed.
  async keep(messages) {
    store("session", this.name);
    if (this.kept) await this.list();
    else if (!store("conversation", JSON.stringify(messages))) {
      say("This conversation is too long for the browser's storage and will be lost when the page is closed.");
    }
  }
}

function fresh() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function here() {
  try {
    const found = JSON.parse(stored("conversation") || "[]");
    return Array.isArray(found) ? found.filter((m) => typeof m.content === "string") : [];
  } catch { return []; }
}

// Convert a message from the server. An attached file precedes the question in its content.
function shown(message) {
  const content = typeof message.content === "string" ? message.content : "";
  if (!message.file_name) return { role: message.role, content, thought: message.reasoning_content };
  const text = content.slice(0, message.file_length);
  return { role: message.role, content: content.slice(message.file_length + 2), file: { name: message.file_name, text } };
}

// The conversation: its messages, how they are drawn, and the actions of each message.
// A message: {role, content, thought, files: [{name, text}], finish, traces, failed}.
import { $, button, copy, count, make } from "./basics.js";
import { render } from "./render.js";

const SHOWN_FILE = 2000; // maximum number of characters shown of an attached file

export class Conversation {
  // `actions`: {edit(index), regenerate(), proceed(), sources(message, body)}.
  constructor(actions) {
    this.actions = actions;
    this.messages = [];
    this.model = "";
    this.busy = false;
  }

  open(messages) {
    this.messages = messages;
    this.draw();
  }

  draw() {
    $("log").replaceChildren(...this.messages.map((message, i) => this.drawn(message, i)));
    $("log").scrollTop = $("log").scrollHeight;
    $("welcome").hidden = this.messages.length > 0;
  }

  // Draw the last message again while it grows. Scroll only if its end was visible.
  grow() {
    const log = $("log"), article = log.lastElementChild, message = this.messages.at(-1);
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    if (message.thought && !article.querySelector(".thought")) article.querySelector(".text").before(folded("Thinking", "", "thought"));
    if (message.thought) article.querySelector(".thought pre").textContent = message.thought;
    render(article.querySelector(".text"), message.content);
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  // The last message is complete.
  end() {
    const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    this.busy = false;
    this.messages.forEach((message, i) => {
      const article = log.children[i], text = article.querySelector(".text");
      render(text, message.content);
      article.querySelector(".actions").replaceWith(this.actionsOf(message, i, text));
      if (message.failed) article.replaceWith(this.drawn(message, i));
    });
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  bodyOf(message) { return $("log").children[this.messages.indexOf(message)]?.querySelector(".text"); }

  drawn(message, index) {
    const article = make("article", "", message.role), text = make("div", "", "text");
    article.append(make("h2", { user: "You", system: "System" }[message.role] || this.model || "Answer"));
    for (const { name, text: content } of message.files || []) {
      const part = content.slice(0, SHOWN_FILE) + (content.length > SHOWN_FILE ? "\n…" : "");
      article.append(folded(`${name} (${count(content.length)} characters)`, part));
    }
    if (message.thought) article.append(folded("Thinking", message.thought, "thought"));
    render(text, message.content);
    article.append(text);
    if (message.failed) {
      article.classList.add("failed");
      article.append(make("p", message.failed));
    }
    article.append(this.actionsOf(message, index, text));
    return article;
  }

  actionsOf(message, index, body) {
    const row = make("div", "", "actions"), last = index === this.messages.length - 1;
    if (this.busy) return row;
    const add = (text, action, label) => row.append(button(text, action, label));
    if (message.content) add("Copy", () => copy(message.content), "Copy the message");
    if (message.role === "user") add("Edit", () => this.actions.edit(index), "Edit the message");
    if (message.role !== "assistant") return row;
    if (last) add("Regenerate", () => this.actions.regenerate(), "Regenerate the answer");
    if (last && message.content && message.finish !== "stop") add("Continue", () => this.actions.proceed(), "Continue the answer");
    if (message.traces) add("Sources", () => this.actions.sources(message, body), "Show the sources of the answer");
    if (message.finish === "length") row.append(make("span", "Stopped at the maximum number of new tokens.", "soft"));
    return row;
  }
}

function folded(title, text, kind) {
  const details = make("details", "", kind), shown = make("pre", text);
  shown.tabIndex = 0;
  details.append(make("summary", title), shown);
  return details;
}

// -------------------------------------------------------------------------------------------- messages of the protocol

// Attached files precede the question, so that their KV is found again when another question follows.
const prefixed = ({ name, text }) => `${name}\n\n${text}\n\n`;

export function encoded({ role, content, files, thought }) {
  const message = { role, content };
  if (thought) message.reasoning_content = thought;
  if (!files?.length) return message;
  message.content = files.map(prefixed).join("") + content;
  message.files = files.map(({ name, text }) => ({ name, length: text.length }));
  return message;
}

export function decoded(message) {
  const found = { role: message.role, thought: message.reasoning_content, files: [] };
  let content = typeof message.content === "string" ? message.content : "";
  for (const { name, length } of message.files || []) {
    const from = name.length + 2;
    found.files.push({ name, text: content.slice(from, from + length) });
    content = content.slice(from + length + 2);
  }
  return { ...found, content };
}

// The answered questions with their answers, and the newest question.
export function encodedAll(messages) {
  return messages.filter((message, i) => {
    const next = messages[i + 1];
    if (message.failed || next?.failed) return false;
    return message.role !== "user" || !next || next.role === "assistant";
  }).map(encoded);
}

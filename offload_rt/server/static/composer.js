// The message box: text, attached files, token count, truncation of texts that are too long.
import { $, button, complain, count, make, post, reason, say, size } from "./basics.js";

const WAIT = 400; // milliseconds without input before tokens are counted
const TOO_LONG = ["context_length_exceeded", "pool_full"]; // error codes
const TOO_LARGE = 413;
const PROBES = 12; // requests to find the longest text that fits
const GAP = "\n\n[…]\n\n";

const CUTS = {
  beginning: (text, length) => text.slice(0, length),
  end: (text, length) => text.slice(text.length - length),
  "both ends": (text, length) => text.slice(0, length / 2) + GAP + text.slice(text.length - length / 2),
};

export class Composer {
  // `messages(draft, editing)`: the messages of a request with the draft {text, files}. `submit(draft, editing)`: send it.
  // `answer()`: requested number of new tokens. `ready`: promise that the server has answered, before which nothing is sent.
  constructor({ messages, submit, answer, ready }) {
    Object.assign(this, { messages, submit, answer, ready });
    this.files = []; // {name, text, of}: `of` is the length before truncation
    this.limit = 0; // tokens of prompt and answer
    this.editing = null; // index of the edited message
    this.saved = null; // draft before truncation
    this.counting = null;
    this.timer = null;
    this.listen();
  }

  get draft() { return { text: $("text").value.trim(), files: this.files }; }

  get empty() { return !this.draft.text && !this.files.length; }

  clear() { this.load({ text: "", files: [] }, null); }

  // Fill the box, for example with a message to edit or one that was refused.
  load({ text, files }, editing) {
    $("text").value = text;
    this.files = [...(files || [])];
    this.editing = editing;
    this.saved = null;
    this.changed();
  }

  changed() {
    $("editing").hidden = this.editing === null;
    $("files").replaceChildren(...this.files.map((file) => this.chip(file)));
    $("too-long").hidden = true;
    $("uncut").hidden = this.saved === null;
    complain("");
    clearTimeout(this.timer);
    this.counting?.abort();
    if (this.empty) $("tokens").textContent = "";
    else this.timer = setTimeout(() => this.check(), WAIT);
  }

  chip(file) {
    const item = make("li"), whole = file.of > file.text.length ? ` of ${count(file.of)}` : "";
    item.append(make("span", `${file.name} (${count(file.text.length)}${whole} characters)`));
    item.append(button("×", () => {
      this.files = this.files.filter((each) => each !== file);
      this.changed();
      $("text").focus();
    }, `Remove ${file.name}`));
    return item;
  }

  // ------------------------------------------------------------------------------------------------------------ files

  async add(list) {
    for (const file of list) {
      const before = $("status").textContent;
      say(`Reading ${file.name}…`);
      try {
        const bytes = new Uint8Array(await file.arrayBuffer());
        if (bytes.subarray(0, 8192).includes(0)) {
          say(before);
          complain(`${file.name} is not a text file.`);
          continue;
        }
        const text = new TextDecoder().decode(bytes).replace(/\r\n?/g, "\n");
        this.files.push({ name: file.name, text, of: text.length });
        say(`${file.name} (${size(file.size)}) will be sent with the next message.`);
      } catch {
        say(before);
        complain(`${file.name} could not be read.`);
      }
    }
    const problem = $("problem").textContent;
    this.changed();
    complain(problem);
    $("text").focus();
  }

  // ----------------------------------------------------------------------------------------------------------- counting

  // Tokens of the request with this draft: {tokens, over, message}. `tokens` is 0 if unknown.
  async tokens(draft, signal) {
    const answer = await post("tokenize", { messages: this.messages(draft, this.editing), return_tokens: false }, { signal });
    const text = await answer.text();
    if (answer.ok) {
      const { count: tokens, max_model_len: limit } = JSON.parse(text);
      this.limit = limit;
      return { tokens, over: tokens >= limit, message: "" };
    }
    let code = "";
    try { code = JSON.parse(text).error.code; } catch { /* not JSON */ }
    const over = answer.status === TOO_LARGE || TOO_LONG.includes(code);
    return { tokens: 0, over, message: reason(text, answer.status) };
  }

  // Count and show. Return whether the draft fits, null if it was changed meanwhile.
  async check() {
    clearTimeout(this.timer);
    this.counting?.abort();
    const counting = this.counting = new AbortController();
    try {
      const { tokens, over, message } = await this.tokens(this.draft, counting.signal);
      const left = this.limit - tokens, wanted = this.answer();
      $("too-long").hidden = !over;
      $("tokens").textContent = tokens ? `${count(tokens)} of ${count(this.limit)} tokens` : over ? `more than ${count(this.limit)} tokens` : "";
      if (tokens && !over && left < wanted) $("tokens").textContent += `, ${count(left)} left for the answer`;
      $("tokens").classList.toggle("over", over);
      if (over) {
        const exact = tokens ? `The message has ${count(tokens)} tokens with the conversation` : message.replace(/^./, (c) => c.toUpperCase());
        $("too-long-text").textContent = tokens ? `${exact}; prompt and answer have room for ${count(this.limit)}.` : exact;
      }
      return !over;
    } catch (error) {
      return error.name === "AbortError" ? null : true; // without a connection, the request itself shows the error
    }
  }

  // Shorten the longest part of the draft until the request fits and leaves room for the answer.
  async cut(kind) {
    const whole = this.draft, room = Math.max(1, this.limit - Math.min(this.answer(), Math.floor(this.limit / 4)));
    const parts = [whole.text, ...whole.files.map(({ text }) => text)];
    const longest = parts.reduce((best, text, i) => (text.length > parts[best].length ? i : best), 0);
    const cutTo = (length) => {
      const text = CUTS[kind](parts[longest], length);
      return longest === 0 ? { ...whole, text } : { ...whole, files: whole.files.map((file, i) => (i === longest - 1 ? { ...file, text } : file)) };
    };
    say("Shortening…");
    let fits = 0, fails = parts[longest].length, guess = Math.min(fails, room * 3);
    for (let i = 0; i < PROBES && fails - fits > 0.02 * fits + 8; i++) {
      const { tokens, over } = await this.tokens(cutTo(guess));
      if (!over && tokens <= room) fits = guess;
      else fails = guess;
      const rate = tokens ? guess / tokens : 0;
      const aimed = Math.floor(rate * room * 0.99);
      guess = aimed > fits && aimed < fails ? aimed : Math.floor((fits + fails) / 2);
    }
    if (!fits) { say(""); complain("The conversation itself is too long. Begin a new conversation, or edit an earlier message."); return; }
    this.load(cutTo(fits), this.editing);
    this.saved = whole;
    $("uncut").hidden = false;
    say(`Shortened to ${count(fits)} of ${count(parts[longest].length)} characters.`);
  }

  // ------------------------------------------------------------------------------------------------------------- events

  async send() {
    if (this.empty || $("send").disabled) return;
    $("send").disabled = true;
    say("Waiting for the server…");
    await this.ready;
    say("");
    let fits = null;
    while (fits === null) fits = await this.check();
    $("send").disabled = false;
    if (!fits) { say("The message is too long and was not sent."); return; }
    const { draft, editing } = this;
    this.clear();
    this.submit(draft, editing);
  }

  listen() {
    $("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("text").addEventListener("input", () => { this.saved = null; this.changed(); });
    $("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("ask").requestSubmit();
    });
    $("upload").addEventListener("change", async () => { await this.add([...$("upload").files]); $("upload").value = ""; });
    $("text").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
    for (const kind of ["dragover", "dragenter"]) {
      document.addEventListener(kind, (event) => {
        if (![...event.dataTransfer.types].includes("Files")) return;
        event.preventDefault();
        document.body.classList.add("dropping");
      });
    }
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
    document.addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    $("cut-beginning").addEventListener("click", () => this.cut("beginning"));
    $("cut-end").addEventListener("click", () => this.cut("end"));
    $("cut-both").addEventListener("click", () => this.cut("both ends"));
    $("uncut").addEventListener("click", () => this.load(this.saved, this.editing));
    $("editing-cancel").addEventListener("click", () => this.clear());
  }
}

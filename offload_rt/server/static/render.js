// Render Markdown: marked parses it, DOMPurify sanitizes it, highlight.js colours code.
import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { button, copy, make } from "./basics.js";

const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text), // a model's HTML is shown as text
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    image({ href, text }) { return `<a href="${escaped(href)}">${escaped(text || href)}</a>`; }, // images are not loaded
  },
});

const CLEAN = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#)/i,
  RETURN_DOM_FRAGMENT: true,
};

// Show `text` in `parent`. Blocks that did not change since the last call keep their elements.
export function render(parent, text) {
  const blocks = [...parent.children];
  let at = 0, from = 0;
  for (const token of marked.lexer(text)) {
    const { raw } = token, start = from;
    from += raw.length;
    if (token.type === "space" || token.type === "def") continue;
    if (blocks[at]?.raw !== raw) {
      const made = block(token);
      made.raw = raw;
      if (blocks[at]) blocks[at].replaceWith(made);
      else parent.append(made);
      blocks[at] = made;
    }
    blocks[at++].from = start;
  }
  blocks.slice(at).forEach((old) => old.remove());
}

function block(token) {
  const made = make("div", "", "block");
  made.append(globalThis.DOMPurify.sanitize(marked.parser([token]), CLEAN));
  for (const link of made.querySelectorAll("a[href]")) {
    link.rel = "noopener noreferrer";
    link.target = "_blank";
  }
  for (const heading of made.querySelectorAll("h1, h2, h3, h4, h5, h6")) { // below the headings of the page
    const level = Number(heading.localName[1]) + 2;
    heading.setAttribute("role", "heading");
    heading.setAttribute("aria-level", level);
  }
  for (const table of made.querySelectorAll("table")) table.replaceWith(scrolled(table, "Table"));
  for (const pre of made.querySelectorAll("pre")) pre.replaceWith(program(pre));
  return made;
}

// A wide element scrolls sideways, also with the keyboard.
function scrolled(element, label) {
  const around = make("div", "", "scroll");
  around.tabIndex = 0;
  around.setAttribute("role", "region");
  around.setAttribute("aria-label", label);
  around.append(element.cloneNode(true));
  return around;
}

function program(pre) {
  const text = pre.textContent.replace(/\n$/, "");
  const named = pre.querySelector("code")?.className.match(/language-([\w+#.-]+)/)?.[1] || "";
  const figure = make("figure", "", "program"), bar = make("figcaption"), code = make("code", text);
  bar.append(make("span", hljs.getLanguage(named)?.name || named || "Text"), button("Copy", () => copy(text), "Copy the code"));
  if (hljs.getLanguage(named)) {
    const coloured = hljs.highlight(text, { language: named, ignoreIllegals: true }).value;
    code.replaceChildren(globalThis.DOMPurify.sanitize(coloured, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
  }
  const shown = make("pre");
  shown.append(code);
  const held = scrolled(shown, "Code");
  figure.append(bar, held);
  return figure;
}

// ---------------------------------------------------------------------------------------------------------- sentences

const SEGMENTER = new Intl.Segmenter("en", { granularity: "sentence" });
const UNITS = "p, li, h1, h2, h3, h4, h5, h6, td, th, pre";

// Split a rendered text into sentences. Return, for each, its elements and its range in the Markdown source.
export function sentences(parent) {
  const found = [];
  for (const held of parent.querySelectorAll(":scope > .block")) {
    const aligned = alignment(held.raw);
    for (const nodes of textNodes(held)) {
      const text = nodes.map((node) => node.data).join("");
      const places = aligned(text);
      const whole = nodes[0].parentElement.closest("pre") !== null;
      const cuts = whole ? [0] : [...SEGMENTER.segment(text)].map((each) => each.index);
      cuts.push(text.length);
      const elements = wrap(nodes, cuts);
      elements.forEach((pieces, i) => {
        if (!text.slice(cuts[i], cuts[i + 1]).trim()) return;
        const sentence = { elements: pieces, from: held.from + places[cuts[i]], to: held.from + places[cuts[i + 1] - 1] + 1, text: text.slice(cuts[i], cuts[i + 1]).trim() };
        found.push(sentence);
      });
    }
  }
  return found;
}

// Text nodes of a block, grouped by the paragraph, item or cell that contains them.
function textNodes(held) {
  const walker = document.createTreeWalker(held, NodeFilter.SHOW_TEXT), groups = [];
  let unit = null;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("figcaption") || node.parentElement.matches("ul, ol, table, thead, tbody, tr")) continue;
    const own = node.parentElement.closest(UNITS);
    if (!own) continue;
    if (own !== unit) groups.push([]);
    unit = own;
    groups.at(-1).push(node);
  }
  return groups;
}

// Rendered characters are a subsequence of the source: find each of them close to the previous one.
function alignment(raw) {
  let at = 0;
  return (text) => [...Array(text.length).keys()].map((i) => {
    const next = raw.indexOf(text[i], at);
    if (next >= 0 && next - at < 60) at = next + 1;
    return Math.max(0, at - 1);
  });
}

// Put the text between two cuts into elements of its own.
function wrap(nodes, cuts) {
  const made = cuts.slice(1).map(() => []);
  let from = 0, sentence = 0;
  for (const node of nodes) {
    const parts = [];
    for (let at = 0; at < node.data.length;) {
      while (cuts[sentence + 1] <= from + at) sentence++;
      const end = Math.min(node.data.length, cuts[sentence + 1] - from);
      const piece = make("span", node.data.slice(at, end), "sentence");
      made[sentence].push(piece);
      parts.push(piece);
      at = end;
    }
    from += node.data.length;
    node.replaceWith(...parts);
  }
  return made;
}

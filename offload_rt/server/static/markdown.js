// Render the Markdown that models usually write: code, headings, lists, emphasis, links.
import { make } from "./basics.js";

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

export function markdown(parent, text) {
  let open = null; // list or paragraph to which lines are added
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

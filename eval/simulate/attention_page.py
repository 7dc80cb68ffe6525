"""One HTML page of a recorded run: the whole text, and for each generated sentence the passages that it read.

A passage is a sentence of the text (at most PASSAGE_TOKENS tokens). A generated sentence's reading of a passage is the
share of (written token, layer, KV head, passage token) for which the token was selected. Sinks and the recent window
are attended in any case and are no selection: they are not shaded. The page needs nothing from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.recording import Recording
from ...errors import InputError
from ..core.report import write_atomic
from .selection_replay import reads

PASSAGE_TOKENS = 80

_END = re.compile(r"[.!?…][\"'”’)\]]*\s*$|\n\s*$")


@dataclass(frozen=True)
class Sentence:
    """Tokens [start, stop), a sentence or a piece of one."""

    start: int
    stop: int
    text: str


def passages(pieces: Sequence[str], prompt_tokens: int) -> list[Sentence]:
    """The text cut into sentences; none crosses from the prompt into what was generated."""
    found, start = [], 0
    for i in range(len(pieces)):
        last = i + 1 in (prompt_tokens, len(pieces))
        long = i + 1 - start >= PASSAGE_TOKENS
        ended = _END.search("".join(pieces[max(start, i - 3) : i + 1]))
        if last or long or (ended and not _opens(pieces, i)):
            found.append(Sentence(start, i + 1, "".join(pieces[start : i + 1])))
            start = i + 1
    return found


def _opens(pieces: Sequence[str], i: int) -> bool:
    """Whether the sentence goes on: what follows is a closing mark, white space or more dots."""
    following = pieces[i + 1] if i + 1 < len(pieces) else "x"
    return not following.strip() or following[0] in ".!?…\"'”’)]"


def readings(recording: Recording, cut: Sequence[Sentence]) -> NDArray[np.float64]:
    """`[generated passages, passages]`: how much each generated passage read of each, 0 to 1."""
    info = recording.info
    of_token = np.repeat(np.arange(len(cut)), [p.stop - p.start for p in cut])
    first = sum(p.start < info.prompt_tokens for p in cut)
    counts = np.zeros((len(cut) - first, len(cut)))
    written = np.zeros(len(cut) - first)
    for position, step in reads(recording):
        reader = of_token[position] - first
        written[reader] += 1
        for rows in step:
            counts[reader] += np.bincount(of_token[rows.reshape(-1)], minlength=len(cut))
    sizes = np.array([p.stop - p.start for p in cut], float)
    cells = np.maximum(written, 1)[:, None] * sizes * info.kv_heads * max(1, len(info.selecting))
    share: NDArray[np.float64] = counts / cells
    return share


def write_page(recording: Recording, path: Path) -> None:
    """Raises InputError where the recording has no text or the file cannot be written."""
    info = recording.info
    if not info.pieces or len(info.pieces) != len(info.tokens):
        raise InputError(f"{str(recording.folder)!r} holds no text (no tokenizer, or the run was killed): no page")
    cut = passages(info.pieces, info.prompt_tokens)
    share = readings(recording, cut)
    if not share.size:
        raise InputError(f"{str(recording.folder)!r} holds no generated text: no page")
    data = {
        "first": len(cut) - len(share),
        "texts": [p.text for p in cut],
        "reads": [[[i, round(float(v), 4)] for i, v in enumerate(row) if v >= 5e-5] for row in share],
    }
    about = (
        f"{info.model}, policy {info.policy}, {info.prompt_tokens:,} prompt tokens and "
        f"{len(info.tokens) - info.prompt_tokens:,} generated; {len(info.selecting)} of {info.layers} layers select, "
        f"{info.kv_heads} KV heads; {info.sinks} first and {info.recent} latest tokens are always read and not shaded"
    )
    write_atomic(path, _PAGE.replace("@ABOUT@", _escape(about)).replace("@DATA@", _json(data)))


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>What each sentence read</title>
<style>
:root { --ink: #1d1d1f; --paper: #fdfcf9; --soft: #6b6b70; --line: #d9d6ce; --mark: 214, 105, 0; --pick: #0b57d0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e3; --paper: #17181a; --soft: #a0a0a6; --line: #3a3b3f; --mark: 255, 140, 20; --pick: #8ab4f8; }
}
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.6 Georgia, "Times New Roman", serif; }
header { padding: 14px 24px; border-bottom: 1px solid var(--line); }
h1 { margin: 0 0 2px; font-size: 20px; }
h2 { margin: 0 0 8px; font: 600 13px/1.4 system-ui, sans-serif; color: var(--soft); }
p { margin: 0; font: 13px/1.5 system-ui, sans-serif; color: var(--soft); }
main { display: grid; grid-template-columns: 3fr 2fr; height: calc(100vh - 150px); min-height: 320px; }
section { overflow-y: auto; padding: 16px 24px; position: relative; }
section + section { border-left: 1px solid var(--line); }
.text { white-space: pre-wrap; overflow-wrap: break-word; }
.text span { border-radius: 3px; padding: 1px 0; }
.reader { cursor: pointer; }
.reader:hover { text-decoration: underline; text-decoration-color: var(--pick); }
.reader:focus-visible { outline: 2px solid var(--pick); }
.chosen { box-shadow: inset 0 -2px var(--pick); color: var(--pick); }
.scale { display: inline-block; width: 120px; height: 10px; vertical-align: middle; border: 1px solid var(--line);
  background: linear-gradient(90deg, rgba(var(--mark), 0), rgba(var(--mark), .85)); }
@media (max-width: 800px) { main { grid-template-columns: 1fr; height: auto; } section { max-height: 45vh; } }
</style>
</head>
<body>
<header>
<h1>What each sentence read</h1>
<p>@ABOUT@.</p>
<p>Point at a generated sentence, or click it to keep it (Escape lets go): passages it read are shaded, by the share of
its tokens, layers and heads that selected them.
0 <span class="scale"></span> <span id="most"></span> &middot; <span id="says">nothing chosen</span></p>
</header>
<main>
<section id="left" aria-label="Prompt"><h2>Prompt</h2><div class="text" id="prompt"></div></section>
<section id="right" aria-label="Generated"><h2>Generated</h2><div class="text" id="generated"></div></section>
</main>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const left = document.getElementById("left"), says = document.getElementById("says");
let kept = -1;
const spans = data.texts.map((text, i) => {
  const span = document.createElement("span");
  span.textContent = text;
  const reader = i - data.first;
  if (reader >= 0) {
    span.className = "reader";
    span.tabIndex = 0;
    span.setAttribute("role", "button");
    span.addEventListener("mouseenter", () => { if (kept < 0) show(reader, true); });
    span.addEventListener("focus", () => { if (kept < 0) show(reader, true); });
    span.addEventListener("click", () => keep(reader));
    span.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") {
      event.preventDefault(); keep(reader); } });
  }
  document.getElementById(reader < 0 ? "prompt" : "generated").append(span);
  return span;
});
const most = Math.max(1e-9, ...data.reads.flat().map(read => read[1]));
document.getElementById("most").textContent = (100 * most).toFixed(0) + " %";
function show(reader, scroll) {
  spans.forEach(span => { span.style.backgroundColor = ""; span.removeAttribute("title");
    span.classList.remove("chosen"); });
  if (reader < 0) { says.textContent = "nothing chosen"; return; }
  let best = [-1, 0];
  for (const [passage, share] of data.reads[reader]) {
    spans[passage].style.backgroundColor = "rgba(var(--mark), " + (0.85 * share / most).toFixed(3) + ")";
    spans[passage].title = "read " + (100 * share).toFixed(1) + " %";
    if (passage < data.first && share > best[1]) best = [passage, share];
  }
  spans[data.first + reader].classList.add("chosen");
  says.textContent = data.reads[reader].length + " passages read; the strongest of the prompt: "
    + (100 * best[1]).toFixed(1) + " %";
  if (scroll && best[0] >= 0) {
    const to = spans[best[0]];
    left.scrollTo({ top: to.offsetTop - left.clientHeight / 3, behavior: "smooth" });
  }
}
function keep(reader) { kept = kept === reader ? -1 : reader; show(reader, true); }
document.addEventListener("keydown", event => { if (event.key === "Escape") { kept = -1; show(-1, false); } });
if (location.hash.startsWith("#s")) keep(Math.min(data.reads.length - 1, Number(location.hash.slice(2)) || 0));
else show(Math.min(1, data.reads.length - 1), true);
</script>
</body>
</html>
"""

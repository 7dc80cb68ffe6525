"""Servers of OpenAI's protocol under the load of a program that is not ours (guidellm): one document that all requests
share, a question of each request's own, several connections at a time.

    offload-rt serve MODEL --port 8000 &
    transformers serve MODEL --port 8001 --continuous-batching &
    python scripts/examples/load_table.py --document book.txt --model MODEL \
        --server ours=http://localhost:8000 --server transformers=http://localhost:8001,NAME-THERE

For each number of connections the servers are asked one after the other, while the others have nothing to do. Rows of a
Markdown table are printed as they come. `guidellm` is looked for in PATH, or named with --guidellm: it may lie in an
environment of its own. Its inter-token latency is a mean over each answer's tokens: the percentiles are of those means.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADER = (
    "| Connections | Server | Answered, broken off at the end, failed | Tokens/s | First token p50 / p99 (s) | "
    "Between tokens p50 / p99 (ms) |\n|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Server:
    """label: its name in the table. url: without a path. model: the name under which it knows the model."""

    label: str
    url: str
    model: str

    @classmethod
    def of(cls, text: str) -> Server:
        """LABEL=URL or LABEL=URL,MODEL; without a model, what the server lists first."""
        label, equals, rest = text.partition("=")
        url, _, model = rest.partition(",")
        if not equals or not url:
            raise argparse.ArgumentTypeError(f"expected LABEL=URL or LABEL=URL,MODEL, not {text!r}")
        return cls(label, url.rstrip("/"), model or asked(f"{url.rstrip('/')}/v1/models")["data"][0]["id"])


@dataclass(frozen=True)
class Load:
    """seconds of each run, new tokens of each answer."""

    guidellm: str
    tokenizer: str
    prompts: Path
    seconds: float
    new_tokens: int

    def run(self, server: Server, connections: int) -> dict[str, Any]:
        """What guidellm measured."""
        report = self.prompts.with_name("report.json")
        backend = f"kind=openai_http,target={server.url},model={server.model},max_tokens={self.new_tokens},http2=false"
        command = [
            self.guidellm, "run", "--disable-console", "--backend", backend,
            "--profile", f"kind=concurrent,streams={connections}",
            "--constraint", f"kind=max_duration,seconds={self.seconds:g}",
            "--tokenizer", f"kind=hf_auto,model={self.tokenizer}",
            "--data", f"kind=json_file,path={self.prompts}", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode:
            raise SystemExit(f"guidellm failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]
        return found


def asked(url: str, body: Any = None) -> Any:
    """JSON of an address."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as answer:
        return json.load(answer)


def until_idle(server: Server) -> None:
    """Returns when a server has done what others left behind: it has answered a word of its own."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
    asked(f"{server.url}/v1/chat/completions", body)


def row(server: Server, connections: int, measured: dict[str, Any]) -> str:
    """A line of the table."""
    metrics = measured["metrics"]
    totals = metrics["request_totals"]

    def percentiles(name: str, scale: float, places: int) -> str:
        found = metrics[name]["successful"]
        if not found["count"]:
            return "none"
        return " / ".join(f"{found['percentiles'][which] * scale:.{places}f}" for which in ("p50", "p99"))

    tokens = metrics["output_token_count"]
    made = sum(tokens[kind]["total_sum"] for kind in ("successful", "incomplete"))
    cells = (
        connections,
        server.label,
        f"{totals['successful']}, {totals['incomplete']}, {totals['errored']}",
        f"{made / measured['duration']:.1f}",
        percentiles("time_to_first_token_ms", 1e-3, 2),
        percentiles("inter_token_latency_ms", 1, 0),
    )
    return f"| {' | '.join(map(str, cells))} |"


def write_prompts(path: Path, document: str, tokenizer: str, tokens: int, count: int) -> None:
    """`count` prompts: the document's first `tokens` tokens, and a question that no other has."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer)
    text = made.decode(made(document, add_special_tokens=False)["input_ids"][:tokens])
    questions = (f"{text}\n\nQuestion {i}: which sentence of it is number {i}?" for i in range(count))
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--model", required=True, help="whose tokenizer counts")
    parser.add_argument("--server", type=Server.of, action="append", required=True, metavar="LABEL=URL[,MODEL]")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=1000, help="that differ in their questions")
    parser.add_argument("--guidellm", default="guidellm")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        text = args.document.read_text(encoding="utf-8")
        write_prompts(prompts, text, args.model, args.tokens, args.prompts)
        load = Load(args.guidellm, args.model, prompts, args.seconds, args.new_tokens)
        print(HEADER, flush=True)
        for connections in args.connections:
            for server in args.server:
                print(row(server, connections, load.run(server, connections)), flush=True)
                until_idle(server)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare OpenAI-compatible servers under load with guidellm. All requests share one document and ask different
questions, over several concurrent connections.

    offload-rt serve MODEL --port 8000 &
    transformers serve MODEL --port 8001 --continuous-batching &
    python scripts/examples/load_table.py --document book.txt --model MODEL \
        --server ours=http://localhost:8000 --server transformers=http://localhost:8001,NAME-THERE

For each number of connections, the servers are measured one after another while the others are idle. Rows of a Markdown
table are printed as they finish. `guidellm` is searched in PATH, or given with --guidellm, for example from a separate
environment. Its inter-token latency is the mean over the tokens of an answer; percentiles are taken over these means.
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
    """A server: label in the table, URL without a path, and model name on the server."""

    label: str
    url: str
    model: str

    @classmethod
    def of(cls, text: str) -> Server:
        """Parse LABEL=URL or LABEL=URL,MODEL. Without a model, the first one listed by the server is used."""
        label, equals, rest = text.partition("=")
        url, _, model = rest.partition(",")
        if not equals or not url:
            raise argparse.ArgumentTypeError(f"expected LABEL=URL or LABEL=URL,MODEL, not {text!r}")
        return cls(label, url.rstrip("/"), model or asked(f"{url.rstrip('/')}/v1/models")["data"][0]["id"])


@dataclass(frozen=True)
class Load:
    """Load settings; `seconds` is the duration of each run, `new_tokens` the length of each answer."""

    guidellm: str
    tokenizer: str
    prompts: Path
    seconds: float
    new_tokens: int

    def run(self, server: Server, connections: int) -> dict[str, Any]:
        """Run guidellm and return its results."""
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
    """Request a URL and return the JSON response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as answer:
        return json.load(answer)


def until_idle(server: Server) -> None:
    """Wait until the server has finished its remaining requests, by sending a short request."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
    asked(f"{server.url}/v1/chat/completions", body)


def row(server: Server, connections: int, measured: dict[str, Any]) -> str:
    """Return a row of the table."""
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
    """Write `count` prompts: the first `tokens` tokens of the document, each with a different question."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer)
    text = made.decode(made(document, add_special_tokens=False)["input_ids"][:tokens])
    questions = (f"{text}\n\nQuestion {i}: which sentence of it is number {i}?" for i in range(count))
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Measure all servers and print the table."""
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

"""The script that measures servers under load, with a program in guidellm's place that reports what it was told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripts import load_example
from support.serving import ScriptedEngine, reference_tokenizer, served

from offload_rt.models.source import find_source

GUIDELLM = """#!{python}
import json, sys
flags = [word for word in sys.argv[1:] if word != "--disable-console"]
told = dict(zip(flags[1::2], flags[2::2]))
fields = lambda flag: dict(part.split("=", 1) for part in told[flag].split(","))
prompts = [json.loads(line)["prompt"] for line in open(fields("--data")["path"], encoding="utf-8")]
assert len(set(prompts)) == len(prompts) == 5 and prompts[0].startswith("It was"), prompts
assert fields("--backend")["target"].startswith("http://127.0.0.1:") and fields("--backend")["model"] == "scripted"
streams = int(fields("--profile")["streams"])
some = {{"count": 2, "percentiles": {{"p50": 250.0 * streams, "p99": 500.0 * streams}}}}
none = {{"count": 0, "percentiles": {{}}}}
report = {{
    "duration": 2.0,
    "metrics": {{
        "request_totals": {{"successful": 2, "incomplete": 1, "errored": 0}},
        "output_token_count": {{"successful": {{"total_sum": 60}}, "incomplete": {{"total_sum": 4}}}},
        "time_to_first_token_ms": {{"successful": some}},
        "inter_token_latency_ms": {{"successful": none if streams > 1 else some}},
    }},
}}
json.dump({{"benchmarks": [report]}}, open(fields("--output")["path"], "w"))
"""


@pytest.fixture
def url() -> Iterator[str]:
    with served(ScriptedEngine(reference_tokenizer(), lambda prompt: "Hm.")) as address:
        yield address


def test_a_row_for_each_server_and_load(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, document = tmp_path / "guidellm", tmp_path / "book.txt"
    program.write_text(GUIDELLM.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    document.write_text("It was a dark night. " * 100, encoding="utf-8")
    script: Any = load_example("load_table")
    arguments = [
        "--document",
        str(document),
        "--model",
        str(find_source("reference").place),
        "--guidellm",
        str(program),
    ]
    arguments += ["--server", f"ours={url}", "--server", f"other={url},scripted", "--connections", "1", "8"]
    assert script.main([*arguments, "--tokens", "50", "--prompts", "5"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| 1 | ours | 2, 1, 0 | 32.0 | 0.25 / 0.50 | 250 / 500 |"
    assert rows[3] == "| 8 | other | 2, 1, 0 | 32.0 | 2.00 / 4.00 | none |"
    assert len(rows) == 4
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such option')\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="no such option"):
        script.main([*arguments, "--tokens", "50", "--prompts", "5"])
    with pytest.raises(SystemExit, match="2"):
        script.main([*arguments, "--server", "nothing"])
    assert "LABEL=URL" in capsys.readouterr().err

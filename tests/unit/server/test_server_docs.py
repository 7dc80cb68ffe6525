"""Test that the examples of the serving page run unchanged and that the page at `/` is complete."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
from support.serving import ScriptedEngine, reference_tokenizer, served

import offload_rt.server
from offload_rt.cli.serve import add
from offload_rt.server.options import ServerOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/pages/serving.md").read_text(encoding="utf-8")
STATIC = Path(offload_rt.server.__file__).parent / "static"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(ScriptedEngine(reference_tokenizer(), lambda prompt: "It was Ellis Duckworth.")) as address:
        yield address


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
def test_the_examples_run(url: str) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    script = "set -e\n" + "\n".join(blocks).replace("curl -s", "curl --fail-with-body -s")
    done = subprocess.run(
        ["bash", "-c", script], env={"URL": url, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-500:]
    for said in (
        "Ellis Duckworth",
        "data: [DONE]",
        '"cached_tokens"',
        "input_tokens",
        '"resp_',
        "offload_rt_h2d_bytes",
    ):
        assert said in done.stdout, said


def test_every_flag_of_the_page_exists() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    text = next(iter(parser._subparsers._group_actions[0].choices.values())).format_help()  # type: ignore[union-attr]
    table = PAGE[PAGE.index("## Who may ask") : PAGE.index("## Suites that are not ours")]
    flags = set(re.findall(r"--[a-z][a-z-]+", table))
    assert len(flags) >= 9 and all(flag in text for flag in flags)
    assert str(ServerOptions().max_waiting) in table and f"{ServerOptions().timeout:.0f} s" in table


class Links(HTMLParser):
    """Collect the links, ids and labels of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []
        self.ids: set[str] = set()
        self.labelled: set[str] = set()
        self.fields: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.files += [found[name] or "" for name in ("src", "href") if name in found]
        self.ids |= {found.get("id") or ""}
        if tag == "label":
            self.labelled.add(found["for"] or "")
        if tag in ("input", "textarea"):
            self.fields.add(found["id"] or "")
        assert not any(name.startswith("on") or name == "style" for name in found), "its policy forbids it"


def test_the_page_loads_nothing_from_elsewhere(url: str) -> None:
    answer = httpx2.get(url)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    links = Links()
    links.feed(answer.text)
    assert links.fields <= links.labelled, "a screen reader has no name for it"
    for file in links.files:
        if file.startswith(("data:", "#")):
            continue
        assert httpx2.get(f"{url}/{file}").status_code == 200, file
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    for name, text in files.items():
        path = "" if name == "page.html" else name
        assert httpx2.get(f"{url}/{path}").text == text, "it is not served"
        assert not re.findall(r"https?://[a-z]", text), "it would ask another server"
        if name.endswith(".js"):
            assert set(re.findall(r'\$\("([a-z-]+)"\)', text)) <= links.ids
            assert {f"{module}.js" for module in re.findall(r'from "\./(\w+)\.js"', text)} <= files.keys()
            assert "innerHTML" not in text and "eval(" not in text

"""Test that the docs, container files and web page refer to existing files and options, and that examples run."""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
import yaml

import offload_rt.server
from offload_rt.cli.serve import add
from offload_rt.server.app import OPEN_PATHS
from offload_rt.server.options import ServerOptions

ROOT = Path(__file__).parents[3]
PAGE, DEPLOYING = ((ROOT / f"docs/pages/{name}.md").read_text(encoding="utf-8") for name in ("serving", "deploying"))
STATIC = Path(offload_rt.server.__file__).parent / "static"


def flags() -> set[str]:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    text = next(iter(parser._subparsers._group_actions[0].choices.values())).format_help()  # type: ignore[union-attr]
    return set(re.findall(r"--[a-z][a-z-]+", text))


def say(prompt: str) -> str:
    return "It was Ellis Duckworth."


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
def test_the_examples_run(url: str) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    script = "set -e\n" + "\n".join(blocks).replace("curl -s", "curl --fail-with-body -s")
    done = subprocess.run(
        ["bash", "-c", script], env={"URL": url, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-500:]
    for text in (
        "Ellis Duckworth",
        "data: [DONE]",
        '"cached_tokens"',
        "input_tokens",
        '"resp_',
        "offload_rt_h2d_bytes",
    ):
        assert text in done.stdout, text


def test_every_flag_of_the_page_exists() -> None:
    table = PAGE[PAGE.index("## Access and limits") :]
    found = set(re.findall(r"--[a-z][a-z-]+", table))
    assert len(found) >= 9 and found <= flags()
    assert str(ServerOptions().max_waiting) in table and f"{ServerOptions().timeout:.0f} s" in table
    assert set(re.findall(r"--[a-z][a-z-]+", DEPLOYING)) - {"--build-arg"} <= flags()


class PageElements(HTMLParser):
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
        assert not any(name.startswith("on") or name == "style" for name in found), (
            "the content security policy forbids inline scripts and styles"
        )


def test_the_page_loads_no_external_files(url: str) -> None:
    answer = httpx2.get(url)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    links = PageElements()
    links.feed(answer.text)
    assert links.fields <= links.labelled, "a field has no label"
    for file in links.files:
        if file.startswith(("data:", "#")):
            continue
        assert httpx2.get(f"{url}/{file}").status_code == 200, file
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir() if path.is_file()}
    for name, text in files.items():
        path = "" if name == "page.html" else name
        assert httpx2.get(f"{url}/{path}").text == text, "the file is not served unchanged"
        assert not re.findall(r"https?://[a-z]", text), "the file refers to another server"
        assert len(text.splitlines()) <= 400, name
        if name.endswith(".js"):
            assert set(re.findall(r'\$\("([a-z-]+)"\)', text)) <= links.ids
            for module in re.findall(r'(?:from|import) "\./([\w./]+)"', text):
                assert httpx2.get(f"{url}/{module}").status_code == 200, module
            assert "innerHTML" not in text and "eval(" not in text


def test_vendored_files_have_the_checksums_of_the_readme() -> None:
    folder = STATIC / "vendor"
    table = re.findall(r"^\| `([\w.]+)` \| \S+ \S+ \| .+ \| `([\w.]+)` \| `([0-9a-f]{64})` \|$",
                       (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
    names = {name for script, licence, _ in table for name in (script, licence)}
    assert names | {"README.md"} == {path.name for path in folder.iterdir()}
    for script, _, expected in table:
        assert hashlib.sha256((folder / script).read_bytes()).hexdigest() == expected, script
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 300_000


def test_the_dockerfile_copies_existing_files_and_starts_the_server() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    links = {path.resolve().name for path in (ROOT / "offload_rt").iterdir() if path.is_symlink()}
    assert links <= copied, "the target of a symbolic link is not copied"
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert set(re.findall(r'"(--[a-z-]+)"', text)) <= flags()
    assert "USER server" in text and project["scripts"]["offload-rt"]


def test_the_compose_file_uses_existing_options_and_folders() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["offload-rt"]
    assert {part for part in service["command"] if part.startswith("--")} <= flags()
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert all(volume.split(":")[1] in dockerfile for volume in service["volumes"])


def test_the_kubernetes_manifest_uses_existing_options_and_paths() -> None:
    spec = yaml.safe_load((ROOT / "kubernetes.yaml").read_text(encoding="utf-8"))["spec"]
    pod = spec["template"]["spec"]
    [server] = pod["containers"]
    assert {part for part in server["args"] if part.startswith("--")} <= flags()
    assert pod["terminationGracePeriodSeconds"] > ServerOptions().grace
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert all(f'"{mount["mountPath"]}"' in dockerfile for mount in server["volumeMounts"])
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert claims == {mount["name"] for mount in server["volumeMounts"]}
    assert {server[probe]["httpGet"]["path"] for probe in server if probe.endswith("Probe")} <= set(OPEN_PATHS)

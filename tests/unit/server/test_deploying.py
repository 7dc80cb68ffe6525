"""Test that the container files name only files and options that exist, as images cannot be built here."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import yaml

from offload_rt.cli.serve import add
from offload_rt.server.app import OPEN_PATHS
from offload_rt.server.options import ServerOptions

ROOT = Path(__file__).parents[3]


def flags() -> set[str]:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    text = next(iter(parser._subparsers._group_actions[0].choices.values())).format_help()  # type: ignore[union-attr]
    return set(re.findall(r"--[a-z][a-z-]+", text))


def test_the_dockerfile_copies_what_there_is_and_starts_the_server() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    links = {path.resolve().name for path in (ROOT / "offload_rt").iterdir() if path.is_symlink()}
    assert links <= copied, "a link in the package that leads nowhere"
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert set(re.findall(r'"(--[a-z-]+)"', text)) <= flags()
    assert "USER server" in text and project["scripts"]["offload-rt"]


def test_the_compose_file() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["offload-rt"]
    assert {part for part in service["command"] if part.startswith("--")} <= flags()
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert all(volume.split(":")[1] in dockerfile for volume in service["volumes"])


def test_the_manifest_of_the_page() -> None:
    page = (ROOT / "docs/pages/deploying.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    spec = yaml.safe_load(text)["spec"]
    pod = spec["template"]["spec"]
    [server] = pod["containers"]
    assert {part for part in server["args"] if part.startswith("--")} <= flags()
    assert pod["terminationGracePeriodSeconds"] > ServerOptions().grace
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert all(f'"{mount["mountPath"]}"' in dockerfile for mount in server["volumeMounts"])
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert claims == {mount["name"] for mount in server["volumeMounts"]}
    assert {server[probe]["httpGet"]["path"] for probe in server if probe.endswith("Probe")} <= set(OPEN_PATHS)


def test_every_flag_of_the_page_exists() -> None:
    page = (ROOT / "docs/pages/deploying.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--[a-z][a-z-]+", page)) - {"--build-arg"} <= flags()

"""Test files from earlier versions: old stores are refused, block names are unchanged, and an old skew artifact works.

`tests/data/written_before` was written at the commit named in `expected.json`, with a tiny random model and a fixed
seed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, ArtifactError, SamplingParams, StoreError
from offload_rt.cli import main
from offload_rt.engine.engine import Engine
from offload_rt.models.loading import load_model
from offload_rt.sessions.history import History
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.storage.naming import SessionProvenance, name_blocks

OLD_FILES = Path(__file__).parents[2] / "data" / "written_before"
ROWS = {"preset": "rows", "source": "residual"}
EXPECTED: dict[str, Any] = json.loads((OLD_FILES / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.mark.parametrize("remaining", ["*/plain.doc", "*/*/*.kv"])
def test_stores_of_format_1_are_refused_and_not_changed(
    remaining: str, checkpoint: str, tmp_path: Path, capsys: Any
) -> None:
    store = shutil.copytree(OLD_FILES / "store", tmp_path / "store")
    for path in [path for path in store.rglob("*") if path.is_file()]:
        path.unlink() if path not in store.glob(remaining) else None
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert before
    llm = LLM(checkpoint, policy="full", host_memory="64MiB", device="cpu")
    with pytest.raises(StoreError, match=r"written by an earlier version, with tokens in clear text .* delete the"):
        llm.session("plain", store)
    for action in (["list"], ["export", "plain"], ["delete", "plain"]):
        assert main(["sessions", *action, "--store", str(store)]) != 0
        assert "written by an earlier version" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


class SelectionRecorder:
    """Records, for each position and layer, the number of selected tokens and the sum of their positions."""

    def __init__(self) -> None:
        self.counts: dict[int, tuple[list[int], list[int]]] = {}

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        sizes, sums = self.counts.setdefault(position, ([], []))
        sizes.append(tokens.shape[1])
        sums.append(int(tokens.sum()))


def test_old_skew_artifact_selects_the_same_tokens(tmp_path: Path) -> None:
    """The artifact and the expected selections were written at commit 1ba94f1."""
    expected = EXPECTED["recording"]
    before = OLD_FILES / "skew_reference"
    with pytest.raises(ArtifactError, match="make one for this model with 'offload-rt skew'"):  # fingerprint differs
        LLM("reference", policy_options=ROWS, skew=before, device="cpu")
    [file] = before.glob("*.safetensors")
    renamed = replace(SkewArtifact.load(file, None), fingerprint=load_model("reference", device="cpu").fingerprint)
    renamed.save(tmp_path / "skew.safetensors")
    llm = LLM("reference", policy_options=ROWS, skew=tmp_path / "skew.safetensors", device="cpu")
    prompt, selections = expected["tokens"][: expected["prompt_tokens"]], SelectionRecorder()
    engine = Engine(llm.runner, max_num_seqs=1)
    request = engine.add(prompt, SamplingParams(16, temperature=0), selections)
    while not engine.idle:
        engine.step()
    assert list(request.tokens) == expected["tokens"]
    assert [[position, *map(list, counts)] for position, counts in selections.counts.items()] == expected["counts"]


def example_tokens(count: int) -> list[int]:
    return [(i * 7919 + 13) % 2048 for i in range(count)]


@pytest.mark.parametrize("case", EXPECTED["names"])
def test_block_names_are_unchanged(case: dict[str, Any]) -> None:
    provenance = SessionProvenance(
        bytes.fromhex(EXPECTED["root"]), case["policy"], case["truncation_id"], case["owner"]
    )
    decoded = [(start, stop) for start, stop in case["decoded"]]
    names = name_blocks(provenance, example_tokens(case["tokens"]), case["stop"], decoded)
    assert [name.provenance_key for name in names] == case["lineages"]
    assert [name.key.hex() for name in names] == case["keys"] and len(names[0].key) == 32
    assert [name.index for name in names] == list(range(len(names)))


def test_names_of_truncated_blocks_are_unchanged() -> None:
    expected = EXPECTED["truncated_history"]
    decoded = [(100, 120), (150, 180)]
    history = History("s", "m", "0123456789abcdef", example_tokens(200), computed=200, decoded=decoded)
    history.truncate([*range(4), *range(90, 170)], 4)
    assert (len(history.tokens), history.shift) == (expected["tokens"], expected["shift"])
    assert history.decoded == [tuple(run) for run in expected["decoded"]]
    assert history.truncation_id == expected["cut"]
    assert json.loads(history.to_bytes())["truncation_id"] == expected["cut"]
    history.close_gap()
    assert history.truncation_id == expected["rotated"]
    history.id *= 2
    assert History.from_bytes(history.to_bytes()) == history

"""Test that files of earlier versions can be read: sessions, a skew artifact and a recording.

The commit named in `expected.json` wrote `tests/data/written_before`. It used a tiny random model, which its seed
reproduces.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.outputs import completed
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, ArtifactError, SamplingParams
from offload_rt.cli import main
from offload_rt.engine.recording import Recording
from offload_rt.models.loading import load_model
from offload_rt.sessions.catalog import read_catalog
from offload_rt.sessions.history import History, document_name
from offload_rt.sessions.naming import SessionProvenance, name_chunks
from offload_rt.sessions.old_format import OldSession
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.storage.files import seal

BEFORE = Path(__file__).parents[2] / "data" / "written_before"
ROWS = {"preset": "rows", "source": "residual"}
EXPECTED: dict[str, Any] = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.mark.parametrize(("place", "kv_cache_dtype"), [("store", "auto"), ("store_int8", "int8")])
def test_sessions_of_format_1_go_on_with_their_tokens_computed_again(
    place: str, kv_cache_dtype: Any, tiny: str, tmp_path: Path
) -> None:
    """Open sessions of format 1. Old files with tokens in clear text are removed; tokens and turns are kept."""
    store = copied(place, tmp_path / place, model=tiny)
    listed = {one.history.name: one.history for one in read_catalog(store).sessions}
    assert set(listed) == set(EXPECTED[place])
    llm = LLM(tiny, policy="full", host_memory="64MiB", kv_cache_dtype=kv_cache_dtype, device="cpu")
    for name, expected in EXPECTED[place].items():
        session = llm.session(name, store)
        assert not [
            path for path in store.rglob("*") if path.is_file() and re.search(r"/[0-9a-f]{32}\.|sinks", str(path))
        ]
        assert session.tokens == listed[name].tokens and len(session.tokens) == expected["held"]
        assert session.turns == listed[name].turns and len(session.turns) == expected["turns"]
        assert not list(store.glob(f"*/{name}.*")) and len(list(store.glob(f"*/{document_name(name)}.doc"))) == 1
        right = completed(llm.generate([session.tokens + EXPECTED["turn"]], SamplingParams(8, temperature=0)))
        events = list(session.send(EXPECTED["turn"], SamplingParams(max_tokens=8, temperature=0)))
        assert [event.token_id for event in events] == right[0].token_ids
        assert session.loaded_tokens == 0, "nothing that an earlier version computed is used"
        session.close()


def test_a_session_of_another_model_or_vocabulary_is_not_taken_over(tiny: str, tmp_path: Path) -> None:
    llm = LLM(tiny, policy="full", host_memory="64MiB", device="cpu")
    for change in ({"model": "another"}, {"model": tiny, "tokens": [10**6]}, {"model": tiny, "format": 7}):
        store = copied("store", tmp_path / str(len(list(tmp_path.iterdir()))), **change)
        session = llm.session("plain", store)
        assert session.tokens == [] and list(store.glob("*/plain.doc"))
        session.close()


def test_sessions_of_format_1_are_shown_and_deleted(tiny: str, tmp_path: Path, capsys: Any) -> None:
    store = copied("store", tmp_path / "store", model=tiny)
    for path in store.glob("*/truncated.*"):
        path.write_bytes(b"damaged")
    assert main(["sessions", "list", "--store", str(store)]) == 0
    out = capsys.readouterr().out
    assert "plain" in out and "forked" in out and "damaged" in out
    assert main(["sessions", "export", "plain", "--store", str(store)]) == 0
    assert "Traddles" in capsys.readouterr().out
    for name in ("plain", "truncated"):
        assert main(["sessions", "delete", name, "--store", str(store)]) == 0
    assert [path.name for path in store.rglob("*") if path.is_file()] == ["forked.doc", "lock"] or [
        path.name for path in store.rglob("*") if path.is_file()
    ] == ["lock", "forked.doc"]


def test_a_takeover_that_was_interrupted_is_finished(tiny: str, tmp_path: Path, monkeypatch: Any) -> None:
    store = copied("store", tmp_path / "store", model=tiny)
    llm = LLM(tiny, policy="full", host_memory="64MiB", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(OldSession, "remove", lambda self: None)  # simulates a crash after the new document is written
        llm.session("plain", store).close()
    assert list(store.glob("*/plain.doc"))
    llm.session("plain", store).close()
    assert not list(store.glob("*/plain.doc"))


def copied(place: str, to: Path, **fields: Any) -> Path:
    """Copy a store, and set these fields in every history."""
    shutil.copytree(BEFORE / place, to)
    for path in to.glob("*/[!0-9]*.doc"):
        path.write_bytes(seal(json.dumps(json.loads(path.read_bytes()[8:]) | fields).encode()))
    return to


def test_a_skew_artifact_and_a_recording_mean_the_same(tmp_path: Path) -> None:
    """Run the bundled model with the artifact. Every step selects the same tokens as the recording."""
    expected = EXPECTED["recording"]
    old = Recording.open(BEFORE / "recording")
    assert [[rows.tolist() for rows in step] for _, step in list(old.steps())[:2]] == expected["first"]
    before = BEFORE / "skew_reference"
    with pytest.raises(ArtifactError, match="make one for this model with 'offload-rt skew'"):  # fingerprint differs
        LLM("reference", policy_options=ROWS, skew=before, device="cpu")
    [file] = before.glob("*.safetensors")
    renamed = replace(SkewArtifact.load(file, None), fingerprint=load_model("reference", device="cpu").fingerprint)
    renamed.save(tmp_path / "skew.safetensors")
    llm = LLM("reference", policy_options=ROWS, skew=tmp_path / "skew.safetensors", device="cpu")
    prompt, params = list(old.info.tokens[: expected["prompt_tokens"]]), SamplingParams(16, temperature=0)
    new = [event.token_id for event in llm.stream(prompt, params, record=tmp_path / "new")]
    assert [*prompt, *new] == list(old.info.tokens) == expected["tokens"]
    for run in (old, Recording.open(tmp_path / "new")):
        counted = [
            [position, [rows.shape[1] for rows in step], [int(rows.sum()) for rows in step]]
            for position, step in run.steps()
        ]
        assert counted == expected["counts"]


def some_tokens(count: int) -> list[int]:
    return [(i * 7919 + 13) % 2048 for i in range(count)]


@pytest.mark.parametrize("case", EXPECTED["names"])
def test_chunks_have_the_names_that_they_had(case: dict[str, Any]) -> None:
    provenance = SessionProvenance(
        bytes.fromhex(EXPECTED["root"]), case["policy"], case["truncation_id"], case["owner"]
    )
    decoded = [(start, stop) for start, stop in case["decoded"]]
    names = name_chunks(provenance, some_tokens(case["tokens"]), case["stop"], decoded)
    assert [name.provenance_key for name in names] == case["lineages"]
    assert [name.key.hex() for name in names] == case["keys"] and len(names[0].key) == 32
    assert [name.index for name in names] == list(range(len(names)))


def test_a_truncation_has_the_name_that_it_had() -> None:
    expected = EXPECTED["truncated_history"]
    decoded = [(100, 120), (150, 180)]
    history = History("s", "m", "0123456789abcdef", some_tokens(200), computed=200, decoded=decoded)
    history.truncate([*range(4), *range(90, 170)], 4)
    assert (len(history.tokens), history.shift) == (expected["tokens"], expected["shift"])
    assert history.decoded == [tuple(run) for run in expected["decoded"]]
    assert history.truncation_id == expected["cut"]
    assert json.loads(history.to_bytes())["truncation_id"] == expected["cut"]
    history.close_gap()
    assert history.truncation_id == expected["rotated"]
    history.id *= 2
    assert History.from_bytes(history.to_bytes()) == history

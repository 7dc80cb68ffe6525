"""What an earlier version wrote is still read: sessions go on with the same tokens and nothing computed again (under
preset "rows" and a guess, which were the default then), a skew artifact and a recording mean the same.
`tests/data/written_before` was written by the commit that `expected.json` names, with a tiny random model whose weights
its seed gives again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, SamplingParams
from offload_rt.engine.recording import Recording
from offload_rt.sessions.history import History
from offload_rt.sessions.naming import Lineage, name_chunks

BEFORE = Path(__file__).parent / "data" / "written_before"
ROWS = {"preset": "rows", "source": "residual"}
EXPECTED: dict[str, Any] = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize(("place", "kv_format"), [("store", "auto"), ("store_int8", "int8")])
def test_sessions_go_on_with_nothing_computed_again(
    place: str, kv_format: Any, on_disk: bool, tiny: str, tmp_path: Path
) -> None:
    """Also on a disk, where files of now would be read in place."""
    disk = {"disk": tmp_path / "rows", "disk_limit": "256MiB"} if on_disk else {}
    shutil.copytree(BEFORE / place, tmp_path / place)
    stored = sorted(path.name for path in (tmp_path / place).rglob("*.kv"))
    for name, expected in EXPECTED[place].items():
        skew, room = BEFORE / "skew_tiny", "64MiB"
        llm = LLM(tiny, policy_options=ROWS, skew=skew, host_memory=room, kv_format=kv_format, device="cpu", **disk)
        assert llm.runner.model.fingerprint == EXPECTED["fingerprint"], "the tiny model is another one than then"
        session = llm.session(name, tmp_path / place)
        assert len(session.tokens) == expected["held"] and len(session.turns) == expected["turns"]
        params = SamplingParams(max_tokens=len(expected["tokens"]), temperature=0)
        assert [event.token_id for event in session.send(EXPECTED["turn"], params)] == expected["tokens"]
        assert session.loaded_tokens == expected["loaded"] > 100
        assert session.host.stats.computed_tokens == expected["computed_again"] == 0
        session.close()
    assert set(stored) - {path.name for path in (tmp_path / place).rglob("*.kv")} == tails(place)


def tails(place: str) -> set[str]:
    """Files of partly filled chunks, which the next turn replaces where no fork shares them."""
    histories = [json.loads(path.read_bytes()[8:]) for path in (BEFORE / place).glob("*/[!0-9]*.doc")]
    return {f"{history['tail']}.kv" for history in histories if history["tail"] and not history["tail_shared"]}


def test_a_skew_artifact_and_a_recording_mean_the_same(tmp_path: Path) -> None:
    """A run of the shipped model with the artifact selects what the recording of then says, step by step."""
    expected = EXPECTED["recording"]
    old = Recording.open(BEFORE / "recording")
    assert [[rows.tolist() for rows in step] for _, step in list(old.steps())[:2]] == expected["first"]
    with pytest.raises(ArtifactError, match="make one for this model with 'offload-rt skew'"):  # an old fingerprint
        LLM("reference", policy_options=ROWS, skew=BEFORE / "skew_reference", device="cpu")
    llm = LLM("reference", policy_options=ROWS, device="cpu")
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
    lineage = Lineage(bytes.fromhex(EXPECTED["root"]), case["policy"], case["truncation_id"], case["owner"])
    decoded = [(start, stop) for start, stop in case["decoded"]]
    names = name_chunks(lineage, some_tokens(case["tokens"]), case["stop"], decoded)
    assert [name.lineage for name in names] == case["lineages"]
    assert [name.key.hex() for name in names] == case["keys"]
    assert [name.index for name in names] == list(range(len(names)))


def test_a_truncation_has_the_name_that_it_had() -> None:
    expected = EXPECTED["truncated_history"]
    decoded = [(100, 120), (150, 180)]
    history = History("s", "m", "0123456789abcdef", some_tokens(200), computed=200, decoded=decoded)
    history.truncate([*range(4), *range(90, 170)], 4)
    assert (len(history.tokens), history.shift) == (expected["tokens"], expected["shift"])
    assert history.decoded == [tuple(run) for run in expected["decoded"]]
    assert history.truncation_id == expected["cut"]
    assert json.loads(history.to_bytes())["cut"] == expected["cut"]
    history.close_gap()
    assert history.truncation_id == expected["rotated"]
    assert History.from_bytes(history.to_bytes()) == history

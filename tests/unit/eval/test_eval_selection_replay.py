"""What a run selected, recorded and replayed: against what the policy chose, and against plain models of the caches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.config import EvictionOptions
from offload_rt.engine import recording as recording_module
from offload_rt.engine.recording import Recording, RunInfo, RunWriter
from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.simulate.attention_page import passages, readings, write_page
from offload_rt.eval.simulate.replacement_policies import REMEMBERED, DecayedCache, OptimalCache, RankedCache
from offload_rt.eval.simulate.selection_replay import ReplayConfig, ShrunkPool, replay, run_replay
from offload_rt.kv_cache.eviction import PRIOR_STEPS
from offload_rt.policies.infinigen.policy import InfiniGenState

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS = {"budget": 0.2, "sinks": 2, "recent": 8, "dense_layers": (0,)}


def info(**changes: object) -> RunInfo:
    known: dict[str, object] = {
        "model": "m", "fingerprint": "f", "policy": "infinigen", "options": {}, "layers": 3, "kv_heads": 2,
        "row_bytes": 64, "selecting": (1, 2), "sinks": 2, "recent": 4, "prompt_tokens": 20,
        "tokens": tuple(range(20)),
    }  # fmt: skip
    return RunInfo(**(known | changes))  # type: ignore[arg-type]


def made(folder: Path, steps: int = 30, seed: int = 0, **changes: object) -> Recording:
    """A recording of random selections."""
    drawn, about = random.Random(seed), info(**changes)
    writer = RunWriter(folder, about)
    for position in range(20, 20 + steps):
        for layer in about.selecting:
            count = drawn.randrange(0, 6)
            rows = [drawn.sample(range(2, position - 3), count) for _ in range(about.kv_heads)]
            writer.selected(position, layer, torch.tensor(rows, dtype=torch.int64).reshape(about.kv_heads, count))
    writer.close(range(20 + steps), None)
    return Recording.open(folder)


@pytest.mark.parametrize("policy", ["infinigen", "oracle", "quest"])
def test_a_recording_is_what_the_policy_selected(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_model("llama"), tiny_prompt(150)
    monkeypatch.setattr(recording_module, "SHARD_BYTES", 600)  # several shards
    llm = LLM(model, policy=policy, policy_options=OPTIONS, enable_prefix_caching=False)
    plain = [event.token_id for event in llm.stream(prompt, GREEDY)]
    tokens = [event.token_id for event in llm.stream(prompt, GREEDY, tmp_path / "run")]
    assert tokens == plain
    run = Recording.open(tmp_path / "run")
    steps = list(run.steps())
    assert run.info.tokens == (*prompt, *tokens)
    assert run.info.selecting == (1, 2)
    assert [position for position, _ in steps] == list(range(150, 161))
    assert len(list((tmp_path / "run").glob("*.safetensors"))) > 1
    assert llm.last_stats is not None
    rows = sum(rows.size for _, step in steps for rows in step)
    dense = sum(position + 1 - 10 for position, _ in steps) * run.info.kv_heads
    assert llm.last_stats.h2d_bytes == (rows + dense) * run.info.row_bytes
    for position, step in steps:
        for layer in step:
            assert (np.diff(layer, axis=1) > 0).all()
            assert layer.min() >= 2 and layer.max() <= position - 8


def test_repaired_rows_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[set[int]] = []
    repair = InfiniGenState.repair

    def spy(self: InfiniGenState, layer: int, q: torch.Tensor, visible: object, selection: object) -> object:
        extra = repair(self, layer, q, visible, selection)  # type: ignore[arg-type]
        both = selection.tokens if extra is None else torch.cat((selection.tokens, extra.tokens), 1)  # type: ignore
        chosen.append(set(both[0].tolist()))
        return extra

    monkeypatch.setattr(InfiniGenState, "repair", spy)
    options = {"alpha": 0.5, "max_fraction": 1.0, "max_missed_mass": 0.05, "recent": 8}
    llm = LLM(tiny_model("llama"), policy="infinigen", policy_options=options)
    list(llm.stream(tiny_prompt(120), GREEDY, tmp_path / "run"))
    steps = list(Recording.open(tmp_path / "run").steps())
    assert [set(rows[0].tolist()) for _, step in steps for rows in step] == chosen


def test_with_eviction_positions_are_recorded_not_slots(tmp_path: Path) -> None:
    options = {"budget": 0.3, "sinks": 2, "recent": 8}
    llm = LLM(tiny_model("llama"), policy="infinigen", policy_options=options, host_memory="192KiB", eviction="lru")
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    list(llm.stream(tiny_prompt(60), params, tmp_path / "run"))
    run = Recording.open(tmp_path / "run")
    assert llm.last_stats is not None and llm.last_stats.kv_bytes_host <= 192 << 10
    assert max(int(rows.max()) for _, step in run.steps() for rows in step) > 128 - 8


def test_a_recording_cut_short_is_whole(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama"), policy="infinigen", policy_options=OPTIONS)
    events: Iterator[object] = llm.stream(tiny_prompt(100), GREEDY, tmp_path / "run")
    for _ in range(5):
        next(events)
    events.close()  # type: ignore[attr-defined]
    run = Recording.open(tmp_path / "run")
    assert (len(run.info.tokens), len(list(run.steps()))) == (105, 4)


def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a recording"):
        Recording.open(tmp_path)
    run = made(tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        RunWriter(tmp_path / "run", info())
    shard = next(run.folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(InputError, match="damaged"):
        list(run.steps())
    (run.folder / "run.json").write_text('{"format": "offload-rt recording", "version": 9}')
    with pytest.raises(InputError, match="version 9"):
        Recording.open(run.folder)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_working_set_hits_what_a_plain_cache_hits(policy: str) -> None:
    drawn, capacity = random.Random(3), 7
    ours, hits = RankedCache(policy, capacity, (1, 1, 40)), []
    held: dict[int, None] = {}
    used: dict[int, int] = {}
    count: dict[int, int] = {}
    for step in range(200):
        rows = drawn.sample(range(40), drawn.randrange(0, 12))
        hits.append((ours.use(0, np.array([rows], np.int32), step), sum(row in held for row in rows)))
        for row in rows:
            held[row], used[row], count[row] = None, step, count.get(row, 0) + 1
        key = used.get if policy == "lru" else (lambda row: (count[row], used[row]))
        while len(held) > capacity:
            del held[min(sorted(held), key=key)]  # type: ignore[arg-type]
        ours.check_integrity()
    assert [a for a, _ in hits] == [b for _, b in hits]
    assert sum(a for a, _ in hits) > 50


def hits_of(run: Recording, *caches: DecayedCache | RankedCache | OptimalCache) -> list[int]:
    """Rows that each cache had, over the whole recording."""
    hits = [0] * len(caches)
    for position, step in run.steps():
        for i, cache in enumerate(caches):
            hits[i] += sum(cache.use(layer, rows, position) for layer, rows in enumerate(step))
            cache.check_integrity()
    return hits


def test_no_rule_hits_more_than_the_optimum(tmp_path: Path) -> None:
    for seed in range(3):
        run = made(tmp_path / f"run{seed}", steps=60, seed=seed)
        shape = (2, 2, 80)
        ranked = [RankedCache(rule, 5, shape) for rule in ("lru", "lfu", REMEMBERED)]
        rules = [*ranked, DecayedCache(5, shape)]
        best, *others = hits_of(run, OptimalCache(5, run), *rules)
        assert best > max(others) > 0


def test_the_replay_says_what_the_runtime_hits(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama"), policy_options=OPTIONS, working_set=9)
    list(llm.stream(tiny_prompt(150), GREEDY, tmp_path / "run"))
    run, stats = Recording.open(tmp_path / "run"), llm.last_stats
    rows = sum(rows.size for _, step in run.steps() for rows in step)
    [hits] = hits_of(run, DecayedCache(9, (3, 2, 200)))
    assert stats is not None and stats.working_set_hit_rate == pytest.approx(hits / rows) and hits > 0


@pytest.mark.parametrize("options", [EvictionOptions("fifo", "none"), EvictionOptions("lru"), EvictionOptions()])
def test_a_shrunk_pool_loses_what_a_plain_one_loses(tmp_path: Path, options: EvictionOptions) -> None:
    run, limit = made(tmp_path / "run", steps=80, seed=5), 16
    ours = ShrunkPool(options, limit, run.info)
    sinks, layers = (2 if options.protect == "window" else 0), range(2)
    used = [{t: t for t in range(20)} for _ in layers]
    counter = [dict.fromkeys(range(20), 0) for _ in layers]

    def share(layer: int, t: int, now: int) -> int:
        steps = max(0, now - max(t + 4, 20))  # since it could be selected: after the window, in a step that decodes
        return ((counter[layer][t] + 1) << 16) // (steps + PRIOR_STEPS)

    def evict(layer: int, now: int) -> None:
        able = [t for t in used[layer] if sinks <= t < now - 4]
        rank = {"fifo": lambda t: 0, "lru": used[layer].get, "counter": lambda t: share(layer, t, now)}[options.policy]
        del used[layer][min(able, key=lambda t: (rank(t), t))]

    for layer in layers:
        for _ in range(20 - limit):
            evict(layer, 20)
    lost = 0
    for position, step in run.steps():
        ours.enter(position)
        for layer, rows in enumerate(step):
            evict(layer, position)
            used[layer][position], counter[layer][position] = position, 0
            gone = sum(int(t) not in used[layer] for t in rows.reshape(-1))
            for t in set(rows.reshape(-1).tolist()) & set(used[layer]):
                used[layer][t] = position
                counter[layer][t] += 1
            assert ours.use(layer, rows, position) == gone
            lost += gone
        ours.check_integrity()
    assert lost > 20


def test_replay_writes_tables_and_bounds_hold(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=60)
    config = ReplayConfig(working_sets=(0.2, 1.0), budgets=(0.5, 1.0))
    sets, pools = replay(run, config)
    assert all(row["miss_rate"] == 0 for row in pools if row["limit_share"] == 1.0)
    assert any(row["miss_rate"] > 0 for row in pools)
    everything = next(row for row in sets if row["share_kept"] == 1.0)
    distinct = {
        (layer, head, int(t)) for _, step in run.steps() for layer, rows in enumerate(step)
        for head in range(2) for t in rows[head]
    }  # fmt: skip
    assert everything["selected_rows"] - len(distinct) == round(everything["hit_rate"] * everything["selected_rows"])
    assert everything["link_bytes_saved"] == round(everything["hit_rate"] * everything["link_bytes"])
    run_replay(run, config, tmp_path / "out")
    for name in ("working_set", "eviction"):
        assert {path.suffix for path in (tmp_path / "out").glob(f"{name}.*")} == {".json", ".csv", ".md", ".png"}


def test_replay_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"budgets=1\.5"):
        ReplayConfig(budgets=(1.5,))
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        ReplayConfig(caches=("lruu",))
    with pytest.raises(ConfigError, match="raise --budgets"):
        replay(made(tmp_path / "run"), ReplayConfig(budgets=(0.05,)))
    with pytest.raises(InputError, match="no selections"):
        replay(made(tmp_path / "none", steps=0), ReplayConfig(budgets=()))


# --------------------------------------------------------------------------------------------------------- the page


def test_passages_are_sentences() -> None:
    pieces = ("One", " two", ".", '"', " Three", "?", "!", " four", " <b>", " five", ".", "\n", "\n", "Six")
    cut = passages(pieces, 9)
    assert [p.text for p in cut] == ['One two."', " Three?!", " four <b>", " five.\n\n", "Six"]
    assert [p.start for p in cut[1:]] == [p.stop for p in cut[:-1]]
    assert max(p.stop - p.start for p in passages(["x"] * 300, 300)) <= 80


def test_readings_count_every_row(tmp_path: Path) -> None:
    pieces = tuple("." if i % 5 == 4 else "w" for i in range(50))
    run = made(tmp_path / "run", steps=30)
    cut = passages(pieces, 20)
    share = readings(run, cut)
    assert share.shape == (6, 10)
    for reader in range(6):
        for passage in range(10):
            rows = [
                t for position, step in run.steps() if position + 1 in range(20 + 5 * reader, 25 + 5 * reader)
                for layer in step for t in layer.reshape(-1) if t // 5 == passage
            ]  # fmt: skip
            written = 4 if reader == 0 else 5  # the first token comes from the prefill
            assert share[reader, passage] == pytest.approx(len(rows) / (written * 5 * 2 * 2))


class _Page(HTMLParser):
    """Collects tags, attributes that fetch, and the JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action")]
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def test_the_command_makes_a_page_without_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("He said: </script><b>no</b> & so on. " * 12, encoding="utf-8")
    run, page = str(tmp_path / "run"), tmp_path / "page.html"
    flags = ("--prompt-tokens", "150", "--max-new-tokens", "30", "--ignore-eos", "--recent", "8", "--record", run)
    kept = ("--working-set", "5", "--stats-json", str(tmp_path / "stats.json"))
    assert main(("generate", "reference", "--prompt-file", str(book), *flags, *kept)) == 0
    printed, stats = capsys.readouterr().err, json.loads((tmp_path / "stats.json").read_text())
    assert f"wrote {run}" in printed.replace("\n", "")
    assert stats["working_set_rows"] == 5 and stats["working_set_bytes"] > 0
    assert f"{stats['working_set_hit_rate']:.2%}" in printed and "hit rate of the selected" in printed
    assert main(("eval", "replay", run, "--budgets", "0.6", "--eviction", "lru", "--html", str(page))) == 0
    assert "| lru | window |" in capsys.readouterr().out
    parsed = _Page()
    parsed.feed(page.read_text(encoding="utf-8"))
    assert parsed.links == []
    assert "http" not in re.sub(r"http-equiv", "", page.read_text(encoding="utf-8"))
    data = json.loads(parsed.scripts[0])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "".join(data["texts"]) == "".join(record["pieces"])
    assert "</script><b>no</b> & so on." in "".join(data["texts"])
    assert len(data["reads"]) == len(data["texts"]) - data["first"] > 0
    assert main(("generate", "reference", "--prompt-file", str(book), *flags)) == 2
    assert "it already exists" in capsys.readouterr().err
    assert main(("eval", "replay", str(tmp_path))) == 2
    with pytest.raises(InputError, match="no text"):
        write_page(made(tmp_path / "ids"), tmp_path / "no.html")

"""Test the LM Evaluation Harness with our runtime: log-likelihoods, our own tasks, and its command line."""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed

from offload_rt import SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.errors import ConfigError, InputError

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager, get_task_dict

    from offload_rt.cli import main
    from offload_rt.eval.core.model_under_test import ModelUnderTest
    from offload_rt.eval.core.variants import Variant
    from offload_rt.eval.quality.lm_eval_adapter import TASKS, OffloadLM, _batch, _option
    from offload_rt.eval.quality.lm_eval_tasks import (
        Models,
        TasksConfig,
        _loaded,
        _task_manager,
        compare,
        run_tasks,
    )
    from offload_rt.models.source import find_source

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and its data sets emit warnings of their own

DATA = Path(os.environ.get("OFFLOAD_RT_DATA", Path(__file__).parents[4] / "shared" / "data"))
LOCAL = ("piqa_local", "copa_local", "openbookqa_local", "winogrande_local", "rte_local", "lambada_local")

needs_data = pytest.mark.skipif(not (DATA / "tasks").is_dir(), reason=f"no task files in {DATA}")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OFFLOAD_RT_DATA", str(DATA))


@pytest.fixture(scope="module", autouse=True)
def only_our_tasks() -> Iterator[None]:
    """Skip loading the harness's own task files and querying system information, which takes seconds."""
    whole = TaskManager.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager, "__init__", functools.partialmethod(whole, include_defaults=False))
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def our_lm() -> OffloadLM:
    return OffloadLM("reference", policy="full", dtype="float32")


@pytest.fixture(scope="module")
def harness_lm() -> Any:
    return HFLM(pretrained=find_source("reference").name_or_path, dtype="float32", device="cpu", batch_size=4)


def make_requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]  # type: ignore[arg-type]


def task_requests(name: str, documents: int, fewshot: int) -> list[Instance]:
    task = get_task_dict([name], TaskManager(include_path=str(TASKS)))[name]
    task.set_config(key="num_fewshot", value=fewshot)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=documents, rank=0, world_size=1)
    return list(task.instances)


@pytest.mark.sampled(2)
@needs_data
@pytest.mark.parametrize("name", LOCAL)
def test_log_likelihoods_equal_hflm(our_lm: OffloadLM, harness_lm: Any, name: str) -> None:
    """The tolerance allows for sums of tens of log-probabilities, each with a rounding error of about 1e-6."""
    requested = task_requests(name, 3, 1)
    expected = harness_lm.loglikelihood(requested, disable_tqdm=True)
    found = our_lm.loglikelihood(requested, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)


@needs_data
def test_local_tasks_equal_the_harness_tasks() -> None:
    context, choice = task_requests("piqa_local", 1, 0)[0].args
    assert context.startswith("Question: How do I ready a guinea pig cage")
    assert context.endswith("\nAnswer:")
    assert choice.startswith(" Provide the guinea pig")
    assert task_requests("copa_local", 1, 0)[0].args[1] == " the toilet filled with water."
    contexts = [r.args[0] for r in task_requests("winogrande_local", 1, 0)]
    assert [c.rsplit(" ", 1)[1] for c in contexts] == ["Sarah", "Maria"]
    rte = task_requests("rte_local", 1, 0)
    assert [r.args[1] for r in rte] == [" True", " False"]
    assert rte[0].args[0].endswith("True or False?\nAnswer:")
    assert task_requests("lambada_local", 1, 0)[0].args[1] == " signs"


def test_rolling_and_empty_contexts_equal_hflm(our_lm: OffloadLM, harness_lm: Any) -> None:
    text = "The door was shut, and nobody came to it. " * 4
    rolling = make_requests("loglikelihood_rolling", (text,), ("One.",))
    expected = harness_lm.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert our_lm.loglikelihood_rolling(rolling) == pytest.approx(expected, abs=1e-3)
    empty = make_requests("loglikelihood", ("", "The door"), ("The door ", "was"))
    pairs = zip(our_lm.loglikelihood(empty, True), harness_lm.loglikelihood(empty, True), strict=True)
    for (value, greedy), (wanted, also) in pairs:
        assert value == pytest.approx(wanted, abs=1e-3)
        assert greedy == also


def test_long_texts_are_scored_in_windows(our_lm: OffloadLM) -> None:
    short = OffloadLM.around(our_lm.llm)
    short.max_length = 32
    text = " ".join(f"word{i}" for i in range(30))
    whole = short.loglikelihood_rolling(make_requests("loglikelihood_rolling", (text,)))[0]
    ids = short.tok_encode(text)
    by_hand = 0.0
    for start in range(0, len(ids), 32):
        window = ids[max(0, start - 1) : start + 32] if start else [short.prefix_token_id, *ids[:32]]
        context = window[:1] if start + 32 <= len(ids) else ids[len(ids) - 33 : start]
        scored = ids[start : start + 32]
        by_hand += sum(our_lm.llm.score([context], [scored])[0].logprobs)
    assert whole == pytest.approx(by_hand, abs=1e-3)


def test_generation_stops_where_hflm_stops(our_lm: OffloadLM, harness_lm: Any) -> None:
    settings = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
    requested = make_requests("generate_until", ("The old man looked at", settings), ("She said that she", settings))
    assert our_lm.generate_until(requested) == harness_lm.generate_until(requested, disable_tqdm=True)
    with pytest.raises(ConfigError, match="num_beams"):
        our_lm.generate_until(make_requests("generate_until", ("a", {"num_beams": 2, "max_gen_toks": 4})))


def test_requests_with_one_context_share_its_prefill(our_lm: OffloadLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = our_lm.llm.runner
    lengths: list[int] = []
    real = runner.prefill
    monkeypatch.setattr(
        runner, "prefill", lambda sequence, stop, **k: lengths.append(stop) or real(sequence, stop, **k)
    )
    context = "The captain of the ship was"
    our_lm.loglikelihood(
        make_requests("loglikelihood", (context, " old"), (context, " young"), (context, " dead")), True
    )
    assert lengths == [len(our_lm.tok_encode(context)) - 1]


def test_sparse_policies_change_results_only_if_they_omit_tokens(our_lm: OffloadLM) -> None:
    requested = make_requests(
        "loglikelihood", ("The captain of the ship was a man of iron will. " * 4, "He looked at the sea.")
    )
    exact = our_lm.loglikelihood(requested, True)
    everything = {"alpha": float("inf"), "max_fraction": 1.0, "recent": 4}
    all_tokens = OffloadLM("reference", dtype="float32", **everything).loglikelihood(requested, True)
    sparse = OffloadLM("reference", "streaming", dtype="float32", budget=0.05, recent=2, decode_from=1)
    assert all_tokens[0][0] == pytest.approx(exact[0][0], abs=1e-3)
    assert sparse.loglikelihood(requested, True)[0][0] != pytest.approx(exact[0][0], abs=0.05)
    assert sparse.fractions[0][0] < 0.5


def test_attended_fractions_are_reported_for_each_task(our_lm: OffloadLM, capsys: pytest.CaptureFixture[str]) -> None:
    limited = OffloadLM.around(our_lm.llm, batch_size=2)
    limited.loglikelihood(
        make_requests("loglikelihood", ("The captain was", " old"), ("The captain was", " young")), True
    )
    settings = {"until": ["."], "max_gen_toks": 4}
    requested = make_requests("generate_until", *[(f"The {name} was", settings) for name in ("old man", "ship", "sea")])
    for request in requested:
        request.task_name = "told"
    assert limited.generate_until(requested) == our_lm.generate_until(requested)
    output = capsys.readouterr().err
    assert "None: 2 requests, attended 100.00%" in output and "told: 3 requests, attended 100.00%" in output
    assert limited.get_model_info()["attended_and_fetched_fractions"]["told"][0] == 1.0
    assert len(limited.fractions) == 5
    with pytest.raises(InputError, match="leave --apply_chat_template out"):
        limited.apply_chat_template([{"role": "user", "content": "Who?"}])


def test_chat_template_of_the_tokenizer_is_used(our_lm: OffloadLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    monkeypatch.setattr(our_lm.tokenizer, "chat_template", template)
    dialogue = [{"role": "user", "content": "Who?"}]
    assert our_lm.apply_chat_template(dialogue) == "<user>Who?>"
    assert (
        our_lm.apply_chat_template([*dialogue, {"role": "assistant", "content": "I"}], False)
        == "<user>Who?<assistant>I"
    )


def test_command_line_arguments_are_parsed() -> None:
    assert _option("dense_layers", "0:1") == (0, 1)
    assert _option("dense_layers", 2) == (2,)
    assert _option("dense_layers", "none") == ()
    assert _option("max_missed_mass", "none") is None
    assert (_batch("auto", None), _batch("4", None), _batch("auto:2", 8)) == (32, 4, 8)
    with pytest.raises(ConfigError, match="batch_size"):
        _batch("many", None)
    with pytest.raises(ConfigError, match="recnt"):
        OffloadLM("reference", recnt=3)


@pytest.mark.slow
@needs_data
def test_harness_command_runs_with_our_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model_args", "pretrained=reference,policy=infinigen,recent=8", "--tasks", "copa_local"]
    assert main(["lm-eval", *arguments, "--limit", "2", "--output_path", str(tmp_path)]) == 0
    assert "copa_local" in capsys.readouterr().out
    (written,) = tmp_path.rglob("results*.json")
    assert json.loads(written.read_text())["config"]["model"] == "offload-rt"
    assert main(["lm-eval", "--model_args", "pretrained=reference,policy=nothing", "--tasks", "copa_local"]) == 2
    assert "'nothing' is unknown" in capsys.readouterr().err


@pytest.mark.slow
@needs_data
def test_tasks_under_policies_resume_and_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = ModelUnderTest("reference", dtype="float32")
    config = TasksConfig(tasks=("copa_local", "lambada_local"), limit=3)
    variants = [Variant("full"), Variant("streaming", {"budget": 0.1, "recent": 2, "sinks": 1})]
    report = run_tasks(tested, variants, config, tmp_path)
    rows = {(row["task"], row["variant"].split()[0]): row for row in report.rows}
    sparse = rows["lambada_local", "streaming"]
    assert sparse["mean_difference"] > 1e-3
    assert sparse["attended"] < 0.9
    assert set(rows["copa_local", "full"]["metrics"]) == {"acc"}
    assert "perplexity" in sparse["changes"]
    assert all(row["largest_difference"] == 0 for row in report.rows if row["variant"] == "full")
    monkeypatch.setattr(Models, "under", lambda *a: pytest.fail("measured again"))
    output: list[str] = []
    assert run_tasks(tested, variants, config, tmp_path, say=output.append).rows == report.rows
    assert len(output) == len(report.rows) == 4
    other = Variant("streaming", {"budget": 0.2, "recent": 2, "sinks": 1})
    more = TasksConfig(tasks=("copa_local", "rte_local"), limit=3)
    late = run_tasks(tested, [variants[0], other, variants[1]], more, tmp_path, deadline_passed=lambda: True)
    assert [(row["task"], row["variant"]) for row in late.rows] == [("copa_local", v.label) for v in variants]


@needs_data
def test_document_is_prefilled_once_for_all_variants() -> None:
    tested = ModelUnderTest("reference", dtype="float32")
    models = Models(tested, TasksConfig(tasks=("copa_local",)))
    full, sparse = (models.under(variant) for variant in (Variant("full"), Variant("streaming", {"budget": 0.1})))
    assert models.under(Variant("full")) is full and sparse.llm.runner.pool is full.llm.runner.pool
    bounded = models.under(Variant("full", {}, {"host_memory": "8MiB"}))
    assert bounded.llm.runner.pool is not full.llm.runner.pool
    requested = make_requests(
        "generate_until", ("The old man looked at the sea. " * 20, {"until": [], "max_gen_toks": 4})
    )
    full.generate_until(requested)
    sparse.generate_until(requested)
    prompt = len(full.tok_encode(requested[0].args[0]))
    [output] = completed(sparse.llm.generate([full.tok_encode(requested[0].args[0])], SamplingParams(max_tokens=1)))
    assert output.stats.reused_tokens == (prompt - 1) // BLOCK_SIZE * BLOCK_SIZE > 0


def test_ruler_documents_are_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wonderwords", reason="the extra lm_eval[ruler] is not installed")
    from wonderwords import random_word

    # RULER builds and sorts all pairs of words, which are millions.
    limited = {kind: words[:300] for kind, words in random_word._DEFAULT_CATEGORIES.items()}
    monkeypatch.setattr(random_word, "_DEFAULT_CATEGORIES", limited)
    ruler = Path(str(importlib.resources.files("lm_eval"))) / "tasks" / "ruler"
    about = {limit: _task_manager(length=1024, tokenizer="reference", limit=limit).metadata for limit in (3, 5)}
    assert about[3]["tokenizer"] == find_source("reference").name_or_path

    def documents(task: str, limit: int) -> list[Any]:
        manager = TaskManager(include_path=str(ruler), include_defaults=False, metadata=about[limit])
        return list(_loaded(manager, task, 3).dataset["test"])

    for task in ("ruler_cwe", "ruler_vt", "niah_single_1"):
        first = documents(task, 5)
        assert len(first) == 5 and {document["max_length"] for document in first} == {1024}
        assert documents(task, 5) == first
        assert documents(task, 3) == first[:3]


def test_comparison_of_rows() -> None:
    def row(*likelihoods: list[float], acc: list[float]) -> dict[str, Any]:
        samples = [{"responses": r, "metrics": {"acc": a}} for r, a in zip(likelihoods, acc, strict=True)]
        return {"samples": samples, "metrics": {"acc": [sum(acc) / len(acc), None]}}

    base = row([-1.0, -2.0], [-3.0, -1.0], acc=[1.0, 0.0])
    found = compare(row([-1.5, -2.0], [-1.0, -1.5], acc=[1.0, 1.0]), base)
    assert found["agreement"] == 0.5
    assert found["mean_difference"] == pytest.approx((0.5 + 0 + 2.0 + 0.5) / 4)
    assert found["largest_difference"] == 2.0
    assert found["changes"]["acc"][0] == pytest.approx(0.5)
    assert torch.tensor(found["changes"]["acc"][1:]).tolist() == [0.0, 1.0]

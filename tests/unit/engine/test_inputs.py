"""Test how public functions check their arguments.

Error messages contain the invalid value and say what was expected. `stress/test_fuzz_api.py` passes random values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt
from transformers import AutoTokenizer, BatchEncoding

from offload_rt import LLM, ConfigError, InputError, ModelError, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.engine.checks import check_kernels
from offload_rt.engine.prompts import each_prompt, one_prompt, shortened, token_ids
from offload_rt.models.source import find_source
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.sessions.chat_render import encode_rendered
from offload_rt.sessions.session import Session
from offload_rt.storage.options import StoreOptions
from offload_rt.utils.config_fields import Size, check_fields, option


def test_policies_are_checked_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.engine.build.load_model", lambda *given, **named: pytest.fail("loaded the model"))
    for wrong, words in (
        ({"policy": "infinigin"}, "did you mean 'infinigen'"),
        ({"policy_options": {"max_fractions": 0.1}}, "did you mean 'max_fraction'"),
        ({"policy_options": {"max_fraction": 5}}, "max_fraction=5"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM("reference", **wrong)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (EngineConfig, {"max_num_seqs": "4"}),
        (EngineConfig, {"cuda_graphs": "yes"}),
        (EngineConfig, {"policy": 3}),
        (EngineConfig, {"prefill_chunk_size": 2.0}),
        (StoreOptions, {"free_host": "0.1"}),
        (InfiniGenOptions, {"budget": "0.1"}),
        (InfiniGenOptions, {"sinks": 1.5}),
    ],
)
def test_options_of_a_wrong_type_are_refused(kind: type, fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(ConfigError, match=f"{name}=.*must be"):
        kind(**fields)


def test_numpy_numbers_are_converted() -> None:
    params = SamplingParams(max_tokens=np.int64(7), temperature=np.float32(0.5), top_p=1)
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 1)
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert type(params.top_p) is int, "names of stored KV contain option values, so 1 must stay an integer"


@dataclass(frozen=True)
class Mixed:
    limit: Size | None = option(None, help="", least=1024)
    mode: Literal["fast", "small"] | None = option(None, help="")

    def __post_init__(self) -> None:
        check_fields(self)


def test_values_are_parsed_before_they_are_compared() -> None:
    assert Mixed("2KiB", "fast") == Mixed(2048, "fast")  # type: ignore[arg-type]
    assert Mixed() == Mixed(None, None)
    with pytest.raises(ConfigError, match="limit=1000 must be at least 1024"):
        Mixed("1000")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode='slow' is unknown"):
        Mixed(None, "slow")  # type: ignore[arg-type]


IDS = [3, 1, 4, 1]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        np.array(IDS),
        [np.int64(i) for i in IDS],
        {"input_ids": IDS},
        BatchEncoding({"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 4, dtype=torch.bool)}),
        BatchEncoding({"input_ids": [[0, 0, *IDS]], "attention_mask": [[0, 0, 1, 1, 1, 1]]}),
    ],
)
def test_values_with_one_prompt_are_read(prompt: Any) -> None:
    assert each_prompt(prompt) == [IDS] and one_prompt(prompt) == token_ids(prompt) == IDS


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([IDS, "b", torch.tensor([5])], [IDS, "b", [5]]),
        (torch.tensor([IDS, IDS]), [IDS, IDS]),
        (np.array([IDS, IDS]), [IDS, IDS]),
        ({"input_ids": [IDS, [5, 0]], "attention_mask": [[1, 1, 1, 1], [1, 0]]}, [IDS, [5]]),
        ([], [[]]),
        (range(3), [[0, 1, 2]]),
    ],
)
def test_values_with_several_prompts_are_read(prompts: Any, expected: Any) -> None:
    assert each_prompt(prompts) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"text", "bytes: decode it"),
        (None, "NoneType"),
        (5, "of type int"),
        ([1.5, 2], "1.5, of type float"),
        ([True, False], "True, of type bool"),
        ({"role": "user", "content": "hi"}, "pass chat messages"),
        ([{"role": "user", "content": "hi"}], "pass chat messages"),
        (torch.tensor([0.5]), "0.5, of type float"),
        (torch.tensor(3), "of type Tensor"),
        ([IDS, 7], "prompt"),
    ],
)
def test_values_that_are_no_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        each_prompt(prompt)


def test_unreadable_arguments_are_refused_and_tensors_accepted() -> None:
    llm = LLM(tiny_model("llama"), policy="full", host_memory="8MiB")
    with pytest.raises(InputError, match="is a single text"):
        llm.score("abc", "def")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2 prompts instead of one"):
        llm.stream([[1, 2], [3]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="model=None has type NoneType"):
        LLM(None)  # type: ignore[arg-type]
    params, prompt = SamplingParams(max_tokens=2, temperature=0), tiny_prompt(9)
    [expected] = completed(llm.generate(prompt, params))
    for same in (torch.tensor(prompt), np.array(prompt), {"input_ids": [prompt]}):
        assert completed(llm.generate(same, params))[0].token_ids == expected.token_ids  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 9), st.sampled_from(["head", "tail", "middle"]))
def test_truncation_removes_the_chosen_part(ids: list[int], room: int, truncate: str) -> None:
    kept = shortened(ids, room, truncate, "it")
    if len(ids) <= room:
        assert kept == ids == shortened(ids, room, None, "it")
        return
    half = room // 2
    assert (
        kept
        == {"head": ids[-room:], "tail": ids[:room], "middle": ids[:half] + ids[len(ids) - (room - half) :]}[truncate]
    )
    with pytest.raises(InputError, match=f"it has {len(ids)} tokens, and {room} fit"):
        shortened(ids, room, None, "it")
    with pytest.raises(ConfigError, match="truncate='end'"):
        shortened(ids, room, "end", "it")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm, _: llm.generate([[1, 2]], 5), "sampling_params=5 is int; it must be a SamplingParams"),
        (lambda llm, _: llm.generate([[1, 2]], [None, None]), "2 SamplingParams for 1 prompts"),
        (lambda llm, _: llm.score(None, [[1]]), "prompts=None is NoneType; it must be a list"),
        (lambda llm, _: llm.score([[1]], [[1]], 0.0), "decode_from=0.0 is float; it must be an integer"),
        (lambda llm, _: llm.score([[1]], [[1]], batch=0), "batch=0 must be at least 1"),
        (lambda llm, _: llm.session(7, "s"), "session name 7 must be a text of 1 to 200 characters"),
        (lambda llm, _: llm.session("\ud800", "s"), "session name .* must be a text"),
        (lambda llm, _: llm.session("s", None), "store=None is NoneType; it must be a path"),
        (lambda llm, _: llm.session("s", "a\0b"), "store=.* must be a path"),
        (lambda llm, _: llm.session("s", "~nobody-here"), "'~nobody-here': .* write the whole path"),
        (lambda llm, _: llm.under("infinigen", 1), "policy_options=1 is int; it must be a mapping"),
        (lambda llm, session: session.send(["5"], SHORT), "a text instead of token ids"),
        (lambda llm, session: session.send([5], 5), "sampling_params=5 is int"),
        (lambda llm, session: session.truncate(keep_last=1.5), "keep_last=1.5 is float"),
        (lambda llm, session: session.truncate(drop="0"), "a text instead of token ids"),
        (lambda llm, session: session.fork(b"x"), "session name b'x' must be a text"),
        (lambda llm, _: LLM(llm.runner.model.name, SHORT), "it must be EngineConfig"),
        (lambda llm, _: EngineConfig(policy_options={1: 2}), "keys must be strings"),
        (lambda llm, _: EngineConfig(host_memory=True), "host_memory=1 is not a size"),
        (lambda llm, _: EngineConfig(host_memory="0.5B"), "host_memory='0.5B' must be at least one byte"),
        (lambda llm, _: StoreOptions(ttl=10**400), "is not a duration"),
        (
            lambda llm, _: InfiniGenOptions(dense_layers="0"),
            "dense_layers='0' is str; expected a list of layer indices",
        ),
        (lambda llm, _: SamplingParams(temperature=np.array([1, 2])), "temperature=.* it must be a number"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(
    call: Any, message: str, llm_and_session: tuple[LLM, Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the test creates the store "s" in the current folder
    with pytest.raises((InputError, ConfigError), match=message):
        call(*llm_and_session)


SHORT = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture(scope="module")
def llm_and_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Session]]:
    with LLM(tiny_model("llama"), policy="full", host_memory="8MiB") as llm:
        session = llm.session("s", tmp_path_factory.mktemp("store"))
        list(session.send([1, 2, 3], SHORT))
        yield llm, session


def test_lone_surrogates_are_refused() -> None:
    """Text that was cut in the middle of a character may contain a lone surrogate, which a tokenizer cannot encode."""
    with pytest.raises(InputError, match=r"unpaired surrogate at character 2 \('.ud83d'\)"):
        encode_rendered(AutoTokenizer.from_pretrained(find_source("reference").name_or_path), "hi\ud83d")


@pytest.mark.parametrize("token", [-1, 97, 2**40, 2**70])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    llm = LLM("reference", host_memory="16MiB", policy="full")
    # The tokenizer's `decode` would raise an OverflowError for some of these ids.
    beyond = token if token != 97 else llm.geometry.vocab
    for call in (llm.generate, llm.stream, llm.encode):
        with pytest.raises(InputError, match=f"token id {beyond} is not in the vocabulary"):
            call([1, beyond])  # type: ignore[operator]


def test_sequences_longer_than_max_model_len_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
    with LLM(model, policy="full", max_model_len=70, host_memory="4MiB") as llm:
        assert llm.max_model_len == 70
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        assert len(llm.generate(tiny_prompt(64), params)[0].outputs[0].token_ids) == 6
        with pytest.raises(ModelError, match="need 71 positions, and max_model_len=70: shorten"):
            llm.generate(tiny_prompt(65), params)
        session = llm.session("long", tmp_path)
        list(session.send(tiny_prompt(60), params))
        with pytest.warns(UserWarning, match="would outgrow max_model_len=70"):
            list(session.send(tiny_prompt(20), params))
        assert len(session.tokens) <= 70


def test_a_closed_runtime_computes_nothing() -> None:
    llm = LLM(tiny_model("llama"), host_memory="4MiB", policy="full")
    events = llm.stream([1, 2, 3], SamplingParams(max_tokens=5))
    next(events)
    llm.close()
    with pytest.raises(InputError, match="is closed: create another one"):
        next(events)
    assert llm.runner.pool.sequence_bytes == 0
    with pytest.raises(InputError, match="is closed: create another one"):
        llm.under("full")


@pytest.mark.parametrize(
    ("device", "head_dim", "refused"), [("cuda", 577, True), ("cuda", 576, False), ("cpu", 577, False)]
)
def test_heads_that_the_gpu_kernels_do_not_support_are_refused(device: str, head_dim: int, refused: bool) -> None:
    error = pytest.raises(ModelError, match=r"577 dimensions.*at most 576: use device='cpu'")
    with error if refused else nullcontext():
        check_kernels(head_dim, torch.device(device), "the model")

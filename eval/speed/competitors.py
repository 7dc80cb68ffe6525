"""Competitors of `real_speed`: this runtime under its policies, transformers, kvpress and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...errors import ConfigError
from ...llm import LLM
from ...models.source import find_source
from ...sampling_params import SamplingParams
from ...utils.config_fields import check_choice, option

FLOAT32 = "full, float32"
"""The competitor whose tokens serve as the reference."""

Turn = Iterator[int]
"""Greedy continuation of a prompt, token by token."""

Ask = Callable[[Sequence[int]], Turn]


@dataclass(frozen=True)
class SpeedConfig:
    contexts: tuple[int, ...] = option((2048, 8192), help="tokens of a prompt, increasing", metavar="2k,8k")
    tokens: int = option(24, help="tokens decoded after each prompt", metavar="N")
    repeats: int = option(3, help="prompts of each length, from different positions in the text", metavar="N")
    dtype: str = option("bfloat16", help="data type of the models", metavar="bfloat16|float32")
    threads: int = option(1, help="threads of each competitor", metavar="N")
    # The others are compared with the first.
    runtimes: tuple[str, ...] = (
        "transformers, DynamicCache", "transformers, StaticCache", "full", "infinigen", "auto", FLOAT32,
    )  # fmt: skip
    gguf: str | None = option(
        None, help="GGUF file for llama.cpp (llama-cpp-python) and packed weights", metavar="FILE"
    )
    compression: float = option(0.5, help="fraction of the KV entries that kvpress drops", metavar="F")

    def __post_init__(self) -> None:
        for name in self.runtimes:
            check_choice("competitor", name, COMPETITORS)


def _ours(policy: str, dtype: str | None, model: str, config: SpeedConfig) -> Ask:
    llm = LLM(model, policy=policy, dtype=dtype or config.dtype, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=config.tokens + 1, temperature=0, ignore_eos=True)

    def ask(prompt: Sequence[int]) -> Turn:
        return (event.token_id for event in llm.stream(list(prompt), params))

    return ask


def _packed(policy: str, model: str, config: SpeedConfig) -> Ask:
    return _ours(policy, None, _gguf(config), config)


def _gguf(config: SpeedConfig) -> str:
    if config.gguf is None:
        raise ConfigError("this competitor needs the model as a GGUF file: pass --gguf")
    return config.gguf


def _theirs(cache: str, model: str, config: SpeedConfig) -> Ask:
    from transformers import DynamicCache, QuantizedCache, StaticCache
    from transformers.models.auto import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        find_source(model).name_or_path, dtype=getattr(torch, config.dtype), attn_implementation="sdpa"
    )
    press = _press(config.compression) if cache == "kvpress" else None

    @torch.inference_mode()
    def ask(prompt: Sequence[int]) -> Turn:
        room, made = len(prompt) + config.tokens + 1, loaded.config
        rows: Any = (
            StaticCache(made, max_cache_len=room) if cache == "static"
            else QuantizedCache("quanto", made, nbits=4) if cache == "quantized"
            else DynamicCache()
        )  # fmt: skip
        given, position = torch.tensor([list(prompt)]), 0
        while True:
            own: dict[str, Any] = {"past_key_values": rows, "use_cache": True, "logits_to_keep": 1}
            own["position_ids"] = torch.arange(position, position + given.shape[1])[None]
            if press is not None:  # the compressed cache is shorter than the text
                own["cache_position"] = own["position_ids"][0]
            with nullcontext() if press is None or position else press(loaded):
                found = loaded(given, **own)
            position += given.shape[1]
            given = found.logits[:, -1:].argmax(-1)
            yield int(given)

    return ask


def _press(compression: float) -> Any:
    from kvpress import ExpectedAttentionPress

    return ExpectedAttentionPress(compression)


def _llama_cpp(bits: int, model: str, config: SpeedConfig) -> Ask:
    path = _gguf(config)
    import llama_cpp
    import numpy as np

    kind = {16: llama_cpp.GGML_TYPE_F16, 8: llama_cpp.GGML_TYPE_Q8_0, 4: llama_cpp.GGML_TYPE_Q4_0}[bits]
    loaded: Any = llama_cpp.Llama(
        path, n_ctx=max(config.contexts) + config.tokens + 2, n_batch=512, n_threads=config.threads,
        n_threads_batch=config.threads, flash_attn=True, type_k=kind, type_v=kind, verbose=False,
    )  # fmt: skip

    def ask(prompt: Sequence[int]) -> Turn:
        loaded.reset()
        given = list(prompt)
        while True:
            loaded.eval(given)
            logits = np.ctypeslib.as_array(loaded._ctx.get_logits_ith(-1), shape=(loaded.n_vocab(),))
            given = [int(logits.argmax())]
            yield given[0]

    return ask


COMPETITORS: Mapping[str, Callable[[str, SpeedConfig], Ask]] = {
    "transformers, DynamicCache": partial(_theirs, "dynamic"),
    "transformers, StaticCache": partial(_theirs, "static"),
    "transformers, QuantizedCache": partial(_theirs, "quantized"),
    "kvpress": partial(_theirs, "kvpress"),
    **{f"llama.cpp, {bits}-bit KV": partial(_llama_cpp, bits) for bits in (16, 8, 4)},
    **{policy: partial(_ours, policy, None) for policy in ("full", "infinigen", "auto")},
    **{f"{policy}, GGUF": partial(_packed, policy) for policy in ("full", "infinigen")},
    FLOAT32: partial(_ours, "full", "float32"),
}
"""Competitors by name. Each function loads a model and returns a function that answers a prompt.

QuantizedCache uses optimum-quanto with 4 bits and does not quantize the newest 128 tokens. kvpress uses
ExpectedAttention.
"""

"""Load-time verification: compare an adapter with transformers' own forward pass on random tokens, layer by layer.

Each layer of the adapter gets the same input as in transformers. Rounding errors therefore do not accumulate, and the
results must be equal up to the rounding errors of the dtype. The last tokens are computed one by one, as in decoding.
The arguments of transformers' "eager" attention are recorded, and a model that passes an unknown argument is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from ..core import KVPart
from ..errors import ModelError
from ..utils.native_code import cache_folder
from ..utils.progress import report
from .adapter import ModelAdapter
from .checkpoint import as_model_error
from .full_attention import query_and_kv, residual_after_attention
from .multimodal import text_config
from .weights import attention_layers, decoder_layers

_FORMAT = 1
_NEUTRAL = ("_name_or_path", "transformers_version", "architectures", "dtype")
_DECODE_TOKENS = 8
"""Number of tokens at the end of the text that are computed one by one."""
_LONGEST_WINDOW = 512
"""If a sliding window has at most this many tokens, it is verified with a text that is longer than the window.

For longer windows, only the `sliding_window` argument of the attention is compared.
"""
_EXPERTS_SHARE = 0.75
"""For a mixture of experts, the fraction of tokens that must agree.

Rounding may change which expert a token chooses.
"""

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum error for each dtype, relative to a layer's contribution to the residual stream.

Norms are computed in float32 even in float64 models.
"""

_HARMLESS = (
    "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
    "cache_position", "position_embeddings", "logits_to_keep", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits",
)  # fmt: skip
"""Attention arguments that need no check of their own: either they have no effect, or a wrong value would change the
results.
"""

_recorded: ContextVar[list[dict[str, Any]] | None] = ContextVar("_recorded", default=None)
_log = logging.getLogger(__name__)


def verify_once(model: Any, adapter: ModelAdapter, fingerprint: str) -> None:
    """Call `verify_model`, unless a record in the cache folder says that an earlier call succeeded.

    A record is valid only for the same model, adapter, configuration, and versions of this package and transformers.
    """
    # The complete configuration is part of the record, because the fingerprint ignores some entries.
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NEUTRAL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    kind, dtype = type(adapter), str(adapter.dtype).removeprefix("torch.")
    name = f"{fingerprint}-{dtype}-{kind.__module__}.{kind.__qualname__}-{digest}-{_versions()}"
    record = cache_folder() / "verified" / name
    if record.exists():
        return
    verify_model(model, adapter)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()
    except OSError as error:
        _log.warning("the verification is not recorded, so the next start repeats it: %s", error)


@cache
def _versions() -> str:
    return f"{version('offload-rt')}-{version('transformers')}-v{_FORMAT}"


@torch.no_grad()
def verify_model(model: Any, adapter: ModelAdapter) -> None:
    """Compare `adapter` with transformers' own forward pass of `model`.

    Raises:
        ModelError: The results differ (reason "verification"; the message names the first layer that differs), or the
            model passes an unsupported argument to its attention (reason "attention_argument").
    """
    geometry = adapter.geometry
    tested = [window for window in geometry.windows if window is not None and window <= _LONGEST_WINDOW]
    length = min(max(tested, default=16) + 2 * _DECODE_TOKENS, geometry.max_positions)
    _Verification(model, adapter, length, 0).run()
    # Also test the last positions, because errors can depend on the position. Llama 4 (chunked attention) counts cached
    # tokens instead of positions, so it is only tested at the first positions.
    if length < geometry.max_positions and not geometry.chunked:
        _Verification(model, adapter, _DECODE_TOKENS, geometry.max_positions - _DECODE_TOKENS).run()


@dataclass
class _Observed:
    hidden: list[torch.Tensor] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    arguments: list[dict[str, Any]] = field(default_factory=list)


class _Verification:
    def __init__(self, model: Any, adapter: ModelAdapter, length: int, start: int) -> None:
        self._model, self._name = model, type(model).__name__
        self._adapter = adapter.for_new_sequence()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(adapter.geometry.vocab, (length,), generator=generator)
        self._tokens = tokens.to(adapter.device)
        self._positions = torch.arange(start, start + length, device=adapter.device)
        self._one_by_one = range(max(1, length - _DECODE_TOKENS), length)
        first = self._one_by_one.start
        # For hybrid models, the tokens are computed in two pieces, because states must continue from piece to piece.
        half = first // 2 if adapter.geometry.states else 0
        cuts = sorted({0, half, *self._one_by_one, length})
        self._slices = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
        self._shared: list[dict[int, KVPart]] = [{} for _ in self._slices]

    def run(self) -> None:
        observed = self._observe()
        self._compare_arguments(observed.arguments)
        embedded = self._run_stages(-1, self._adapter.embed(self._tokens, self._positions))
        # A layer of the adapter covers a decoder layer with attention and all decoder layers without attention after
        # it.
        starts = attention_layers(decoder_layers(self._model))
        stops = [*starts[1:], len(observed.hidden) - 1]
        self._compare("the embedding", torch.zeros_like(embedded), embedded, observed.hidden[starts[0]])
        for layer, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            report("verifying the model against transformers (once)", layer, len(starts))
            layer_input = observed.hidden[start]
            output = self._run_stages(layer, self._layer(layer, layer_input))
            self._compare(f"layer {layer}", layer_input, output, observed.hidden[stop])
        logits = self._adapter.logits(observed.hidden[-1][-len(observed.logits) :])
        self._compare("the head", torch.zeros_like(logits), logits, observed.logits.to(logits.dtype))

    def _observe(self) -> _Observed:
        observed = _Observed()
        layers = decoder_layers(self._model)
        parameters = inspect.signature(self._model.forward).parameters
        accepted = set(parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            accepted.add("position_ids")  # A subclass may pass all arguments to its base class without naming them.
        options: dict[str, Any] = {"position_ids": self._positions[None], "use_cache": False}
        options["logits_to_keep"] = _DECODE_TOKENS
        if self._adapter.geometry.kv_from:
            # If this is a number, Gemma 4 computes later layers only for the last tokens; with indices, it computes
            # them for all.
            options["logits_to_keep"] = torch.arange(len(self._tokens), device=self._tokens.device)[-_DECODE_TOKENS:]

        def enter(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            observed.hidden.append(_tensor(args[0] if args else named["hidden_states"]))

        with ExitStack() as stack:
            stack.enter_context(_recording(text_config(self._model.config), observed.arguments))
            stack.callback(layers[0].register_forward_pre_hook(enter, with_kwargs=True).remove)
            for layer in layers:
                hook = layer.register_forward_hook(lambda *call: observed.hidden.append(_tensor(call[-1])))
                stack.callback(hook.remove)
            with as_model_error(f"{self._name} cannot be verified, because its forward pass fails for a text"):
                out = self._model(self._tokens[None], **{n: value for n, value in options.items() if n in accepted})
        observed.logits = out.logits[0, -_DECODE_TOKENS:]
        return observed

    def _layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        adapter, outs, parts = self._adapter, [], list[KVPart]()
        for s, shared in zip(self._slices, self._shared, strict=True):
            inputs = adapter.attention_input(layer, hidden[s])
            q, own = query_and_kv(adapter, layer, inputs, self._positions[s], shared)
            parts.append(own)
            kv = KVPart(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))
            residual = residual_after_attention(adapter, layer, hidden[s], q, kv, s.stop)
            outs.append(adapter.mlp(layer, residual, self._tokens[s]))
        return torch.cat(outs)

    def _run_stages(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        for stage in self._adapter.stages(layer):
            hidden = torch.cat([stage.run(hidden[s]) for s in self._slices])
        return hidden

    def _compare(self, what: str, layer_input: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise ModelError if `actual` and `expected` `[T, D]` differ by more than rounding errors.

        `what` names the result in the message. The tolerance is relative to the layer's contribution, which is the
        difference between `expected` and `layer_input`.
        """
        wide = torch.promote_types(actual.dtype, torch.float32)
        actual, expected, layer_input = (torch.nan_to_num(x.to(wide), 0, 0, 0) for x in (actual, expected, layer_input))
        dtype = self._adapter.dtype
        added, size = (x.norm(dim=-1) for x in (expected - layer_input, expected))
        allowed = _TOLERANCES[dtype] * added + 4 * torch.finfo(dtype).eps * size
        errors = (actual - expected).norm(dim=-1) / allowed.clamp_min(torch.finfo(wide).tiny)
        share = _EXPERTS_SHARE if self._adapter.geometry.experts else 1.0
        split = len(errors) - min(len(self._one_by_one), len(errors))
        for part, phase in ((errors[:split], "prefill"), (errors[split:], "decode")):
            if len(part) and not float(part.quantile(share)) <= 1:
                difference = float((actual - expected).norm() / (expected - layer_input).norm().clamp_min(1e-30))
                raise ModelError(
                    f"{self._name} failed load-time verification: {what} differs from transformers' result by "
                    f"{difference:.2g} of its size in {phase}; this version does not support the model",
                    reason="verification",
                )

    def _compare_arguments(self, arguments: list[dict[str, Any]]) -> None:
        geometry = self._adapter.geometry
        # The model does not call its attention through transformers' attention interface.
        if len(arguments) != geometry.layers:
            return
        for layer, kwargs in enumerate(arguments):
            unsupported = sorted(name for name, value in kwargs.items() if name not in _HARMLESS and _has_effect(value))
            window, cap, sinks = kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux")
            adapter_sinks = self._adapter.sinks[layer]
            if window is not None and window != geometry.windows[layer]:
                unsupported.append(f"sliding_window={window}")
            if (cap or None) != geometry.softcap:
                unsupported.append(f"softcap={cap}")
            if not _equal_sinks(sinks, adapter_sinks):
                unsupported.append("s_aux")
            if unsupported:
                raise ModelError(
                    f"{self._name} calls its attention with {', '.join(unsupported)} in layer {layer}, which this "
                    "version does not support",
                    reason="attention_argument",
                )


def _equal_sinks(recorded: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if recorded is None or expected is None:
        return recorded is expected
    return torch.equal(recorded.to(expected), expected)


def _has_effect(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0)


def _tensor(out: Any) -> torch.Tensor:
    hidden: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0].detach().clone()
    return hidden


@contextmanager
def _recording(config: Any, arguments: list[dict[str, Any]]) -> Iterator[None]:
    """Within the `with` block, make models built from `config` use eager attention, and append the arguments of each
    attention call to `arguments`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    before, token = config._attn_implementation, _recorded.set(arguments)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _recorded.reset(token)


_NAME = "offload_rt_recording"


def _attend(module: Any, *tensors: Any, **arguments: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(arguments)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    dtype = tensors[0].dtype
    # Compute in at least float32: with large keys (Qwen's biases), scores in half precision are too inaccurate.
    exact = (x.to(torch.promote_types(dtype, torch.float32)) if _is_half(x) else x for x in tensors)
    out, *rest = eager(module, *exact, **arguments)
    return out.to(dtype), *rest


def _is_half(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize == 2

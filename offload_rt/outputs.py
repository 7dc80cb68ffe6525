"""Outputs of requests: tokens, completions, log-probabilities and statistics."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: "stop" (stop string, stop token or end of text), "length" (`max_tokens`) or "abort"."""

StopReason = str | int | None
"""Stop string or stop token that ended a completion. None if something else ended it, such as an end-of-text token."""

_SHOWN = 60  # number of characters that `repr` shows of a text


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: Natural logarithm of the token's probability before any sampling filter.
        rank: Rank of the token by probability. The most probable token has rank 1.
        decoded_token: Text of the token. None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id. Contains the actual token and the most probable tokens."""


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a request, as yielded by `LLM.stream`. A beam search yields one item per beam.

    Attributes:
        request_id: Number of the request in its engine.
        text: New text. It can be empty. It can also include text of earlier tokens that was held back until now.
        token_id: Id of the token.
        index: Position of the token in the completion, starting at 0.
        finish_reason: Why the completion ended. Set only in its last item, otherwise None.
        sample: Index of the completion among the request's `n` completions.
        stop_reason: Stop string or stop token that ended the completion. Set only in its last item, otherwise None.
        logprobs: Log-probabilities, if requested.
    """

    request_id: int
    text: str
    token_id: int
    index: int
    finish_reason: FinishReason | None
    sample: int = 0
    stop_reason: StopReason = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: Index of the completion among the prompt's `n` completions.
        text: Generated text, up to the stop string.
        token_ids: All new tokens, including the last one.
        logprobs: One mapping per new token, if requested.
        cumulative_logprob: Sum of the log-probabilities of the new tokens, if requested.
        finish_reason: Why the completion ended. None while it is running.
        stop_reason: Stop string or stop token that ended the completion, or None.
        stats: Cost of the completion. None while it is running.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    stats: Stats | None

    def __repr__(self) -> str:
        stopped = "" if self.stop_reason is None else f", stop_reason={self.stop_reason!r}"
        ended = f"finish_reason={self.finish_reason!r}{stopped}"
        return f"CompletionOutput({_short(self.text)}, tokens={len(self.token_ids)}, {ended})"


@dataclass
class RequestMetrics:
    """Times at which events occurred for one prompt and all its completions, in seconds since the epoch.

    A time is None until the event has occurred.
    """

    arrival_time: float = field(default_factory=time.time)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    def record_token(self) -> None:
        self.last_token_time = time.time()
        self.first_token_time = self.first_token_time or self.last_token_time

    @property
    def time_in_queue(self) -> float | None:
        """Time from arrival to the start of the prefill, in seconds."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class RequestTrace:
    """Progress and attention of the first completion of a request.

    Attributes:
        layers_prefilled: Number of layers that have been computed for the whole prompt.
        layers: Number of layers of the model.
        attended_by_step: For each decode step and layer, the fraction of visible tokens that were attended to exactly,
            `[steps][layers]`.
        h2d_bytes: Size in bytes of the KV that was copied to the device so far.
        selected: For each prompt token, the number of times that it was selected, summed over decode steps, layers and
            KV heads, int64 `[prompt tokens]`. Sinks and recent tokens are attended to without being selected and are
            not counted.
    """

    layers_prefilled: int
    layers: int
    attended_by_step: list[list[float]]
    h2d_bytes: int
    selected: NDArray[np.int64]


@dataclass(frozen=True)
class RequestOutput:
    """Output of one prompt.

    Attributes:
        request_id: Name of the request.
        prompt: Text of the prompt. None if token ids were given.
        prompt_token_ids: Token ids of the prompt.
        prompt_logprobs: One mapping per prompt token, if requested. None for the first token.
        outputs: The `n` completions.
        finished: Whether all completions have ended.
        num_cached_tokens: Number of prompt tokens whose KV was reused instead of computed.
        num_recomputed_tokens: See `Stats.recomputed_tokens`.
        metrics: Times of the request.
        trace: Progress and attention, if requested with `AsyncLLM.generate(trace=True)`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics | None = None
    trace: RequestTrace | None = None
    num_recomputed_tokens: int = 0

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"{_short(self.prompt)}, "
        size = f"prompt_tokens={len(self.prompt_token_ids)}, num_cached_tokens={self.num_cached_tokens}"
        return f"RequestOutput({self.request_id!r}, {prompt}{size}, finished={self.finished}, outputs={self.outputs})"


@dataclass(frozen=True)
class Stats:
    """Cost of one request. Times are wall-clock seconds and sizes are bytes.

    Some KV and weights are shared by several sequences of a batch. They are transferred once per step and counted only
    for the first of these sequences, so the sum over a batch equals the transferred bytes. On a CPU, transfers are
    counted as if there were a device. Fractions are means over layers and new tokens.

    Attributes:
        reused_tokens: Number of prompt tokens whose KV was reused from another sequence or from a session store, in
            whole blocks of 64 tokens.
        recomputed_tokens: Number of prompt tokens whose KV was cached but had to be computed again, because the nearest
            snapshot of the recurrent state was before them (hybrid models).
        diverged_at: Index of the first prompt token that differs from all cached prefixes. It may be larger than
            `reused_tokens`, which counts whole blocks. None if the whole prompt was cached, or if no prefix was looked
            up.
        h2d_bytes: KV copied from host memory to the device.
        d2h_bytes: KV copied from the device to host memory.
        h2d_bytes_steps: The part of `h2d_bytes` that decode steps copied.
        h2d_weight_bytes: Weights copied to the device. Not included in `h2d_bytes`.
        h2d_weight_bytes_steps: The part of `h2d_weight_bytes` that decode steps copied.
        kv_bytes_host: KV of this sequence in host memory. With `disk`, the KV of all sequences in host memory.
        kv_bytes_device: Resident KV entries and staging buffers on the device.
        kv_bytes_disk: KV of this sequence on disk.
        scoring_bytes_device: Scoring keys and approximate KV on the device.
        scoring_bytes_host: Scoring keys and approximate KV in host memory.
        approximate_bytes_device: Approximate KV on the device. Included in `scoring_bytes_device`.
        weight_bytes_device: Weights on the device, including buffers for streamed weights.
        peak_device_bytes: Peak memory of torch's allocator on CUDA. On a CPU, the sum of weights, KV and scoring keys.
        fetched_fraction: Fraction of the visible KV that was transferred. With `exact`, all passes for a token are
            added up.
        exact_fraction: Fraction of the visible tokens that were attended to exactly.
        sparse_fetched_fraction: The same as `fetched_fraction`, but only over the layers that select tokens.
        sparse_exact_fraction: The same as `exact_fraction`, but only over the layers that select tokens.
        approximate_fraction: Fraction of the visible tokens that were attended to with approximate KV, over the layers
            that select tokens.
        missed_mass: Missed attention mass, as a mean over sampled steps and over the layers that select tokens. With
            approximate KV, this attention is estimated, not lost. None if it was not measured.
        missed_mass_worst_layer: Missed attention mass in the layer where it is largest. Mean over sampled steps.
        working_set_rows: Capacity of the working set in KV entries, per layer and KV head.
        working_set_bytes: Size of the working set. Included in `kv_bytes_device`.
        working_set_hit_rate: Fraction of the selected KV entries that were found in the working set.
        device_kv_hit_rate: Fraction of the non-resident KV entries read by decode steps that already had copies on the
            device (`device_kv_memory`).
        drafted_tokens: Number of draft tokens in lossless mode (`exact`).
        accepted_tokens: Number of draft tokens that full attention accepted.
        verifications: Number of verification passes. Each produces one token in addition to the accepted draft tokens.
        draft_speedup: Estimated time of decoding without drafts, divided by the measured time. None if no pass without
            drafts was measured.
        attended_by_step: For each step and layer, the fraction of visible tokens that were attended to exactly,
            `[steps][layers]`.
        missed_by_step: For each sampled step, a tuple (step, missed attention mass of each layer).
        disk_bytes_read, disk_bytes_written: Bytes that all sequences have read from and written to disk since this
            sequence began.
        disk_hit_rate: Fraction of the selected KV entries that were found in host memory, so that no disk access was
            needed.
        expert_hit_rate: Fraction of the chosen experts that were already on the device.
        native_code: Processor level of the C code and its origin: prebuilt, compiled or missing.
        dense_until: Longest context for which every layer attends to all tokens (policy "auto").
    """

    model: str
    policy: str
    device: str
    dtype: str
    prompt_tokens: int
    reused_tokens: int
    diverged_at: int | None
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    h2d_bytes: int
    d2h_bytes: int
    h2d_weight_bytes: int
    kv_bytes_host: int
    kv_bytes_device: int
    scoring_bytes_device: int
    scoring_bytes_host: int
    approximate_bytes_device: int
    weight_bytes: int
    weight_bytes_device: int
    peak_device_bytes: int
    fetched_fraction: float
    exact_fraction: float
    sparse_fetched_fraction: float
    sparse_exact_fraction: float
    approximate_fraction: float
    dense_layers: tuple[int, ...]
    layers: int
    missed_mass: float | None
    missed_mass_worst_layer: float | None
    working_set_rows: int
    working_set_bytes: int
    working_set_hit_rate: float | None
    drafted_tokens: int
    accepted_tokens: int
    verifications: int
    draft_speedup: float | None
    attended_by_step: list[list[float]]
    missed_by_step: list[tuple[int, list[float]]]
    kv_bytes_disk: int = 0
    disk_bytes_read: int = 0
    disk_bytes_written: int = 0
    disk_hit_rate: float | None = None
    device_kv_hit_rate: float | None = None
    expert_hit_rate: float | None = None
    h2d_bytes_steps: int = 0
    h2d_weight_bytes_steps: int = 0
    native_code: str = ""
    recomputed_tokens: int = 0
    dense_until: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that contains only plain types, ready for JSON."""
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Number of decoded tokens per second of decoding time."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decoded_tokens(self) -> int:
        """Number of new tokens, not counting the first one, which the prefill computes."""
        return self.accepted_tokens + (self.verifications or len(self.attended_by_step))

    @property
    def h2d_bytes_per_token(self) -> float:
        """Bytes of KV that were copied to the device per decoded token."""
        return self.h2d_bytes_steps / self.decoded_tokens if self.decoded_tokens else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Fraction of draft tokens that were accepted. None if there were no draft tokens."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Mean number of tokens per verification pass: the accepted draft tokens plus one. None without `exact`."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")

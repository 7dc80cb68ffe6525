"""Outputs of requests: tokens, completions, log-probabilities and statistics."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
"""Reason why a completion ended: "stop" (stop string, stop token or end of text), "length" (`max_tokens`) or "abort".
"""

StopReason = str | int | None
"""Stop string or stop token that ended a completion. None if another reason ended it, such as an end-of-text token."""

_SHOWN = 60  # number of characters of a text that `repr` shows


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: Natural logarithm of the probability, before any sampling filter.
        rank: Rank of the token by probability; 1 is the most probable token.
        decoded_token: Text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id, for the actual token and the most probable tokens."""


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a request, as yielded by `LLM.stream`. A beam search yields one item per beam.

    Attributes:
        request_id: Number of the request in its engine.
        text: New text. It may be empty, and may contain text of earlier tokens that was held back until now.
        token_id: Id of the token.
        index: Position of the token in the completion, from 0.
        finish_reason: Reason for the end of the completion, in its last item. Otherwise None.
        sample: Index of the completion among the request's `n` completions.
        stop_reason: Stop string or stop token that ended the completion, in its last item. Otherwise None.
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
        cumulative_logprob: Sum of the new tokens' log-probabilities, if requested.
        finish_reason: Reason for the end of the completion; None while it runs.
        stop_reason: Stop string or stop token that ended the completion, or None.
        stats: Cost of the completion; None while it runs.
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
    """Times of one prompt with all its completions, in seconds since the epoch; None before the event."""

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
        """Seconds from arrival to the start of prefill."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class RequestTrace:
    """Progress and attention of the first completion of a request.

    Attributes:
        layers_prefilled: Number of layers that have been computed for the whole prompt.
        layers: Number of layers of the model.
        attended_by_step: Fraction of visible tokens that each decode step attended to exactly, `[steps][layers]`.
        h2d_bytes: Size in bytes of the KV copied to the device so far.
        selected: Number of selections of each prompt token, summed over decode steps, layers and KV heads, int64
            `[prompt tokens]`. Sinks and recent tokens are attended to without being selected and are not counted.
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
        prompt: Text of the prompt; None if token ids were given.
        prompt_token_ids: Token ids of the prompt.
        prompt_logprobs: One mapping per prompt token, if requested; None for the first token.
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

    KV and weights that several sequences of a batch share are transferred once per step and counted for the first one,
    so the sum over a batch equals the transferred bytes. On a CPU, transfers are counted as if there were a device.
    Fractions are means over layers and new tokens.

    Attributes:
        reused_tokens: Number of prompt tokens whose KV was reused from another sequence or from a session store, in
            whole blocks of 64 tokens.
        recomputed_tokens: Number of prompt tokens whose KV was cached but computed again, because the nearest snapshot
            of the recurrent state was before them (hybrid models).
        diverged_at: Index of the first prompt token that differs from all cached prefixes. It may be larger than
            `reused_tokens`, which counts whole blocks. None if the whole prompt was cached, or no prefix was looked up.
        h2d_bytes: KV copied from host memory to the device.
        d2h_bytes: KV copied from the device to host memory.
        h2d_bytes_steps: Part of `h2d_bytes` for decode steps.
        h2d_weight_bytes: Weights copied to the device, not included in `h2d_bytes`.
        h2d_weight_bytes_steps: Part of `h2d_weight_bytes` for decode steps.
        kv_bytes_host: KV of this sequence in host memory. With `disk`, KV of all sequences in host memory.
        kv_bytes_device: Resident KV entries and staging buffers on the device.
        kv_bytes_disk: KV of this sequence on disk.
        scoring_bytes_device: Scoring keys and approximate KV on the device.
        scoring_bytes_host: Scoring keys and approximate KV in host memory.
        approximate_bytes_device: Approximate KV on the device, included in `scoring_bytes_device`.
        weight_bytes_device: Weights on the device, including buffers for streamed weights.
        peak_device_bytes: Peak memory of torch's allocator on CUDA. On a CPU, the sum of weights, KV and scoring keys.
        fetched_fraction: Fraction of the visible KV that was transferred. With `exact`, all passes for a token are
            added up.
        exact_fraction: Fraction of the visible tokens that were attended to exactly.
        sparse_fetched_fraction: `fetched_fraction` over the layers that select tokens.
        sparse_exact_fraction: `exact_fraction` over the layers that select tokens.
        approximate_fraction: Fraction of the visible tokens that were attended to with approximate KV, over the layers
            that select tokens.
        missed_mass: Missed attention mass, mean over sampled steps and layers that select tokens. With approximate KV,
            this attention is estimated, not lost. None if it was not measured.
        missed_mass_worst_layer: Missed attention mass of the layer with the largest value, mean over sampled steps.
        working_set_rows: Capacity of the working set in KV entries per layer and KV head.
        working_set_bytes: Size of the working set, included in `kv_bytes_device`.
        working_set_hit_rate: Fraction of selected KV entries found in the working set.
        device_kv_hit_rate: Fraction of the non-resident KV entries read by decode steps that had copies on the device
            (`device_kv_memory`).
        drafted_tokens: Number of draft tokens in lossless mode (`exact`).
        accepted_tokens: Number of draft tokens that full attention accepted.
        verifications: Number of verification passes. Each produces one token in addition to the accepted draft tokens.
        draft_speedup: Estimated time of decoding without drafts, divided by the measured time. None if no pass without
            drafts was measured.
        attended_by_step: Fraction of visible tokens that each step attended to exactly, `[steps][layers]`.
        missed_by_step: (step, missed attention mass of each layer) for each sampled step.
        disk_bytes_read, disk_bytes_written: Disk use of all sequences since this sequence began.
        disk_hit_rate: Fraction of selected KV entries found in host memory instead of on disk.
        expert_hit_rate: Fraction of chosen experts that were on the device.
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
        """Return a dictionary of plain types, ready for JSON."""
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decoding time."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decoded_tokens(self) -> int:
        """Number of new tokens except the first, which prefill computes."""
        return self.accepted_tokens + (self.verifications or len(self.attended_by_step))

    @property
    def h2d_bytes_per_token(self) -> float:
        """Bytes of KV copied to the device per decoded token."""
        return self.h2d_bytes_steps / self.decoded_tokens if self.decoded_tokens else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Fraction of draft tokens that were accepted; None without draft tokens."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Mean number of tokens per verification pass: accepted draft tokens plus one. None without `exact`."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")

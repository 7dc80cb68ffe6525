"""What comes back: tokens as they come, completions, and what each cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: by a stop string, a stop token or the end of the text; by `max_tokens`; or by its caller."""

StopReason = str | int | None
"""Which stop string or stop token ended a completion; None where it was the end of the text, or neither."""

_SHOWN = 60
"""Characters of a text in a `repr`."""


@dataclass(frozen=True)
class Logprob:
    """Of one token at one place: its log-probability, its rank (1 is the most probable) and its text (None without a
    tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]
"""At one place, by token id: the token that is there, and the most probable ones."""


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a request. `text` is what can be shown now (it may be empty, or hold text of earlier tokens);
    `index` counts the completion's new tokens from 0; `finish_reason` and `stop_reason` are set on the last event;
    `sample` says which of the request's n completions it belongs to. Of a beam search only the last events come, each
    with all its text."""

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
    """One of the completions of a prompt, the `index`-th. `text` ends before a stop string; `token_ids` are all new
    tokens, the last included. `logprobs` has a mapping for each of them where `SamplingParams.logprobs` asks for it;
    `cumulative_logprob` is the sum of theirs. What is still being written has no `finish_reason` and no `stats` yet."""

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


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to one prompt, as `time.time()` says; None: they have not. `time_in_queue` is in seconds."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None

    @property
    def time_in_queue(self) -> float | None:
        """From arrival to the beginning of the prefill."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class RequestTrace:
    """What the runtime does for the first completion of a prompt, while it does it.

    layers_prefilled: of the model's `layers`, those that the prompt has gone through.
    attended_by_step: `[steps][layers]`, share of the visible rows that each decode step attended to.
    link_bytes: rows that crossed to the device so far.
    selected: int64 `[prompt tokens]`, how often a layer and KV head of a decode step has selected each token, besides
        the resident ones (the first tokens and the newest), which are always attended to.
    """

    layers_prefilled: int
    layers: int
    attended_by_step: list[list[float]]
    link_bytes: int
    selected: NDArray[np.int64]


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt: its `outputs`, as many as `n` says. `prompt` is its text, None where token ids were
    given; `num_cached_tokens` of its tokens had been computed before; `prompt_logprobs`, where they are asked for, has
    None for the first of them and a mapping for each other one. `finished` once every completion has ended. `trace`,
    where it was asked for (`AsyncLLM.generate`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics | None = None
    trace: RequestTrace | None = None

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"{_short(self.prompt)}, "
        size = f"prompt_tokens={len(self.prompt_token_ids)}, num_cached_tokens={self.num_cached_tokens}"
        return f"RequestOutput({self.request_id!r}, {prompt}{size}, finished={self.finished}, outputs={self.outputs})"


@dataclass(frozen=True)
class Stats:
    """What one request cost and how much of the context it used. Times are wall-clock seconds, sizes bytes.

    link_bytes_*: rows that crossed (or, on the CPU, would cross) between host and device. Rows that several sequences
        share cross once a step and are counted for the first of them: the sum over the batch is what crossed.
    reused_tokens: prompt tokens whose KV was there: another sequence had computed it, or it came, whole, from a
        session's store. Prompts share full chunks of 64 tokens.
    diverged_at: the first prompt token at which the prompt parts from all that was there (it may lie behind
        `reused_tokens`, within a chunk); None where all of it was there, or nothing was looked for.
    link_bytes_weights: weights that crossed for this sequence's prefill and steps, layers, experts and rows of the
        embedding, not in `link_bytes_to_device`; for a batch they cross once and are counted for its first sequence.
    link_bytes_weights_steps: of these, what crossed for steps, not for the prefill.
    expert_hit_rate: with `experts_on_device`, share of the experts that steps chose, layer by layer, that were on the
        device; None where all are, or for this sequence nothing was counted.
    kv_bytes_host / kv_bytes_device: KV of this sequence in the pool / resident rows and staging of the runtime.
    tail_bytes_device: of `scoring_bytes_device`, low-bit rows that are scoring keys and tail in one; 0 without a tail.
    estimated_fraction: over the layers that select, mean share of the visible rows that the tail estimates: those that
        are not attended; 0 without a tail, and with `exact`, where all are.
    scoring_bytes_device / scoring_bytes_host: scoring keys of this sequence, on the device or where they are scored.
    weight_bytes / weight_bytes_device: all weights / those on the device, buffers for the others included.
    link_fraction, attended_fraction: mean over layers and new tokens, dense layers included; with `exact` of all passes
        that a token took, drafts and verification.
    drafted_tokens, accepted_tokens: with `exact`, tokens that were drafted, and those that full attention chose too.
    verifications: passes over all rows, each of which gave one token besides those accepted.
    draft_speedup: seconds that the decoded tokens would have taken one by one over those they took, by the shortest of
        the request's passes without drafts; None where it had none (`adaptive=False`), and without `exact`.
    sparse_link_fraction, sparse_attended_fraction: the same over the layers that select; 0 where none does.
    missed_mass: attention mass outside the attended rows, mean over sampled steps and selecting layers;
        `missed_mass_worst_layer` is the largest of the layers' means. None where nothing was measured. With a tail it
        is not lost: it is the mass that the tail estimates.
    working_set_rows: rows of each KV head and layer that stay on the device (`working_set=`); working_set_bytes: what
        this sequence's take, tables included, in `kv_bytes_device`; working_set_hit_rate: share of the selected rows
        that they had, None without one. Such rows are not in `link_bytes_to_device` and `link_fraction`.
    kv_bytes_disk: KV of this sequence in a pool on disk (`disk=`); `kv_bytes_host` is then all that is in host memory
        of the pool. disk_bytes_read, disk_bytes_written: of the disk since the sequence began, for whoever ran then;
        disk_hit_rate: share of the selected rows that were in host memory, None where none were looked for.
    peak_device_bytes: on CUDA the allocator's peak; on the CPU weight_bytes_device + kv_bytes_device + scoring keys, as
        counted.
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
    link_bytes_to_device: int
    link_bytes_to_host: int
    link_bytes_weights: int
    kv_bytes_host: int
    kv_bytes_device: int
    scoring_bytes_device: int
    scoring_bytes_host: int
    tail_bytes_device: int
    weight_bytes: int
    weight_bytes_device: int
    peak_device_bytes: int
    link_fraction: float
    attended_fraction: float
    sparse_link_fraction: float
    sparse_attended_fraction: float
    estimated_fraction: float
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
    expert_hit_rate: float | None = None
    link_bytes_weights_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, ready for JSON."""
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decoding."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decoded_tokens(self) -> int:
        """New tokens but the first, which comes from the prefill."""
        return self.accepted_tokens + (self.verifications or len(self.attended_by_step))

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that full attention chose too; None where none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens that a verification gives, its own included; None without `exact`."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")

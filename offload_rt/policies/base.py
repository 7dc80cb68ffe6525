"""The contract between the decode loop and a policy.

A `Policy` is immutable and shared; a `PolicyState` belongs to one sequence, holds whatever the policy remembers of it
(scoring keys, accumulated attention, chunk bounds), and forks with it. The loop calls, for each sequence:

    prefill, layer l      state.on_queries(l, q, k, start) for each slice of queries, then state.on_keys(l, k, 0) and
                          state.on_values(l, v, 0)
    decode, layer l       state.on_keys(l, k, N - 1)            one key, before layer l attends
                          state.on_values(l, v, N - 1)          its value
                          state.select(l, q, visible)           once, at the moment `Policy.source` names
                          state.repair(l, q, visible, sel)      with layer l's true query, before it attends
                          state.tail(l, q, visible, sel)        what was not selected, from what the state holds
                          state.on_attended(l, ...)             only if `wants_weights`

A layer in `dense_layers` is never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from ..core import Selection, Visible
from .infinigen.key_lists import Rule
from .infinigen.scoring_keys import ScoringKeys

QuerySource = Literal["attention_input", "normed_input", "residual", "query"]
"""What the query given to `select` for layer l is made from: speculated one layer ahead (the first three), or layer
l's true query ("query"), which leaves no time to prefetch. Layer 0 always gets its true query: it is known from the
embedding alone."""

KeyReader = Callable[[int, range], torch.Tensor]
"""(layer, token range) -> that sequence's keys `[Hkv, n, d]`, read from the host pool where they lie. For policies
that define themselves by the full keys (oracle), and for measurement; reading them is not counted as link traffic."""


class PolicyState(Protocol):
    """What a policy knows of one sequence."""

    @property
    def device_bytes(self) -> int:
        """Bytes of scoring keys and other selection data held on the compute device."""
        ...

    @property
    def tail_bytes(self) -> int:
        """Bytes, of `device_bytes`, of the low-bit rows that `tail` estimates from; 0 where it estimates nothing."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of scoring keys held in host memory, where the device is short."""
        ...

    @property
    def scoring_keys(self) -> ScoringKeys | None:
        """What `KeyLists` of a batch are made of, where the policy has a `rule`."""
        ...

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Prefill: the true queries `[H, m, d]` of tokens [start, start + m), and all keys `[Hkv, n, d]`, n >= start +
        m, that exist of the layer. Causality is the policy's: query i may see keys up to start + i."""
        ...

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Keys `[Hkv, m, d]` (post-RoPE) entered the slots [start, start + m) of the layer's cache; `start` is where
        the last call for this layer ended, or a slot whose token has been moved or evicted."""
        ...

    def on_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """The values `[Hkv, m, d]` of the keys that `on_keys` was given last for the layer."""
        ...

    def on_moved(self, layer: int, source: int, target: int) -> None:
        """The token in slot `source` now lies in slot `target`, whose own token is gone; `on_keys` for `source`
        follows. Only called if the policy is `evictable`."""
        ...

    def select(self, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """Which of `visible.candidates` layer `layer` fetches, from the (speculated) query `[H, d]`. Only tokens whose
        keys were given by `on_keys` may be candidates."""
        ...

    def repair(self, layer: int, q: torch.Tensor, visible: Visible, selection: Selection) -> Selection | None:
        """Candidates to fetch in addition, now that the true query `[H, d]` is known; disjoint from `selection`."""
        ...

    def tail(
        self, layer: int, q: torch.Tensor, visible: Visible, selection: Selection
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """An estimate of the attention of the true query q `[H, d]` over the candidates that are not in `selection`,
        repairs included: out `[H, d]` and lse `[H]` (natural log; 0 and -inf where there are none), to be joined with
        the exact rows by log-sum-exp. None where a policy leaves them out."""
        ...

    def on_attended(self, layer: int, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        """The attention just computed in a selecting layer: token indices `[Hkv, n]` and softmax weights `[Hkv, n]`
        summed over the G query heads of each KV head, resident and newest tokens included."""
        ...

    def fork(self, keys: KeyReader) -> PolicyState:
        """An independent copy for a sequence that continues from the same tokens; `keys` reads that one's keys."""
        ...

    def fork_prefix(self, tokens: int) -> PolicyState | None:
        """A state that knows the first `tokens` tokens and no other, for a sequence that has the same rows of these in
        its chunks; None where learning them anew is as good, or where what is known depends on more than the rows."""
        ...

    def check_integrity(self) -> None:
        """Asserts that the state is consistent with itself."""
        ...


class Policy(Protocol):
    """A way of selecting tokens, with its options fixed."""

    @property
    def name(self) -> str:
        """The name that `LLM(policy=...)` takes."""
        ...

    @property
    def query_source(self) -> QuerySource:
        """Which query `select` is given."""
        ...

    @property
    def sinks(self) -> int:
        """First tokens of the sequence that are always resident."""
        ...

    @property
    def recent(self) -> int:
        """Last tokens of the sequence that are always resident, the newest included; at least 1."""
        ...

    @property
    def dense_layers(self) -> frozenset[int]:
        """Layers that attend to everything visible."""
        ...

    @property
    def dense_until(self) -> int:
        """Contexts of up to so many tokens are attended to as a whole, in every layer; 0 where only `dense_layers`
        are."""
        ...

    @property
    def wants_weights(self) -> bool:
        """Whether `on_attended` is called."""
        ...

    @property
    def wants_queries(self) -> bool:
        """Whether the state has to see every query of the prompt (`on_queries`): then no prefix of it can be reused."""
        ...

    @property
    def rule(self) -> Rule | None:
        """How the sequences of a batch select together, their counts left on the device (`KeyLists`, which then takes
        the place of `on_keys` and `select` while decoding); None where each has to select for itself."""
        ...

    @property
    def evictable(self) -> bool:
        """Whether tokens of a sequence may be moved and overwritten, as eviction does."""
        ...

    @property
    def lineage(self) -> str:
        """Digest of name and options: KV decoded under one lineage is never reused under another. "exact" for full."""
        ...

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """What layer `layer`'s query is projected from, where `query_source` gives `[T, D]` for its attention input."""
        ...

    def new_state(self, keys: KeyReader) -> PolicyState:
        """The state of a sequence that has no tokens yet; `keys` reads its keys from the pool."""
        ...

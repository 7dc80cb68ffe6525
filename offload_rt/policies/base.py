"""The contract between the decode loop and a policy.

A `Policy` is immutable and shared by all sequences. A `PolicyState` belongs to one sequence, holds the selection data
of its tokens (scoring keys, accumulated attention, page bounds), and is forked with it. For each sequence, the loop
calls:

    prefill, layer l      state.on_queries(l, q, k, start) for each slice of queries, then state.on_keys(l, k, 0) and
                          state.on_values(l, v, 0)
    decode, layer l       state.on_keys(l, k, N - 1)            one key, before layer l attends
                          state.on_values(l, v, N - 1)          its value
                          state.select(l, q, visible)           once, when the query of `Policy.query_source` is known
                          state.repair(l, q, visible, sel)      with the layer's true query, before it attends
                          state.merge_approximate(l, q, visible, sel, out, lse)
                                                                merges an estimate of the attention to other tokens
                          state.on_attended(l, ...)             only if `wants_weights`

`select`, `repair`, `merge_approximate` and `on_attended` are never called for a layer in `dense_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from ..core import Selection, VisibleTokens
from .infinigen.scoring_keys import ListedKeys
from .rule import Rule

QuerySource = Literal["attention_input", "normed_input", "residual", "query"]
"""The source of the query that `select` gets for layer l. The first three are available one layer ahead and give a
speculated query. "query" is the true query of layer l, which leaves no time to prefetch. Layer 0 always gets its true
query, because it depends on the embedding alone."""

KeyReader = Callable[[int, range], torch.Tensor]
"""(layer, token range) -> keys `[Hkv, n, d]` of the sequence, read from the host pool. For policies that need the full
keys (oracle) and for measurements. These reads are not counted as transfers."""


class PolicyState:
    """The selection data of a policy for one sequence.

    Subclasses define `select` and `fork`. All other methods are no-ops by default.
    """

    @property
    def device_bytes(self) -> int:
        """Size in bytes of scoring keys and other selection data held on the compute device."""
        return 0

    @property
    def approximate_bytes(self) -> int:
        """The part of `device_bytes` that is approximate KV, which `merge_approximate` reads."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Size in bytes of scoring keys held in host memory instead of on the device."""
        return 0

    @property
    def scoring_keys(self) -> ListedKeys | None:
        """The scoring keys from which `KeyLists` of a batch are built, if the policy has a `rule`."""
        return None

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Observe the queries of a slice of the prompt.

        Args:
            layer: The layer index.
            q: True queries `[H, m, d]` of the tokens [start, start + m).
            k: All keys `[Hkv, n, d]` of the layer so far, n >= start + m. The policy applies the causal mask: query i
                may see keys up to start + i.
            start: The first token of `q`.
        """

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Observe keys `[Hkv, m, d]` (after RoPE) written to the slots [start, start + m) of the layer's KV cache.

        `start` is the end of the last call for this layer, or a slot whose token has been moved or evicted.
        """

    def on_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """Observe the values `[Hkv, m, d]` that belong to the keys of the last `on_keys` of the layer."""

    def on_moved(self, layer: int, source: int, target: int) -> None:
        """Move the data of the token in slot `source` to slot `target`, whose token has been evicted.

        `on_keys` for `source` follows. Only called if the policy is `evictable`.
        """

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the tokens of `visible.candidates` that the layer fetches, with the (speculated) query q `[H, d]`.

        All candidates must have been passed to `on_keys`.
        """
        raise NotImplementedError

    def repair(self, layer: int, q: torch.Tensor, visible: VisibleTokens, selection: Selection) -> Selection | None:
        """Return more candidates to fetch, chosen with the true query q `[H, d]` and disjoint from `selection`.

        None if there are none.
        """
        return None

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        visible: VisibleTokens,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with an estimate of the attention to the candidates that are not selected.

        Args:
            layer: The layer index.
            q: The true query `[H, d]`.
            visible: The tokens that the layer sees.
            selection: All selected tokens, repairs included.
            out: Exact attention `[H, d]`. It may be overwritten, as may `lse`.
            lse: Its log-sum-exp `[H]` (natural log).

        Returns:
            Merged out and lse. They are unchanged if the policy ignores tokens that are not selected.
        """
        return out, lse

    def on_attended(self, layer: int, visible: VisibleTokens, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        """Observe the attention weights that a sparse layer has just computed.

        Args:
            layer: The layer index.
            visible: The tokens that the layer sees.
            tokens: Attended token indices `[Hkv, n]`, resident and newest tokens included.
            weights: Softmax weights `[Hkv, n]`, summed over the G query heads of each KV head.
        """

    def fork(self, keys: KeyReader) -> PolicyState:
        """Return an independent copy for a forked sequence. `keys` reads the keys of the fork."""
        raise NotImplementedError

    def fork_prefix(self, tokens: int) -> PolicyState | None:
        """Return a state of the first `tokens` tokens alone, for a sequence that shares their KV blocks.

        None if computing the state again is as cheap, or if the state depends on more than the KV of these tokens.
        """
        return None

    def check_integrity(self) -> None:
        """Assert internal consistency."""


class Policy(Protocol):
    """A method of selecting tokens, with fixed options."""

    @property
    def name(self) -> str:
        """Name for `LLM(policy=...)`."""
        ...

    @property
    def query_source(self) -> QuerySource:
        """The source of the query that `select` gets."""
        ...

    @property
    def sinks(self) -> int:
        """Number of first tokens of the sequence that are always resident."""
        ...

    @property
    def recent(self) -> int:
        """Number of last tokens of the sequence that are always resident, the newest included; at least 1."""
        ...

    @property
    def dense_layers(self) -> frozenset[int]:
        """Layers that attend to all visible tokens."""
        ...

    @property
    def dense_until(self) -> int:
        """Longest context, in tokens, up to which every layer is dense; 0 if only `dense_layers` are."""
        ...

    @property
    def wants_weights(self) -> bool:
        """Whether `on_attended` is called."""
        ...

    @property
    def wants_queries(self) -> bool:
        """Whether the state needs every query of the prompt (`on_queries`), so that no cached prefix can be used."""
        ...

    @property
    def rule(self) -> Rule | None:
        """Rule for selecting for a whole batch with `KeyLists`, or None if each sequence selects separately.

        With a rule, `KeyLists` replace `on_keys` and `select` during decoding, and counts stay on the device.
        """
        ...

    @property
    def evictable(self) -> bool:
        """Whether eviction may move and overwrite tokens of a sequence."""
        ...

    @property
    def provenance_key(self) -> str:
        """KV provenance key: a digest of name and options.

        KV is reused only with the same key. "exact" for full attention.
        """
        ...

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Correct the predicted attention input `[T, D]` of the layer, from which its query is projected."""
        ...

    def new_state(self, keys: KeyReader) -> PolicyState:
        """Return the state of a new, empty sequence. `keys` reads its keys from the pool."""
        ...

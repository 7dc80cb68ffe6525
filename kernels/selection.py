"""Token selection in torch: skewed scores, thresholds and top-n. The reference implementation of the faster kernels.

If scores are equal, the token with the lower index is selected first. On a CPU, `best_scores.c` selects the same tokens
without sorting. Scores are float32 (float64 for float64 models) and finite or -inf.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import ClassVar

import torch

from . import native, team
from .pages import BLOCK

RANKED_TOKENS = 4096
"""Number of tokens that `best_scores.c` ranks at a time. The intermediate results fit in the first-level cache."""

PADDING = 64
"""Number of elements beyond the end of an array that `best_scores.c` may read or write."""

GAUSSIAN_STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
"""Step size of the best uniform quantiser for a unit Gaussian with 2^bits levels, for each number of bits.

The best quantiser is the one with the least mean squared error (Max, 1960, table II). The value for 8 bits was computed
in the same way.
"""


def skew(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Multiply queries or keys x `[Hkv, m, d]` by basis `[Hkv, d, r]` (InfiniGen eq. 2), in the dtype of the basis."""
    return torch.bmm(x.to(basis.dtype), basis)


def dot_scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply q `[Hkv, G, r]` by keys `[Hkv, r, n]` of any dtype. Return `[Hkv, G, n]` in the dtype of q."""
    if keys.dtype == q.dtype:
        return torch.bmm(q, keys)
    # Convert half-precision keys to the dtype of q, one head at a time. A half-precision product is slower on a CPU,
    # and its rounding error exceeds the differences between scores.
    out = q.new_empty(q.shape[0], q.shape[1], keys.shape[2])
    for head, rows in enumerate(keys):
        torch.mm(q[head], rows.to(q.dtype), out=out[head])
    return out


# ----------------------------------------------------------------------------------------------- int4 and int2 keys


def quantise(x: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise skewed keys x `[Hkv, m, d]` to uint8 codes `[Hkv, m, d]` from 0 to 2^bits - 1.

    The 2^bits levels of column j are `step[:, j]` apart and centred on `mean[:, j]`. Values beyond them are clipped.
    `mean` and `step` are `[Hkv, d]`.
    """
    codes = ((x - mean.unsqueeze(1)) / step.unsqueeze(1)).floor_() + (1 << (bits - 1))
    return codes.clamp_(0, (1 << bits) - 1).to(torch.uint8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the codes of f = 8 / bits adjacent tokens into one byte: `[Hkv, f * m, d]` becomes int8 `[Hkv, m, d]`.

    The code of token f * i + j begins at bit j * bits of byte i. 128 is subtracted from each byte, because the kernels
    convert signed bytes.
    """
    fields = 8 // bits
    tokens = codes.view(codes.shape[0], -1, fields, codes.shape[2])
    packed = tokens[:, :, 0].clone()
    for field in range(1, fields):
        packed |= tokens[:, :, field] << (bits * field)
    return (packed ^ 128).view(torch.int8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    raw = packed.view(torch.uint8) ^ 128
    fields = [(raw >> (bits * field)) & ((1 << bits) - 1) for field in range(8 // bits)]
    return torch.stack(fields, 2).flatten(1, 2)


def quantise_query(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise queries q `[Hkv, G, d]` to int8, so that their products with the codes of keys are exact integers.

    Returns:
        int8 codes `[Hkv, G, d]`, symmetric around 0, and one scale per query head, `[Hkv, G, 1]`. The rounding error is
        less than a fifth of the error of int4 keys.
    """
    scale = q.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny * 127) / 127
    return (q / scale).round_().to(torch.int8), scale


def quantised_scores(
    q: torch.Tensor, packed: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int
) -> torch.Tensor:
    """Score packed keys int8 `[Hkv, m, d]` with skewed and scaled queries q `[Hkv, G, d]`. Return `[Hkv, G, f * m]`.

    f = 8 / bits is the number of tokens per byte. `mean` and `step` are the arguments of `quantise`. Sums over columns
    are exact integers and therefore the same on every device.
    """
    weights, scale, offset = _affine(q, mean, step, bits)
    sums = _code_sums_cpu if packed.device.type == "cpu" else code_sums
    return sums(weights, packed, bits, q.dtype).mul_(scale).add_(offset)


def _affine(
    q: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int8 weights w, a scale s and an offset o, such that the score of a key with codes c is s w·c + o.

    w is `[Hkv, G, d]`, s and o are `[Hkv, G, 1]`.
    """
    weights, scale = quantise_query(q * step.unsqueeze(1))
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    return weights, scale, torch.bmm(q, mean.unsqueeze(2)) - scale * total * (((1 << bits) - 1) / 2)


def code_sums(weights: torch.Tensor, packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the dot products of int8 `weights` `[Hkv, G, d]` with the codes of packed keys int8 `[Hkv, m, d]`.

    The result `[Hkv, G, f * m]` has the dtype `dtype` and contains integers below 2^24. f = 8 / bits is the number of
    tokens per byte.
    """
    return torch.bmm(weights.to(dtype), unpack(packed, bits).to(dtype).transpose(1, 2))


def _code_sums_cpu(weights: torch.Tensor, packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Compute `code_sums` on a CPU, one head at a time, so that unpacked keys stay in the cache."""
    heads, rows, d = packed.shape
    fields = 8 // bits
    exact = torch.float32 if d * 127 * 255 < 1 << 24 else torch.float64
    out = torch.empty(heads, weights.shape[1], rows * fields, dtype=dtype)
    masked = torch.empty(rows if fields > 1 else 0, d, dtype=torch.int8)
    factors = weights.to(exact)
    total = factors.sum(-1, keepdim=True)
    # Products in floating point are exact here. The int8 product `_int_mm` is faster, but saturates without VNNI.
    for head in range(heads):
        # Each mask covers one more field than the previous one, so the difference between successive products is the
        # sum for one field.
        previous: torch.Tensor | int = 0
        for field in range(fields):
            if field < fields - 1:
                torch.bitwise_and(packed[head], (1 << (bits * (field + 1))) - 1, out=masked)
                current = factors[head] @ masked.to(exact).t()
            else:
                current = (factors[head] @ packed[head].to(exact).t()).add_(total[head], alpha=128)
            out[head, :, field::fields] = (current - previous) / (1 << (bits * field)) if field else current
            previous = current
    return out


# ------------------------------------------------------------------------------------------------- counts and top-n


def floor_fraction(fraction: float, number: int) -> int:
    """Return `fraction * number`, rounded down, with a tolerance for rounding errors: 0.3 * 10 gives 3."""
    return math.floor(fraction * number + 1e-9)


@lru_cache(maxsize=64)  # All layers of a step have the same candidates.
def selection_limit(candidates: int, max_fraction: float) -> int:
    """Return the maximum number of tokens to select: `max_fraction` of the candidates, but at least one."""
    return max(min(1, candidates), floor_fraction(max_fraction, candidates))


def token_count(passing: int, heads: int, limit: int) -> int:
    """Return how many tokens each KV head selects: the mean number of tokens that pass a query head (paper §4.3).

    `passing` is the number of pairs (token, query head) for which the score is near the maximum of the query head. The
    mean over all `heads` query heads is rounded up and limited to `limit`.
    """
    return min(-(-passing // heads), limit)


def group_scores(scores: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """Reduce scores `[Hkv, G, n]` to `[Hkv, n]`: the maximum of the log-softmax over the query heads of each group.

    `lse` `[Hkv, G, 1]` is the logarithm of the softmax denominator. If G = 1, `lse` is None, and the scores stay
    unchanged.
    """
    # log-softmax gives the same order as softmax, and does not underflow.
    return scores[:, 0] if lse is None else (scores - lse).amax(1)


def group_lse(scores: torch.Tensor) -> torch.Tensor | None:
    """Return the log-sum-exp `[Hkv, G, 1]` of scores `[Hkv, G, n]`, or None if G = 1."""
    if scores.shape[1] == 1:
        return None
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.nan_to_num(lse, 0.0, 0.0, 0.0)


def top_tokens(values: torch.Tensor, n: int) -> torch.Tensor:
    """Return the indices `[Hkv, n]` of the n largest entries of each row of `values`, ordered as in `select_tokens`."""
    if values.device.type != "cpu":
        return values.sort(dim=1, descending=True, stable=True).indices[:, :n]
    # Every value passes an infinite threshold, so the n largest are selected.
    return select_tokens(values.unsqueeze(1), math.inf, n)


def select_tokens(scores: torch.Tensor, alpha: float, limit: int) -> torch.Tensor:
    """Select tokens with InfiniGen's threshold (paper §4.3).

    Args:
        scores: Scores `[Hkv, G, N]` of N candidates.
        alpha: A token passes a query head if its score is within `alpha` of the largest score of that head. Only tokens
            that pass at least one head are selected.
        limit: Maximum number of tokens to select per KV head.

    Returns:
        Candidate indices int64 `[Hkv, n]`, without duplicates within a head. On a CPU, they are ascending. On other
        devices, they are sorted by descending score.
    """
    if scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.shape[2]:
        lse = group_lse(scores)
        chosen = select_in_c(scores, scores.amax(-1), None if lse is None else lse.squeeze(2), alpha, limit)
        if chosen is not None:
            return chosen
    chosen = select_tokens_reference(scores, alpha, limit)
    return chosen.sort(1).values if scores.device.type == "cpu" else chosen


class _Ranking(ctypes.Structure):
    _fields_: ClassVar = [
        ("scores", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "heads", "group", "n", "per_part")),
        ("peaks", ctypes.c_void_p),
        ("lses", ctypes.c_void_p),
        ("alpha", ctypes.c_float),
        ("most", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("values", "passing", "within", "best", "tokens", "chosen")),
    ]


def select_in_c(
    scores: torch.Tensor, peak: torch.Tensor, lse: torch.Tensor | None, alpha: float, limit: int
) -> torch.Tensor | None:
    """Compute `select_tokens` in C, with ascending indices. Return None if the C code is not available.

    Args:
        scores: Float32 scores `[Hkv, G, n]`.
        peak: Largest score of each query, `[Hkv, G]`.
        lse: Log-sum-exp of the scores of each query, `[Hkv, G]`, or None if G = 1.
    """
    library = _best_scores()
    if library is None:
        return None
    heads, group, n = scores.shape
    if scores.stride(2) != 1 or scores.stride(0) != group * scores.stride(1):
        scores = scores.contiguous()
    lse = torch.zeros(heads, group) if lse is None else lse.contiguous()
    peak, parts, size, words = peak.contiguous(), -(-n // RANKED_TOKENS), heads * (n + PADDING), -(-n // BLOCK)
    scratch = native.SCRATCH.empty((2 * (words + parts) + 3 * size,), torch.int32)
    chosen = torch.empty(heads * min(limit, n), dtype=torch.int64)
    within = scratch.data_ptr() + 8 * words
    values = within + 8 * parts
    call = _Ranking(
        scores.data_ptr(), scores.stride(1), heads, group, n, RANKED_TOKENS, peak.data_ptr(), lse.data_ptr(), alpha,
        0, values, scratch.data_ptr(), within, values + 4 * size, values + 8 * size, chosen.data_ptr(),
    )  # fmt: skip
    count = library.select_all(
        ctypes.byref(call), limit, team.runner(), team.threads(heads * group * n // native.MIN_SCORES_PER_THREAD)
    )
    return chosen[: heads * count].view(heads, count)


@native.level_cache
def _best_scores() -> ctypes.CDLL | None:
    library = native.compiled("best_scores", _Ranking)
    if library is not None:
        library.select_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        library.select_all.restype = ctypes.c_int64
    return library


def select_tokens_reference(
    scores: torch.Tensor, alpha: float, limit: int, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `select_tokens` in plain torch. `lse` is the result of `group_lse`, or None to compute it.

    All tokens that pass at least one query head of any KV head are considered. From these, each KV head selects the
    `token_count` tokens with the largest `group_scores`.
    """
    kv_heads, group, candidates = scores.shape
    if candidates == 0:
        return torch.empty(kv_heads, 0, dtype=torch.int64, device=scores.device)
    passing = scores >= scores.amax(-1, keepdim=True) - alpha
    n = token_count(int(passing.sum()), kv_heads * group, limit)
    tokens = passing.flatten(0, 1).any(0).nonzero().squeeze(1)
    values = group_scores(scores, group_lse(scores) if lse is None else lse)[:, tokens]
    return tokens[values.sort(dim=1, descending=True, stable=True).indices[:, :n]]


def extend_selection(scores: torch.Tensor, attended: torch.Tensor, max_missed: float, max_tokens: int) -> torch.Tensor:
    """Select tokens in addition to `attended` until the missed attention mass is at most `max_missed`.

    The missed attention mass is averaged over all query heads. Each KV head ranks tokens by their maximum softmax
    weight over the query heads of its group and takes the top ones. All KV heads select the same number of tokens, the
    smallest that suffices.

    Args:
        scores: Scores `[Hkv, G, n]` of all visible tokens, computed with the true query.
        attended: Whether each token is already attended to, bool `[Hkv, n]`. Each head must have at least `max_tokens`
            tokens that are not attended to yet.
        max_missed: Largest missed attention mass, in [0, 1].
        max_tokens: Maximum number of additional tokens per KV head.

    Returns:
        Token indices int64 `[Hkv, m]`, relative to the first visible token.
    """
    missed_weights = torch.softmax(scores, -1).masked_fill(attended.unsqueeze(1), 0)
    missed = float(missed_weights.sum(-1).mean())
    if max_tokens == 0 or missed <= max_missed:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    ranks = group_scores(scores, group_lse(scores)).masked_fill(attended, -math.inf)
    best = top_tokens(ranks, max_tokens)
    best = best.gather(1, ranks.gather(1, best).sort(dim=1, descending=True, stable=True).indices)
    gained = missed_weights.gather(2, best.unsqueeze(1).expand(-1, scores.shape[1], -1)).cumsum(-1).mean((0, 1))
    sufficient = (missed - gained <= max_missed).nonzero()
    return best[:, : int(sufficient[0]) + 1] if len(sufficient) else best

"""Token selection in torch: skewed scores, thresholds and top-n. The reference definition of all faster kernels.

If scores are equal, the lower token index wins. On the CPU, numpy makes the same selection on the same memory without a
full sort and returns the same sets. Scores are float32 (float64 for float64 models) and finite or -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

GAUSSIAN_STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
"""Step of the uniform quantiser with 2^bits levels and the least mean squared error for a unit Gaussian, by bits (Max,
1960, table II; 8 bits computed in the same way)."""

_SAMPLE_STRIDE = 16


def skew(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Multiply queries or keys x `[Hkv, m, d]` with basis `[Hkv, d, r]` (InfiniGen eq. 2): `[Hkv, m, r]` in the dtype
    of the basis."""
    return torch.bmm(x.to(basis.dtype), basis)


def dot_scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply q `[Hkv, G, r]` with keys `[Hkv, r, n]` of any dtype: scores `[Hkv, G, n]` in the dtype of q."""
    if keys.dtype == q.dtype:
        return torch.bmm(q, keys)
    # Widen half-precision keys one head at a time. A half-precision product is slower on a CPU, and its rounding error
    # exceeds the difference between tokens.
    out = q.new_empty(q.shape[0], q.shape[1], keys.shape[2])
    for head, rows in enumerate(keys):
        torch.mm(q[head], rows.to(q.dtype), out=out[head])
    return out


# ----------------------------------------------------------------------------------------------- int4 and int2 keys


def quantise(x: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise skewed keys x `[Hkv, m, d]` to uint8 codes `[Hkv, m, d]` from 0 to 2^bits - 1.

    The levels are uniform around `mean` `[Hkv, d]` with distance `step` `[Hkv, d]`. Values beyond the last level are
    clipped.
    """
    codes = ((x - mean.unsqueeze(1)) / step.unsqueeze(1)).floor_() + (1 << (bits - 1))
    return codes.clamp_(0, (1 << bits) - 1).to(torch.uint8)


def dequantise(codes: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the middle `[Hkv, m, d]` of the interval of each code, in the dtype of `mean`."""
    return (codes.to(mean.dtype) - ((1 << bits) - 1) / 2) * step.unsqueeze(1) + mean.unsqueeze(1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the codes `[Hkv, f * m, d]` of f = 8 / bits neighbouring tokens into one byte: int8 `[Hkv, m, d]`.

    Token f * i + j uses the bits from j * bits on of byte i. 128 is subtracted because `_int_mm` needs signed bytes.
    """
    fields = 8 // bits
    tokens = codes.view(codes.shape[0], -1, fields, codes.shape[2])
    packed = tokens[:, :, 0].clone()
    for field in range(1, fields):
        packed |= tokens[:, :, field] << (bits * field)
    return (packed ^ 128).view(torch.int8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the codes of `pack` to uint8 `[Hkv, f * m, d]`."""
    raw = packed.view(torch.uint8) ^ 128
    fields = [(raw >> (bits * field)) & ((1 << bits) - 1) for field in range(8 // bits)]
    return torch.stack(fields, 2).flatten(1, 2)


def quantise_query(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights `[Hkv, G, d]` to int8 codes `[Hkv, G, d]` and scale `[Hkv, G, 1]`.

    The codes are symmetric with one scale per query head. The rounding error is less than a fifth of that of int4 keys.
    """
    scale = weights.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny * 127) / 127
    return (weights / scale).round_().to(torch.int8), scale


def quantised_scores(
    q: torch.Tensor, packed: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int
) -> torch.Tensor:
    """Score skewed and scaled queries q `[Hkv, G, d]` with packed keys int8 `[Hkv, m, d]`: `[Hkv, G, f * m]`.

    mean and step are `[Hkv, d]`. q k~^T = (q * step) (code - middle)^T + q mean^T, with q * step rounded to int8. So
    the sum over columns is an exact integer, the same on every device.
    """
    weights, scale, offset = _affine(q, mean, step, bits)
    sums = _code_sums_cpu if packed.device.type == "cpu" else code_sums
    return sums(weights, packed, bits, q.dtype).mul_(scale).add_(offset)


def _affine(
    q: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the query as int8 weights `[Hkv, G, d]`, and scale and offset `[Hkv, G, 1]`.

    A score is scale * (weighted sum of codes) + offset.
    """
    weights, scale = quantise_query(q * step.unsqueeze(1))
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    return weights, scale, torch.bmm(q, mean.unsqueeze(2)) - scale * total * (((1 << bits) - 1) / 2)


def code_sums(weights: torch.Tensor, packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum weights int8 `[Hkv, G, d]` times the codes in packed `[Hkv, m, d]` over the columns.

    Returns integers below 2^24 as `dtype`, `[Hkv, G, f * m]`.
    """
    return torch.bmm(weights.to(dtype), unpack(packed, bits).to(dtype).transpose(1, 2))


def _code_sums_cpu(weights: torch.Tensor, packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Compute `code_sums` without widening the keys.

    Each field is one pass of byte operations and one int8 product. Heads are processed one by one so that they stay in
    the cache.
    """
    heads, rows, d = packed.shape
    fields = 8 // bits
    out = torch.empty(heads, weights.shape[1], rows * fields, dtype=dtype)
    masked = torch.empty(rows if fields > 1 else 0, d, dtype=torch.int8)
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    for head in range(heads):
        # Masks that grow by one field: the difference of two products is the sum of one field.
        below: torch.Tensor | int = 0
        for field in range(fields):
            if field < fields - 1:
                torch.bitwise_and(packed[head], (1 << (bits * (field + 1))) - 1, out=masked)
                upto = torch._int_mm(weights[head], masked.t())
            else:
                upto = torch._int_mm(weights[head], packed[head].t()).add_(128 * total[head])
            out[head, :, field::fields] = (upto - below) >> (bits * field) if field else upto
            below = upto
    return out


def _biased_sums_cpu(weights: torch.Tensor, packed: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `code_sums` for G = 1 as two int32 terms, `[Hkv, f * m]` and `[Hkv, 1]`, that the caller must add."""
    if bits < 8:
        sums = _code_sums_cpu(weights, packed, bits, torch.int32)[:, 0]
        return sums, torch.zeros(len(packed), 1, dtype=torch.int32)
    out = torch.empty(len(packed), 1, packed.shape[1], dtype=torch.int32)
    for query, rows, into in zip(weights, packed.mT, out, strict=True):
        torch._int_mm(query, rows, out=into)
    return out[:, 0], 128 * weights.sum(-1, dtype=torch.int32)


# ------------------------------------------------------------------------------------------------- counts and top-n


def floor_share(share: float, of: int) -> int:
    """Return floor(share * of), with a tolerance for binary fractions: 0.3 of 10 is 3."""
    return math.floor(share * of + 1e-9)


def token_count(passing: int, heads: int, candidates: int, max_fraction: float) -> int:
    """Return the number of tokens that each KV head of a layer selects (paper §4.3).

    It is the mean number of passing tokens over `heads` query heads (`passing` in total), rounded up. It is at most
    `max_fraction` of the candidates, but at least 1. It is 0 if none passes, because there are no candidates or their
    scores are NaN.
    """
    return min(-(-passing // heads), max(1, floor_share(max_fraction, candidates)))


def group_scores(scores: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """Return one score per KV head `[Hkv, n]` from scores `[Hkv, G, n]`: the maximum of log-softmax over the group.

    `lse` `[Hkv, G, 1]` is the logarithm of the softmax denominator. With `lse` None (G = 1), return the scores
    themselves.
    """
    # log-softmax orders tokens as softmax does, and does not underflow.
    return scores[:, 0] if lse is None else (scores - lse).amax(1)


def group_lse(scores: torch.Tensor) -> torch.Tensor | None:
    """Return the log-sum-exp `[Hkv, G, 1]` of scores `[Hkv, G, n]` for `group_scores`, or None if G = 1."""
    if scores.shape[1] == 1:
        return None
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.nan_to_num(lse, 0.0, 0.0, 0.0)


def top_tokens(values: torch.Tensor, n: int) -> torch.Tensor:
    """Return the indices int64 `[Hkv, n]` of the n largest values of each row of `[Hkv, m]`.

    If values are equal, the lower index wins. The order is rising on the CPU, and best first on other devices.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(_top_rows(values.numpy(), n))
    return top_tokens_reference(values, n)


def top_tokens_reference(values: torch.Tensor, n: int) -> torch.Tensor:
    """Compute `top_tokens` by a stable sort, best first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :n]


def top_scored(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Return the n tokens of each KV head with the largest scores `[Hkv, G, N]`: int64 `[Hkv, n]`.

    The score of a group is its largest softmax. The order is that of `top_tokens`.
    """
    return top_tokens(group_scores(scores, group_lse(scores)), n)


def select_tokens(scores: torch.Tensor, alpha: float, max_fraction: float) -> torch.Tensor:
    """Select tokens with InfiniGen's threshold (paper §4.3).

    Args:
        scores: Scores `[Hkv, G, N]` of N candidates.
        alpha: Largest distance of a passing score from the maximum of its head.
        max_fraction: Largest fraction of the candidates to select.

    Returns:
        Candidate indices int64 `[Hkv, n]`, without duplicates in a row.
    """
    if scores.device.type == "cpu":
        return _select_cpu(scores, alpha, max_fraction)
    return select_tokens_reference(scores, alpha, max_fraction)


def select_tokens_reference(scores: torch.Tensor, alpha: float, max_fraction: float) -> torch.Tensor:
    """Compute `select_tokens` in plain torch (reference definition).

    A token passes a query head if its score is within `alpha` of the maximum of that head. Each KV head takes the n
    best of the tokens that pass any head of the layer. There are always at least n such tokens.
    """
    kv_heads, group, candidates = scores.shape
    if candidates == 0:
        return torch.empty(kv_heads, 0, dtype=torch.int64, device=scores.device)
    passing = scores >= scores.amax(-1, keepdim=True) - alpha
    n = token_count(int(passing.sum()), kv_heads * group, candidates, max_fraction)
    tokens = passing.flatten(0, 1).any(0).nonzero().squeeze(1)
    values = group_scores(scores, group_lse(scores))[:, tokens]
    return tokens[top_tokens_reference(values, n)]


def _select_cpu(scores: torch.Tensor, alpha: float, max_fraction: float) -> torch.Tensor:
    """Compute `select_tokens` with numpy on shared memory.

    Two passes run over all scores (maximum, threshold). The rest handles only the tokens that passed.
    """
    kv_heads, group, candidates = scores.shape
    if candidates == 0:
        return torch.empty(kv_heads, 0, dtype=torch.int64)
    flat: Array = scores.reshape(-1, candidates).numpy()
    passing = flat >= flat.max(1, keepdims=True) - flat.dtype.type(alpha)
    counts = [int(np.count_nonzero(row)) for row in passing]
    n = token_count(sum(counts), len(flat), candidates, max_fraction)
    if group == 1:
        return torch.from_numpy(_best_passing(passing, counts, n, lambda head, tokens: flat[head].take(tokens)))
    tokens = np.flatnonzero(np.bitwise_or.reduce(passing, axis=0))
    passed = torch.from_numpy(flat.take(tokens, axis=1)).view(kv_heads, group, -1)
    values = group_scores(passed, group_lse(scores))
    return torch.from_numpy(tokens[_top_rows(values.numpy(), n)])


def _best_passing(
    passing: Array, counts: list[int], n: int, values: Callable[[int, Array], Array]
) -> npt.NDArray[np.int64]:
    """Return the n best tokens int64 `[Hkv, n]` of each head, for groups of one query head.

    The candidates are the tokens that pass any head (at least n). If at least n tokens pass a head, they are its best
    and only they are ranked.

    Args:
        passing: bool `[Hkv, N]`, which tokens pass each head.
        counts: Number of tokens that pass each head.
        n: Number of tokens to return.
        values: Returns values of `(head, tokens)` in the order of the scores of that head.
    """
    anywhere: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    if min(counts) < n:
        anywhere = np.flatnonzero(np.bitwise_or.reduce(passing, axis=0))
    out = np.empty((len(passing), n), dtype=np.int64)
    for head, count in enumerate(counts):
        tokens = anywhere if count < n else np.flatnonzero(passing[head])
        out[head] = tokens if len(tokens) == n else tokens.take(_top_of_row(values(head, tokens), n))
    return out


def select_quantised(
    q: torch.Tensor,
    packed: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    tokens: slice,
    alpha: float,
    max_fraction: float,
) -> torch.Tensor:
    """Select tokens as `select_tokens` does, from `quantised_scores` of `tokens`.

    On a CPU with groups of one, no scores are computed: the score of a head rises with its sum of codes, so the
    threshold is found among the integers.
    """
    if packed.device.type == "cpu" and q.shape[1] == 1 and tokens.stop > tokens.start:
        chosen = _select_sums(*_affine(q, mean, step, bits), packed, bits, tokens, alpha, max_fraction)
        if chosen is not None:
            return chosen
    return select_tokens(quantised_scores(q, packed, mean, step, bits)[:, :, tokens], alpha, max_fraction)


def _select_sums(
    weights: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    packed: torch.Tensor,
    bits: int,
    tokens: slice,
    alpha: float,
    max_fraction: float,
) -> torch.Tensor | None:
    """Compute `select_quantised` from the sums of codes `[Hkv, N]`, or return None if that is not possible.

    If different sums could round to the same score, they are rounded as `quantised_scores` does, so even ties give the
    same result. None means that the threshold is not among the integers near its expected position: everything passes,
    or many sums have the same score.
    """
    found, bias = _biased_sums_cpu(weights, packed, bits)
    sums, less = found[:, tokens].numpy(), bias.numpy()
    factor, shift = scale[:, 0].numpy(), offset[:, 0].numpy()
    with np.errstate(all="ignore"):
        most = (sums.max(1, keepdims=True) + less).astype(factor.dtype) * factor + shift
        least = most - factor.dtype.type(alpha)
        near = np.ceil((least - shift) / factor) + np.arange(-2, 3, dtype=factor.dtype)
        enough = near * factor + shift >= least
    if enough[:, 0].any() or not enough[:, -1].all():
        return None
    threshold = near[np.arange(len(near)), enough.argmax(1)].astype(np.int32)
    passing = sums >= threshold[:, None] - less
    counts = [int(np.count_nonzero(row)) for row in passing]
    n = token_count(sum(counts), len(sums), sums.shape[1], max_fraction)
    largest = np.abs(shift) + factor * factor.dtype.type(weights.shape[2] * 127 * 255)
    apart = factor > 4 * np.spacing(largest)

    def values(head: int, chosen: Array) -> Array:
        found: Array = sums[head].take(chosen)
        if not apart[head, 0]:
            found = (found + less[head]).astype(factor.dtype) * factor[head] + shift[head]
        return found

    return torch.from_numpy(_best_passing(passing, counts, n, values))


def _top_rows(values: Array, n: int) -> npt.NDArray[np.int64]:
    """Return the indices int64 `[R, n]`, rising, of the n largest values of each row of `[R, m]`."""
    rows, width = values.shape
    if n == width or n == 0:
        return np.tile(np.arange(n), (rows, 1))
    out = np.empty((rows, n), dtype=np.int64)
    for row, of_row in enumerate(values):
        out[row] = _top_of_row(of_row, n)
    return out


def _top_of_row(values: Array, n: int) -> npt.NDArray[np.int64]:
    """Return the indices int64 `[n]`, rising, of the n largest of values `[m]`, 0 < n < m.

    A sample gives a lower bound for the n-th largest value, and only the values above are sorted. If the bound is too
    high, all values are sorted.
    """
    tokens: npt.NDArray[np.int64] | None = None
    among = values
    sample = values[::_SAMPLE_STRIDE]
    rank = n / _SAMPLE_STRIDE
    safe = int(rank + 3 * math.sqrt(rank)) + 2
    if safe < len(sample) // 2:
        bound = np.sort(sample)[len(sample) - safe]
        above = np.flatnonzero(values >= bound)
        if len(above) >= n:
            tokens, among = above, values.take(above)
    # Sort instead of partition: numpy's vectorised sort takes 4 ns per value, its partition 5 to 20 ns.
    least = np.sort(among)[len(among) - n]
    kept = among >= least
    spare = int(np.count_nonzero(kept)) - n
    if spare < 0:  # NaN sorts behind all other values
        return np.arange(n)
    if spare:
        tied = np.flatnonzero(among == least)
        kept[tied[len(tied) - spare :]] = False
    places: npt.NDArray[np.int64] = np.flatnonzero(kept)
    return places if tokens is None else tokens.take(places)


def extend_selection(scores: torch.Tensor, attended: torch.Tensor, max_missed: float, most: int) -> torch.Tensor:
    """Select tokens besides `attended` until the missed attention mass is at most `max_missed`.

    The missed mass is the mean over query heads. Each KV head takes its m best tokens, by the largest softmax of the
    group. m is the smallest number that suffices, at most `most`.

    Args:
        scores: Scores `[Hkv, G, n]` of all visible tokens with the true query.
        attended: bool `[Hkv, n]`. Every row has at least `most` tokens left.
        max_missed: Largest missed attention mass.
        most: Largest number of tokens per KV head.

    Returns:
        Token indices int64 `[Hkv, m]`.
    """
    missing = torch.softmax(scores, -1).masked_fill(attended.unsqueeze(1), 0)
    missed = float(missing.sum(-1).mean())
    if most == 0 or missed <= max_missed:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    ranks = group_scores(scores, group_lse(scores)).masked_fill(attended, -math.inf)
    best = top_tokens(ranks, most)
    best = best.gather(1, ranks.gather(1, best).sort(dim=1, descending=True, stable=True).indices)
    caught = missing.gather(2, best.unsqueeze(1).expand(-1, scores.shape[1], -1)).cumsum(-1).mean((0, 1))
    enough = (missed - caught <= max_missed).nonzero()
    return best[:, : int(enough[0]) + 1] if len(enough) else best

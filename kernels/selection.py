"""Token selection in torch: skewed scores, thresholds and top-n. The definition every faster kernel is tested against.

Ties have one meaning everywhere: of equal scores the lower token index wins. On the CPU the same selection is made by
numpy on the same memory, without a full sort; it returns the same sets. Scores are float32 (float64 for float64
models), finite or -inf.
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
"""Step of the uniform quantiser with 2^bits levels that has the least mean squared error on a unit Gaussian (Max, 1960,
table II; for 8 bits computed in the same way), by bits per number."""

_SAMPLE_STRIDE = 16


def skew(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Queries or keys x `[Hkv, m, d]` in a skewed basis `[Hkv, d, r]` (InfiniGen eq. 2): `[Hkv, m, r]`, in the basis'
    dtype."""
    return torch.bmm(x.to(basis.dtype), basis)


def dot_scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q `[Hkv, G, r]` times keys `[Hkv, r, n]` of any dtype: scores `[Hkv, G, n]` in q's dtype.

    Half-precision keys are widened one head at a time: a product in half precision would round scores by more than
    tokens differ, and is slower on a CPU.
    """
    if keys.dtype == q.dtype:
        return torch.bmm(q, keys)
    out = q.new_empty(q.shape[0], q.shape[1], keys.shape[2])
    for head, rows in enumerate(keys):
        torch.mm(q[head], rows.to(q.dtype), out=out[head])
    return out


# ----------------------------------------------------------------------------------------------- int4 and int2 keys


def quantise(x: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[Hkv, m, d]` (uint8, 0 .. 2^bits - 1) of skewed keys x `[Hkv, m, d]`: uniform levels `step` `[Hkv, d]`
    apart around `mean` `[Hkv, d]`; what lies beyond the last level is clipped to it."""
    codes = ((x - mean.unsqueeze(1)) / step.unsqueeze(1)).floor_() + (1 << (bits - 1))
    return codes.clamp_(0, (1 << bits) - 1).to(torch.uint8)


def dequantise(codes: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """The middle `[Hkv, m, d]` of each code's interval, in `mean`'s dtype."""
    return (codes.to(mean.dtype) - ((1 << bits) - 1) / 2) * step.unsqueeze(1) + mean.unsqueeze(1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[Hkv, f * m, d]` of f = 8 / bits neighbouring tokens in one byte: int8 `[Hkv, m, d]`. Token f * i + j
    lies in bits j * bits and up of byte i; 128 is subtracted, so that the bytes are signed as `_int_mm` reads them."""
    fields = 8 // bits
    tokens = codes.view(codes.shape[0], -1, fields, codes.shape[2])
    packed = tokens[:, :, 0].clone()
    for field in range(1, fields):
        packed |= tokens[:, :, field] << (bits * field)
    return (packed ^ 128).view(torch.int8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes uint8 `[Hkv, f * m, d]` of `pack`."""
    raw = packed.view(torch.uint8) ^ 128
    fields = [(raw >> (bits * field)) & ((1 << bits) - 1) for field in range(8 // bits)]
    return torch.stack(fields, 2).flatten(1, 2)


def quantise_query(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes `[Hkv, G, d]` and scale `[Hkv, G, 1]` of weights `[Hkv, G, d]`, symmetric, one scale per query head.
    The rounding costs less than a fifth of what int4 keys cost."""
    scale = weights.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny * 127) / 127
    return (weights / scale).round_().to(torch.int8), scale


def quantised_scores(
    q: torch.Tensor, packed: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int
) -> torch.Tensor:
    """Scores `[Hkv, G, f * m]` of skewed, scaled queries q `[Hkv, G, d]` with packed keys int8 `[Hkv, m, d]`; mean and
    step `[Hkv, d]`.

    q k~^T = (q * step) (code - middle)^T + q mean^T, with q * step rounded to int8: the sum over columns is then an
    exact integer, the same on every device.
    """
    weights, scale, offset = _affine(q, mean, step, bits)
    sums = _code_sums_cpu if packed.device.type == "cpu" else code_sums
    return sums(weights, packed, bits, q.dtype).mul_(scale).add_(offset)


def _affine(
    q: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The query as int8 weights `[Hkv, G, d]`, and scale and offset `[Hkv, G, 1]` that make a score of a weighted sum
    of codes."""
    weights, scale = quantise_query(q * step.unsqueeze(1))
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    return weights, scale, torch.bmm(q, mean.unsqueeze(2)) - scale * total * (((1 << bits) - 1) / 2)


def code_sums(weights: torch.Tensor, packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum over columns of weights int8 `[Hkv, G, d]` times the codes in packed `[Hkv, m, d]`: whole numbers below
    2^24 as `dtype` `[Hkv, G, f * m]`."""
    return torch.bmm(weights.to(dtype), unpack(packed, bits).to(dtype).transpose(1, 2))


def _code_sums_cpu(weights: torch.Tensor, packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """`code_sums` without widening the keys: integer products of the bytes under growing masks, whose differences are
    the fields. One pass of byte operations and one int8 product per field, head by head in the cache."""
    heads, rows, d = packed.shape
    fields = 8 // bits
    out = torch.empty(heads, weights.shape[1], rows * fields, dtype=dtype)
    masked = torch.empty(rows if fields > 1 else 0, d, dtype=torch.int8)
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    for head in range(heads):
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
    """`code_sums` of query groups of one as int32 `[Hkv, f * m]` without the int32 `[Hkv, 1]` that is to be added."""
    if bits < 8:
        sums = _code_sums_cpu(weights, packed, bits, torch.int32)[:, 0]
        return sums, torch.zeros(len(packed), 1, dtype=torch.int32)
    out = torch.empty(len(packed), 1, packed.shape[1], dtype=torch.int32)
    for query, rows, into in zip(weights, packed.mT, out, strict=True):
        torch._int_mm(query, rows, out=into)
    return out[:, 0], 128 * weights.sum(-1, dtype=torch.int32)


# ------------------------------------------------------------------------------------------------- counts and top-n


def floor_share(share: float, of: int) -> int:
    """floor(share * of), where 0.3 of 10 is 3 although 0.3 is no binary fraction."""
    return math.floor(share * of + 1e-9)


def token_count(passing: int, heads: int, candidates: int, max_fraction: float) -> int:
    """Tokens of a layer: the mean over `heads` query heads of how many tokens pass (`passing` in all), rounded up, at
    most `max_fraction` of the candidates but at least 1 (paper §4.3). 0 where none passes: there are no candidates, or
    their scores are no numbers."""
    return min(-(-passing // heads), max(1, floor_share(max_fraction, candidates)))


def group_scores(scores: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """One score per KV head `[Hkv, n]` from scores `[Hkv, G, n]`: the maximum over the group of log-softmax, `lse`
    `[Hkv, G, 1]` being the log of its denominator. The logarithm orders tokens as softmax does and does not
    underflow. With G = 1 (`lse` None) the score itself."""
    return scores[:, 0] if lse is None else (scores - lse).amax(1)


def group_lse(scores: torch.Tensor) -> torch.Tensor | None:
    """`[Hkv, G, 1]` log-sum-exp of scores `[Hkv, G, n]` for `group_scores`; None with G = 1."""
    if scores.shape[1] == 1:
        return None
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.nan_to_num(lse, 0.0, 0.0, 0.0)


def top_tokens(values: torch.Tensor, n: int) -> torch.Tensor:
    """int64 `[Hkv, n]`: indices of the n largest of each row of values `[Hkv, m]`, best first on every device but the
    CPU (there in rising order); of equal values the lower index."""
    if values.device.type == "cpu":
        return torch.from_numpy(_top_rows(values.numpy(), n))
    return top_tokens_reference(values, n)


def top_tokens_reference(values: torch.Tensor, n: int) -> torch.Tensor:
    """`top_tokens` by a stable sort, best first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :n]


def top_scored(scores: torch.Tensor, n: int) -> torch.Tensor:
    """The n tokens of each KV head with the largest scores `[Hkv, G, N]` after softmax, the best of the group's: int64
    `[Hkv, n]`, as `top_tokens` orders them."""
    return top_tokens(group_scores(scores, group_lse(scores)), n)


def select_tokens(scores: torch.Tensor, alpha: float, max_fraction: float) -> torch.Tensor:
    """InfiniGen's selection (paper §4.3) from scores `[Hkv, G, N]` of N candidates: int64
    `[Hkv, n]`, candidate indices, no duplicates in a row."""
    if scores.device.type == "cpu":
        return _select_cpu(scores, alpha, max_fraction)
    return select_tokens_reference(scores, alpha, max_fraction)


def select_tokens_reference(scores: torch.Tensor, alpha: float, max_fraction: float) -> torch.Tensor:
    """`select_tokens` in plain torch: the definition.

    A token passes a query head if its score is within `alpha` of that head's maximum. Each KV head takes its n best
    among the tokens that pass any head of the layer; there are always at least n of them.
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
    """`select_tokens` on shared memory: two passes over the scores (maximum, threshold), everything after them only
    over the tokens that passed."""
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
    """int64 `[Hkv, n]`: the best of each query head that is its own KV head, among the tokens that pass some head (bool
    `[Hkv, N]` `passing`, at least n), `counts` of which pass each. `values(head, tokens)` orders tokens as a head's
    scores do. Where n tokens pass a head, they are the best; where more do, only these are ranked; what some head
    passes is looked up only where fewer do."""
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
    """`select_tokens` of `quantised_scores` (see there) at `tokens`; on a CPU, for query groups of one, without making
    scores: a head's score rises with its sum of codes, so the threshold is found among the integers."""
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
    """`select_quantised` from the sums of codes `[Hkv, N]`; where sums that differ might have one score, what decides
    is rounded as `quantised_scores` rounds it, so the result is the same to the last tie. None where the threshold is
    not among the integers next to where it should be: it lets everything pass, or whole runs of sums have one score."""
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
    """int64 `[R, n]`: indices, rising, of the n largest of each row of values `[R, m]`."""
    rows, width = values.shape
    if n == width or n == 0:
        return np.tile(np.arange(n), (rows, 1))
    out = np.empty((rows, n), dtype=np.int64)
    for row, of_row in enumerate(values):
        out[row] = _top_of_row(of_row, n)
    return out


def _top_of_row(values: Array, n: int) -> npt.NDArray[np.int64]:
    """int64 `[n]`: indices, rising, of the n largest of values `[m]`, 0 < n < m.

    A sample says below which value the n-th largest can hardly lie, and only what is above is sorted (numpy's sort,
    which is vectorised, takes 4 ns a value of a few thousand, its partition 5 to 20, a comparison 0.2). Where the
    sample was wrong, everything is.
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
    least = np.sort(among)[len(among) - n]
    kept = among >= least
    spare = int(np.count_nonzero(kept)) - n
    if spare < 0:  # values that are no numbers, which sort behind all others
        return np.arange(n)
    if spare:
        tied = np.flatnonzero(among == least)
        kept[tied[len(tied) - spare :]] = False
    places: npt.NDArray[np.int64] = np.flatnonzero(kept)
    return places if tokens is None else tokens.take(places)


def extend_selection(scores: torch.Tensor, attended: torch.Tensor, max_missed: float, most: int) -> torch.Tensor:
    """Tokens to attend to besides `attended` until the softmax mass outside is at most `max_missed`, mean over query
    heads: int64 `[Hkv, m]`, each KV head's m best (by the group's largest softmax), with the least m that does it,
    never above `most`.

    scores `[Hkv, G, n]` of all visible tokens with the true query; attended bool `[Hkv, n]`; every row of it has at
    least `most` tokens left.
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

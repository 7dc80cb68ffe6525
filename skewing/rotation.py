"""The bases in which queries and keys are scored, from second moments alone (paper §4.2, equations 2-3).
Pure functions in float64, batched over any leading axes (layers and KV heads).

Write M_q for the second moment of the queries and C_k for the covariance of the keys. Dropping the columns J of the
skewed queries and keys changes the scores of a query by sum_J q~_j (k~_j - m_j), up to a constant that softmax
ignores; over independent queries and keys its mean square is sum_{i, j in J} M_q~[i, j] C_k~[i, j]. Everything here
minimises that one quantity:

* `svd_basis`: A holds the eigenvectors of M_q, so M_q~ is diagonal, the cross terms vanish, and the best columns to
  keep are those with the largest M_q~[j, j] C_k~[j, j] = (E q~_j^2)(Var k~_j), exactly. That is the stored order. The
  paper orders by sum |q~_j| + |k~_j| of the prompt, which does not see that a large key column under a small query
  column changes no score. Test model, 19 of 64 columns, held-out book, mean over heads: this order keeps 0.793 of the
  scores' energy, the paper's 0.792, falling eigenvalues alone 0.790, no skewing 0.718, balanced 0.816.
* `balanced_basis`: with M_q = L_q L_q^T and C_k = L_k L_k^T the mean square of the scores of q X k^T is
  |L_q^T X L_k|_F^2; truncating the SVD of L_q^T L_k is its best rank-r approximation (Eckart-Young).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..config import SkewMethod

RIDGE: Final = 1e-6
"""Share of the mean eigenvalue that is added to the diagonal before a Cholesky factor is taken."""


@dataclass(frozen=True, eq=False)
class Moments:
    """What a text says about queries and keys. All float64, means over tokens (and over the G query heads of a group).

    query: E[q q^T] `[..., d, d]`, not centred: the queries multiply, nothing ignores their mean.
    key: E[k k^T] `[..., d, d]`.
    key_mean: E[k] `[..., d]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    key_mean: torch.Tensor

    def __post_init__(self) -> None:
        assert self.query.shape == self.key.shape and self.key_mean.shape == self.key.shape[:-1]
        assert {self.query.dtype, self.key.dtype, self.key_mean.dtype} == {torch.float64}

    @property
    def key_covariance(self) -> torch.Tensor:
        """C_k `[..., d, d]`: softmax ignores the score of the mean key, the same for every token."""
        return self.key - self.key_mean[..., :, None] * self.key_mean[..., None, :]

    def skewed(self, basis: SkewBasis) -> Moments:
        """The moments of q @ basis.query and k @ basis.key."""
        return Moments(
            basis.query.mT @ self.query @ basis.query,
            basis.key.mT @ self.key @ basis.key,
            (self.key_mean[..., None, :] @ basis.key).squeeze(-2),
        )


@dataclass(frozen=True, eq=False)
class SkewBasis:
    """query, key: B_q, B_k float64 `[..., d, d]` with B_q B_k^T = I, columns by falling importance."""

    query: torch.Tensor
    key: torch.Tensor


def plain_basis(moments: Moments) -> SkewBasis:
    """No skewing: the model's own columns, reordered by importance. The rival of the other two."""
    identity = torch.eye(moments.query.shape[-1], dtype=torch.float64).expand_as(moments.query)
    return _ordered(moments, SkewBasis(identity, identity))


def svd_basis(moments: Moments) -> SkewBasis:
    """The paper's A, `query == key`: right singular vectors of Q = eigenvectors of Q^T Q (equation 3), signs chosen so
    that each column's largest entry is positive, columns by falling (E q~^2)(Var k~)."""
    vectors = torch.linalg.eigh(_symmetric(moments.query)).eigenvectors.flip(-1)
    vectors = vectors * _signs(vectors)
    return _ordered(moments, SkewBasis(vectors, vectors))


def balanced_basis(moments: Moments, ridge: float = RIDGE) -> SkewBasis:
    """U S V^T = SVD(L_q^T L_k), B_q = L_k V S^-1/2, B_k = L_q U S^-1/2: keeping r columns gives the best rank-r scores
    in the least-squares sense, and both skewed moments are diag(S). `ridge` times the mean eigenvalue is added to both
    moments, so that rank-deficient ones (fewer tokens than d, dead columns, keys that are all alike) keep
    B_q B_k^T = I."""
    left = _cholesky(moments.query, moments.query, ridge)
    right = _cholesky(moments.key_covariance, moments.key, ridge)
    u, s, vh = torch.linalg.svd(left.mT @ right)
    root = s.rsqrt()[..., None, :]
    query, key = right @ vh.mT * root, left @ u * root
    signs = _signs(query)
    return SkewBasis(query * signs, key * signs)


BASES: Final[Mapping[SkewMethod, Callable[[Moments], SkewBasis]]] = {"svd": svd_basis, "balanced": balanced_basis}
"""Method name -> basis from moments."""


def kept_energy(moments: Moments, basis: SkewBasis, columns: int) -> torch.Tensor:
    """Share `[...]` of the scores' mean square (of centred keys) that the first `columns` columns of `basis` explain:
    1 - error / total. Negative where dropping columns that cancel each other is worse than scoring everything 0.
    1 where there is no energy at all."""
    skewed = moments.skewed(basis)
    products = skewed.query * skewed.key_covariance
    error = products[..., columns:, columns:].sum((-2, -1))
    total = products.sum((-2, -1))
    return torch.where(total > 0, 1 - error / total, torch.ones_like(total))


def importance(moments: Moments) -> torch.Tensor:
    """(E q_j^2)(Var k_j) `[..., d]`: mean square of column j's share of the scores."""
    query = moments.query.diagonal(dim1=-2, dim2=-1)
    return query.clamp_min(0) * moments.key_covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)


def _ordered(moments: Moments, basis: SkewBasis) -> SkewBasis:
    order = importance(moments.skewed(basis)).argsort(dim=-1, descending=True, stable=True)[..., None, :]
    order = order.expand_as(basis.query)
    return SkewBasis(basis.query.gather(-1, order), basis.key.gather(-1, order))


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix + matrix.mT) / 2


def _cholesky(moment: torch.Tensor, uncentred: torch.Tensor, ridge: float) -> torch.Tensor:
    """Lower factor `[..., d, d]` of the moment plus the ridge; the unit matrix for a moment of zero. What centring
    leaves of keys that are all alike is rounding, hence the floor by the uncentred moment."""
    scale, floor = (m.diagonal(dim1=-2, dim2=-1).mean(-1) for m in (moment, uncentred))
    scale = torch.maximum(scale, 1e-6 * floor)
    scale = torch.where(scale > 0, ridge * scale, torch.ones_like(scale))
    identity = torch.eye(moment.shape[-1], dtype=moment.dtype)
    lower: torch.Tensor = torch.linalg.cholesky(_symmetric(moment) + scale[..., None, None] * identity)
    return lower


def _signs(vectors: torch.Tensor) -> torch.Tensor:
    """+1 or -1 per column `[..., 1, d]`, such that its entry of largest size becomes positive."""
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    signs: torch.Tensor = torch.ones_like(largest).copysign(largest)
    return signs

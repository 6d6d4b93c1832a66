"""GPTQ: INT4 weights of one linear layer, chosen for the inputs that the layer really gets.

In: weights (out, in), the Hessian H = Σ x xᵀ of the layer's inputs (in, in), a group size, a damping.  Out: an
`Int4Linear`, and how much of the layer's output was lost.  With D = W − Q the loss over those inputs is

    Σ ‖D x‖² = tr(D H Dᵀ) = ‖D U‖²        where H = U Uᵀ, U upper triangular (a Cholesky factor, rows reversed)

Column j of D U is U[j,j]·D[:,j] + Σ_{i<j} D[:,i]·U[i,j].  So columns are rounded from first to last, and each is
rounded at a target that takes up what the earlier ones left over:

    target_j = W[:,j] + Σ_{i<j} D[:,i]·U[i,j] / U[j,j]        loss of column j = U[j,j]²·‖target_j − Q[:,j]‖²

This is GPTQ (Frantar et al., arXiv 2210.17323) in the form that Chen et al. (arXiv 2507.18553) show to be the same
thing, Babai's nearest plane: no inverse of H is taken, and there is one triangular factor instead of three.

Order ("act-order"): inputs of the largest H[i,i] first, as what is rounded early is made up for by all that follows.
Groups are static: scales belong to neighbouring inputs and are chosen before anything is reordered, so the file needs
no g_idx.  Everything is float64 and on the CPU.  Refuses to know models, layers' names and files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.tensors import Int4Linear, pack_nibbles, quantize_rtn

Array = NDArray[np.float64]

BLOCK = 128  # columns between two products with everything rounded before
MAX_RETRIES = 3  # of the factorisation, each with ten times the damping
LEVELS = (-8, 7)  # the file's nibbles 0…15


class NotPositiveDefinite(ArithmeticError):
    """The Hessian could not be factorised, even with the largest damping tried."""


@dataclass(frozen=True, slots=True)
class Curvature:
    """A Hessian made ready: what all layers with the same inputs share."""

    hessian: Array  # (in, in), without damping
    order: NDArray[np.intp]  # (in,), the inputs in the order in which they are rounded
    factor: Array  # (in, in), U of the damped Hessian in that order
    damping: float  # used; a share of the Hessian's mean diagonal
    num_retries: int
    num_dead: int  # inputs that were always zero

    @property
    def importance(self) -> Array:
        """(in,): what a rounding error of each input costs once later inputs have made up for it: U[j,j]²."""
        result = np.empty(len(self.order))
        result[self.order] = np.diag(self.factor) ** 2
        return result


@dataclass(frozen=True, slots=True)
class Rounded:
    """One layer.  Errors are tr(D H Dᵀ) / tr(W H Wᵀ), 0 for a layer without output."""

    linear: Int4Linear
    error: float
    rtn_error: float  # of `quantize_rtn` on the same weights and inputs


def prepare(hessian: NDArray[Any], damping: float) -> Curvature:
    """Order and factorise a symmetric (in, in) Hessian of finite numbers.

    `damping` of the mean diagonal is added to the diagonal.  Where that is not positive definite, ten times as much is
    tried, MAX_RETRIES times; then NotPositiveDefinite.  An input that was always zero has no row beside the damping: it
    is rounded to nearest and moves no other.
    """
    hessian = np.asarray(hessian, np.float64)
    diagonal = np.diag(hessian)
    if not np.isfinite(hessian).all():
        raise ValueError("prepare: the Hessian holds NaN or infinity, expected finite numbers")
    order = np.argsort(-diagonal, kind="stable")
    ordered = hessian[np.ix_(order, order)]
    mean = float(diagonal.mean()) or 1.0  # no input at all: every column on its own
    for retry in range(MAX_RETRIES + 1):
        used = damping * 10.0**retry
        try:
            factor = _upper_factor(ordered, used * mean)
        except np.linalg.LinAlgError:
            continue
        return Curvature(hessian, order, factor, used, retry, int((diagonal == 0).sum()))
    raise NotPositiveDefinite(f"the Hessian is not positive definite with a damping of {used:g} of its mean diagonal")


def _upper_factor(matrix: Array, added: float) -> Array:
    """U upper triangular with U Uᵀ = matrix + added·1: the Cholesky factor of the matrix read from its end."""
    damped = matrix + added * np.eye(len(matrix))
    return np.ascontiguousarray(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1])


def quantize_gptq(weight: NDArray[Any], curvature: Curvature, group_size: int) -> Rounded:
    """weight: (out, in), any float; `group_size` divides in."""
    exact = np.asarray(weight, np.float64)
    scales = choose_scales(exact, curvature.importance, group_size)
    steps = np.repeat(scales.astype(np.float64), group_size, axis=1)  # (out, in)
    order = curvature.order
    levels = np.empty(exact.shape, np.int8)
    levels[:, order] = _round_in_order(exact.T[order], steps.T[order], curvature.factor).T
    linear = Int4Linear(pack_nibbles((levels - LEVELS[0]).astype(np.uint8)), scales)
    plain = quantize_rtn(weight, group_size)
    loss, rtn_loss = (_loss(exact - other.dequantize(), curvature.hessian) for other in (linear, plain))
    whole = _loss(exact, curvature.hessian) or 1.0
    return Rounded(linear, loss / whole, rtn_loss / whole)


def _loss(difference: Array, hessian: Array) -> float:
    """tr(D H Dᵀ)."""
    return float(np.einsum("oi,oi->", difference @ hessian, difference))


def _round_in_order(weight: Array, steps: Array, factor: Array) -> NDArray[np.int8]:
    """Levels of columns in the order given.  All arrays have a column of the layer as a row: (in, out).

    A row's targets need D of all rows before it: of earlier blocks by one product a block, of its own row by row.
    """
    num_in = len(weight)
    levels = np.empty(weight.shape, np.int8)
    left = np.zeros(weight.shape)  # D, as far as it is known
    divisors = np.where(steps == 0, 1, steps)  # of a group of zeros
    for start in range(0, num_in, BLOCK):
        stop = min(start + BLOCK, num_in)
        drift = factor[:start, start:stop].T @ left[:start]  # (block, out)
        for j in range(start, stop):
            moved = (drift[j - start] + factor[start:j, j] @ left[start:j]) / factor[j, j]
            level = np.clip(np.rint((weight[j] + moved) / divisors[j]), *LEVELS)
            levels[j] = level
            left[j] = weight[j] - level * steps[j]
    return levels


# Candidates for a group's scale, as the level that its largest magnitude falls on.  Below 7 weights are clipped, above
# steps are wider than needed.  With the sign turned the largest magnitude may take level −8, which has no partner.
_TOPS = np.concatenate([[7.0], np.arange(5.0, 9.01, 0.25)])


def choose_scales(weight: Array, importance: Array, group_size: int) -> NDArray[np.float16]:
    """(out, in/group): of the candidates, each rounded to fp16, the one whose rounding to nearest costs least.

    The cost of a weight's error is its square times its input's `importance` (in,).
    """
    grouped = weight.reshape(len(weight), -1, group_size)
    cost = importance.reshape(-1, group_size)
    index = np.abs(grouped).argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(grouped, index, axis=2)[:, :, 0]  # signed
    best = np.full(largest.shape, np.inf)
    scales = np.zeros(largest.shape, np.float16)
    for top in [*_TOPS, *-_TOPS]:
        candidate = (largest / top).astype(np.float16)
        step = candidate.astype(np.float64)[:, :, None]
        nearest = np.clip(np.rint(grouped / np.where(step == 0, 1, step)), *LEVELS) * step
        found = np.einsum("ogi,gi->og", (grouped - nearest) ** 2, cost)
        better = found < best
        best[better], scales[better] = found[better], candidate[better]
    return scales

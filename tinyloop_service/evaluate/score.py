"""The arithmetic of a quality report, on arrays alone.

    bits per byte   −Σ log₂ p(target) / UTF-8 bytes of the targets
    agreement       share of tokens whose likeliest next token is the reference model's (lowest id on ties)
    distance        ‖x − r‖ / ‖r‖, mean over tokens: how far the state x is from the reference model's r, before the
                    first loop and after each: how an error grows from loop to loop

In: a `Forward`, which gives a window's states after every loop and logits at every depth from one pass.  Out: `Sums`
of a window, and over all windows `Quality`, beside that of a reference which has seen the same windows.  Refuses to
know about models, files and texts.  Shapes: T tokens of a window, d depths, L the deepest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.evaluate.windows import Ids, Span, Window

Array = NDArray[Any]


class Run(Protocol):
    """One window, computed to some number of loops."""

    @property
    def states(self) -> Array:
        """(1 + L, T, d_model): what enters the first loop, then the state after each."""

    def logits(self, depth: int) -> Array:
        """(T, vocab_size) after each token, had the model `depth` loops; the caller may overwrite it."""


class Forward(Protocol):
    """A model that can be scored."""

    def run(self, tokens: Ids, loops: int) -> Run:
        """tokens: (T,), a sequence from its first position on."""


@dataclass(frozen=True, slots=True)
class WindowScore:
    """What one model makes of one window.  Only of use beside the reference's."""

    nats: Array  # (d, T) float64: −ln p(target)
    likeliest: Array  # (d, T) ids
    states: Array  # (1 + L, T, d_model)


def score_window(forward: Forward, window: Window, depths: Sequence[int]) -> WindowScore:
    run = forward.run(window.inputs, max(depths))
    nats, likeliest = zip(*(_predict(run.logits(depth), window.targets) for depth in depths), strict=True)
    return WindowScore(np.stack(nats), np.stack(likeliest), run.states)


def _predict(logits: Array, targets: Ids) -> tuple[Array, Array]:
    """(T,) nats of the targets and (T,) likeliest ids.  Overwrites `logits`."""
    rows = np.arange(len(targets))
    likeliest = logits.argmax(axis=1)
    logits -= logits[rows, likeliest][:, None]
    of_target = logits[rows, targets].astype(np.float64)
    np.exp(logits, out=logits)
    return np.log(logits.sum(axis=1, dtype=np.float64)) - of_target, likeliest


@dataclass(frozen=True, slots=True)
class Sums:
    """One row of the report in one window, over the targets of one span."""

    num_tokens: int
    num_bytes: int
    nats: Array  # (d,)
    agreed: Array  # (d,) tokens
    distance: Array | None  # (1 + L,); None: the reference's states have another width


def sum_up(score: WindowScore, reference: WindowScore, window: Window, span: Span) -> Sums:
    chosen = window.span(span)
    states, expected = score.states[:, chosen], reference.states[:, chosen]
    distance = None
    if states.shape == expected.shape:
        # A state of all zeros has no direction to err from; its own length is what an error is measured by.
        length = np.maximum(np.linalg.norm(expected, axis=2), np.finfo(np.float32).tiny)
        distance = (np.linalg.norm(states - expected, axis=2) / length).sum(axis=1, dtype=np.float64)
    return Sums(
        num_tokens=len(window.targets[chosen]),
        num_bytes=int(window.token_bytes[chosen].sum()),
        nats=score.nats[:, chosen].sum(axis=1),
        agreed=(score.likeliest == reference.likeliest)[:, chosen].sum(axis=1),
        distance=distance,
    )


@dataclass(frozen=True, slots=True)
class Quality:
    """One row over all windows; per depth, in the order they were asked for."""

    num_tokens: int
    num_bytes: int
    bits_per_byte: tuple[float, ...]
    added_bits: tuple[float, ...]  # bits per byte beyond the reference's
    added_bits_error: tuple[float, ...] | None  # standard error of those; None with a single window
    agreement: tuple[float, ...]  # 0 … 1
    distance: tuple[float, ...] | None  # before the first loop, then after loops 1 … L


def measure_quality(row: Sequence[Sums], reference: Sequence[Sums]) -> Quality:
    """Both: one `Sums` a window, over the same span."""
    num_tokens, num_bytes = (sum(getattr(sums, name) for sums in row) for name in ("num_tokens", "num_bytes"))
    nats = np.stack([sums.nats for sums in row])  # (windows, d)
    added = (nats - np.stack([sums.nats for sums in reference])) / math.log(2)
    distances = [sums.distance for sums in row if sums.distance is not None]
    agreed = np.sum([sums.agreed for sums in row], axis=0)
    return Quality(
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        bits_per_byte=_floats(nats.sum(axis=0) / math.log(2) / num_bytes),
        added_bits=_floats(added.sum(axis=0) / num_bytes),
        added_bits_error=_ratio_error(added, np.array([sums.num_bytes for sums in row])),
        agreement=_floats(agreed / num_tokens),
        distance=_floats(np.sum(distances, axis=0) / num_tokens) if distances else None,
    )


def _ratio_error(bits: Array, num_bytes: Array) -> tuple[float, ...] | None:
    """Standard error of Σ bits / Σ bytes, (d,), where windows were drawn at random from many such texts.

    The estimator of a ratio over clusters of unequal size: √(n/(n−1) · Σ (bits − ratio·bytes)²) / Σ bytes.
    """
    count = len(num_bytes)
    if count < 2:
        return None
    ratio = bits.sum(axis=0) / num_bytes.sum()
    residual = bits - ratio * num_bytes[:, None]
    return _floats(np.sqrt(count / (count - 1) * (residual**2).sum(axis=0)) / num_bytes.sum())


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(map(float, values))

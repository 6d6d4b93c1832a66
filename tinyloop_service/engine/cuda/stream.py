"""The residual stream of a decode step, and what the next linear is given of it.

    begin → x of the rows' tokens;  fold → the input of a linear;  joining → where a linear leaves what is to be added

For a few rows a linear folds its input itself, and fold_norm is not launched; the bits are the same.

In: rows, the steps of a schedule.  Out: inputs of linears.  Refuses to know which linear is which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.cuda.schedule import Step
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.linear import num_partials, takes_columns
from tinyloop_service.kernels.norm import FOLD_ROWS, Fold, fold_norm
from tinyloop_service.kernels.pack import PackedLinear

_MOST_PARTIALS = 8


@dataclass(frozen=True, slots=True)
class Given:
    """Of the next linear: what it is, how it lies in memory, whether it may start while the kernel before it ends."""

    y: Array | Fold
    columns: bool
    dependent: bool


class DecodeStream:
    """Buffers of at most `max_rows` rows; one step at a time is in the making."""

    def __init__(self, device: Device, spec: ModelSpec, max_rows: int) -> None:
        self._device, self._spec = device, spec
        self._buffers = [device.zeros((max_rows, spec.d_model), np.float32) for _ in "xt"]
        self._injections = device.zeros((max_rows, spec.d_model), np.float32) if spec.inject == "add" else None
        self._sums = device.zeros((_MOST_PARTIALS * max_rows * spec.d_model,), np.float32)
        self.y = device.zeros((max_rows, spec.d_model), np.float16)
        self._rows, self._is_first = 0, True
        self._partials: Array | None = None  # that are to join x

    def begin(self, rows: int) -> Array:
        """x fp32 [rows, d_model], to be filled with a step's tokens."""
        self._rows, self._is_first, self._partials = rows, True, None
        return self.x

    @property
    def x(self) -> Array:
        x: Array = self._buffers[0][: self._rows]
        return x

    def fold(self, step: Step, packed: PackedLinear, *, alone: bool = False) -> Given:
        """The input of the next linear, which is `packed`.  alone: in memory, and x moved on, whoever else reads them.

        The first kernel after embed is not dependent: later ones read positions before they wait for the one before.
        """
        rows, dependent, self._is_first = self._rows, not self._is_first, False
        injected = None if step.inject == "none" or self._injections is None else self._injections[:rows]
        if rows > FOLD_ROWS or alone:
            y, columns = self.y[:rows], takes_columns(self._device, packed, rows)
            fold_norm(
                self._device, self.x, self._partials, y, eps=self._spec.norm_eps, gain=step.gain, post_gain=step.post,
                loop_gain=step.loop, inject=step.inject, injected=injected, columns=columns, dependent=dependent,
            )  # fmt: skip
            self._partials = None
            return Given(y, columns, dependent=True)
        fold = Fold(
            x=self.x, x_out=self._buffers[1][:rows], partials=self._partials, eps=self._spec.norm_eps, gain=step.gain,
            post_gain=step.post, loop_gain=step.loop, inject=step.inject, injected=injected,
        )  # fmt: skip
        self._buffers.reverse()
        self._partials = None
        return Given(fold, columns=False, dependent=dependent)

    def joining(self, packed: PackedLinear) -> Array:
        """Where `packed` leaves partial sums that join x in the next fold."""
        count, width = num_partials(self._device, packed, self._rows), self._spec.d_model
        self._partials = self._sums[: count * self._rows * width].reshape(count, self._rows, width)
        return self._partials

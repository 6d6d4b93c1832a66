"""`cache_modes.encode` and `decode` as nodes of a graph, with the same bits.

In: a graph under construction and the names of its tensors, K and V as [..., heads, head_dim] or h as [rows, d_model].
Out: names again.  Refuses to know what is done with them.

Bits agree because every node does what NumPy does there: float32 sums, differences and quotients that are rounded once,
halves to the even number, casts to fp16 to the nearest; and level · scale needs 19 bits, so that it is exact.
"""

from __future__ import annotations

from tinyloop_service.engine.cache_modes import (
    GROUP,
    H_MODES,
    LARGEST,
    LEAST_SCALE,
    LEAST_STEP,
    MOST_LEVEL,
    RESOLUTION,
    Field,
    fields_of,
)
from tinyloop_service.engine.cpu.runtime import F16, F32, I8, U8, GraphBuilder
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.types import CacheMode

Names = dict[str, str]  # of tensors, by the name of a field
DTYPES = {"float16": F16, "int8": I8, "uint8": U8}


class Coding:
    """How one model's state is stored in one mode."""

    def __init__(self, mode: CacheMode, spec: ModelSpec) -> None:
        self.mode, self.stores_h = mode, mode in H_MODES
        self.fields: tuple[Field, ...] = fields_of(mode, spec)
        self._width = spec.d_model

    def inputs(self, g: GraphBuilder, *leading: str) -> Names:
        """Inputs of the fields' names: the axes `leading`, then the field's last."""
        return {f.name: g.input(f.name, DTYPES[f.dtype.__name__], [*leading, f.shape[-1]]) for f in self.fields}

    def outputs(self, g: GraphBuilder, stored: Names) -> None:
        """Outputs [rows, …] of the fields' names."""
        for f in self.fields:
            g.output(f.name, stored[f.name], DTYPES[f.dtype.__name__], ["n", *f.shape])

    def encode(self, g: GraphBuilder, x: str) -> Names:
        if self.mode is CacheMode.FP16:
            return {"kv": g.cast(x, F16)}
        x = g.op("Clip", x, g.constant(-LARGEST), g.constant(LARGEST))
        if self.mode is CacheMode.H_FP16:
            return {"h": g.cast(x, F16)}
        return self._encode_vectors(g, x) if self.mode is CacheMode.INT8 else self._encode_groups(g, x)

    def _encode_vectors(self, g: GraphBuilder, x: str) -> Names:
        largest = g.reduce("ReduceMax", g.op("Abs", x), -1)
        scale = g.op("Max", g.op("Div", largest, g.constant(MOST_LEVEL[self.mode])), g.constant(LEAST_SCALE))
        scales = g.cast(scale, F16)
        return {"levels": g.cast(g.op("Round", g.op("Div", x, g.cast(scales, F32))), I8), "scales": scales}

    def _encode_groups(self, g: GraphBuilder, x: str) -> Names:
        most = MOST_LEVEL[self.mode]
        x = g.reshape(x, -1, self._width // GROUP, GROUP)
        true_minima = g.reduce("ReduceMin", x, -1)
        minima = g.cast(true_minima, F16)
        span = g.op(
            "Max",
            g.op("Sub", g.reduce("ReduceMax", x, -1), true_minima),
            g.op("Mul", g.op("Abs", g.cast(minima, F32)), g.constant(RESOLUTION)),
            g.constant(most * LEAST_STEP),
        )
        scales = g.cast(g.op("Div", span, g.constant(most)), F16)
        levels = g.op("Round", g.op("Div", g.op("Sub", x, true_minima), g.cast(scales, F32)))
        if self.mode is CacheMode.H_INT4:
            low, high = g.split(levels, 2, GROUP // 2, GROUP // 2)
            levels = g.op("Add", low, g.op("Mul", high, g.constant(16.0)))
        named = {"levels": g.cast(levels, U8), "scales": scales, "minima": minima}
        return {f.name: g.reshape(named[f.name], -1, *f.shape) for f in self.fields}

    def read(self, g: GraphBuilder, stored: Names) -> str:
        """K and V as attention reads them, in fp16, in the modes that store them."""
        if self.mode is CacheMode.FP16:
            return g.op("Identity", stored["kv"])
        return self.rounded(g, self.decode(g, stored))

    def rounded(self, g: GraphBuilder, x: str) -> str:
        """x in fp16, what is too large for it as its largest number."""
        return g.cast(g.op("Clip", x, g.constant(-LARGEST), g.constant(LARGEST)), F16)

    def decode(self, g: GraphBuilder, stored: Names) -> str:
        if self.mode is CacheMode.FP16:
            return g.cast(stored["kv"], F32)
        if self.mode is CacheMode.H_FP16:
            return g.cast(stored["h"], F32)
        levels, scales = (g.cast(stored[name], F32) for name in ("levels", "scales"))
        if self.mode is CacheMode.INT8:
            return g.op("Mul", levels, scales)
        num_groups = self._width // GROUP
        levels = g.reshape(levels, 0, num_groups, -1)
        if self.mode is CacheMode.H_INT4:
            high = g.op("Floor", g.op("Mul", levels, g.constant(1 / 16)))
            low = g.op("Sub", levels, g.op("Mul", high, g.constant(16.0)))
            levels = g.op("Concat", low, high, axis=2)
        scales, minima = (g.reshape(x, 0, num_groups, 1) for x in (scales, g.cast(stored["minima"], F32)))
        return g.reshape(g.op("Add", minima, g.op("Mul", levels, scales)), 0, self._width)

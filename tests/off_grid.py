"""The same function on weights off the grid that they were trained for: what quantising costs an ordinary model.

    python tests/off_grid.py demo-fp16.tinyloop off-grid.tinyloop [--group 128] [--seed 0]

A model that was trained with rounding to nearest in the loop, as the demo model was, loses nothing by that rounding and
says nothing about others.  This takes what it was trained to be, the rounded weights, and scales the inputs of every
linear of a block by random factors that what comes before takes back: norms those of q, k, v and of gate, up; v's rows
those of o; up's rows those of down.  The function stays (but for fp16's rounding of the products), no group's values
lie on sixteen levels any more.  The head stays as it is.

In: an fp16 model.  Out: an fp16 model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.tensors import BLOCK_LINEARS, ModelWeights, quantize_rtn
from tinyloop_service.engine.weights import read_model, write_model

SPREAD = 0.3  # of the factors' logarithms: most lie between 0.55 and 1.8

Array = NDArray[Any]


def off_grid(weights: ModelWeights, group_size: int, seed: int) -> ModelWeights:
    rng = np.random.default_rng(seed)
    tensors = dict(weights.tensors)
    bases = sorted({".".join(name.split(".")[:2]) for name in tensors if name.endswith("attn_norm.weight")})
    for base in bases:
        for name, value in _scaled_block(weights, base, group_size, rng).items():
            tensors[f"{base}.{name}.weight"] = value.astype(np.float16)
    return ModelWeights.from_tensors(weights.spec, tensors, provenance={"source": "off grid", "seed": seed})


def _scaled_block(weights: ModelWeights, base: str, group_size: int, rng: np.random.Generator) -> dict[str, Array]:
    spec = weights.spec

    def factors(size: int) -> Array:
        return np.exp(SPREAD * rng.standard_normal(size))

    names = (*BLOCK_LINEARS, "attn_norm", "mlp_norm")
    block = {name: weights.tensors[f"{base}.{name}.weight"].astype(np.float64) for name in names}
    for name in BLOCK_LINEARS:
        block[name] = quantize_rtn(block[name], group_size).dequantize().astype(np.float64)
    for norm, linears in (("attn_norm", ("attn.q", "attn.k", "attn.v")), ("mlp_norm", ("mlp.gate", "mlp.up"))):
        scale = factors(spec.d_model)
        block[norm] /= scale
        for name in linears:
            block[name] *= scale
    value = factors(spec.kv_dim)
    per_head = value.reshape(spec.n_kv_heads, spec.head_dim)
    block["attn.v"] /= value[:, None]
    block["attn.o"] *= per_head.repeat(spec.n_heads // spec.n_kv_heads, axis=0).reshape(-1)
    hidden = factors(spec.d_ff)
    block["mlp.up"] /= hidden[:, None]
    block["mlp.down"] *= hidden
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="an fp16 model")
    parser.add_argument("target", type=Path, help="where to write")
    parser.add_argument("--group", type=int, default=128, help="of the rounding that it was trained with; default 128")
    parser.add_argument("--seed", type=int, default=0, help="of the factors; default 0")
    options = parser.parse_args()
    write_model(options.target, off_grid(read_model(options.source), options.group, options.seed))


if __name__ == "__main__":
    main()

"""The CPU engine against the NumPy reference, for specs that cover every field.

Tolerances.  With float32 activations (accuracy_level 0, or fp16 weights) both sides round at 2^-24 and K/V to fp16; a
rounding of K or V that falls the other way moves it by 2^-11, one value in some thousands, and logits by far less than
1e-3 of their rms.  With accuracy_level 4 both round activations to int8, the reference by the same rule; a value on the
edge of a level that falls the other way moves a sum over K inputs by 1/127 of one input's share, and such flips breed
further ones through 2 + loops blocks: the rms difference stays below a few percent of the logits' rms.  A wrong switch,
a wrong position or a wrong mask gives 100 percent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu_driver import Driver, engine_of, weights_of

from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import SIZES, ModelSpec, Quant

BASE = replace(
    SIZES["tiny"],
    vocab_size=211,
    d_model=128,
    n_heads=4,
    n_kv_heads=4,
    head_dim=32,
    d_ff=192,
    max_seq_len=512,
    quant=Quant(4, 64),
)
SPECS: dict[str, ModelSpec] = {
    "base": BASE,
    "groups of 32": replace(BASE, quant=Quant(4, 32), d_ff=160),
    "groups of 128": replace(BASE, quant=Quant(4, 128), d_ff=384),
    "fp16 weights": replace(BASE, quant=None, d_ff=100),
    "gqa": replace(BASE, n_kv_heads=2),
    "mqa": replace(BASE, n_kv_heads=1),
    "wide heads": replace(BASE, head_dim=64),
    "interleaved": replace(BASE, rope_pairing="interleaved", rope_theta=500.0),
    "sandwich": replace(BASE, norm_placement="sandwich", norm_eps=1e-3),
    "loop_norm": replace(BASE, loop_norm=True),
    "loop_norm, post": replace(BASE, loop_norm=True, post_blocks=1),
    "inject": replace(BASE, inject="add"),
    "group of 2": replace(BASE, loop_blocks=2, post_blocks=2, pre_blocks=1),
    "no pre": replace(BASE, pre_blocks=0, inject="add"),
    "tied": replace(BASE, tie_embeddings=True),
    "tied fp16": replace(BASE, tie_embeddings=True, quant=None),
    "everything": replace(
        BASE,
        n_kv_heads=2,
        rope_pairing="interleaved",
        norm_placement="sandwich",
        loop_norm=True,
        inject="add",
        loop_blocks=2,
        post_blocks=1,
        tie_embeddings=True,
    ),
}
TOKENS = tuple(np.random.default_rng(3).integers(0, BASE.vocab_size, 150).tolist())
LENGTH = 90  # of the prefix; the rest is a suffix, so that two segments and three splits are read


def relative_rms(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


def engine_logits(spec: ModelSpec, loops: int, window: int, accuracy_level: int) -> np.ndarray:
    """After the prefix, and after a child prefix of the remaining tokens."""
    driver = Driver(engine_of(spec, accuracy_level=accuracy_level))
    parent = driver.prefix(TOKENS[:LENGTH], loops=loops, window=window, chunk=50)
    child = driver.prefix(TOKENS[LENGTH:], parent, loops=loops, window=window)
    return np.stack([driver.engine.read_logits(held.id) for held in (parent, child)])


def reference_logits(spec: ModelSpec, loops: int, window: int, activations: str) -> np.ndarray:
    model = Reference(weights_of(spec), np.float32, kv="fp16", activations=activations)  # type: ignore[arg-type]
    return model.forward(TOKENS, model.new_cache(loops, window))[[LENGTH - 1, -1]]


@pytest.mark.parametrize("name", SPECS)
def test_float_activations(name: str) -> None:
    spec = SPECS[name]
    got = engine_logits(spec, 2, 0, accuracy_level=0)
    assert relative_rms(got, reference_logits(spec, 2, 0, "exact")) < 1e-3, f"{name}: not the same model"


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.quant])
def test_int8_activations(name: str) -> None:
    spec = SPECS[name]
    got = engine_logits(spec, 2, 0, accuracy_level=4)
    assert relative_rms(got, reference_logits(spec, 2, 0, "int8")) < 5e-2, f"{name}: int8 activations differ in kind"


@pytest.mark.parametrize("loops", [1, 2, 8, 12])
def test_depths(loops: int) -> None:
    got = engine_logits(BASE, loops, 0, accuracy_level=4)
    error = relative_rms(got, reference_logits(BASE, loops, 0, "int8"))
    assert error < 5e-2 * (1 + loops / 4), f"{loops} loops: {error}"


@pytest.mark.parametrize("window", [1, 20, 64, 65, 100])
def test_windows(window: int) -> None:
    spec = SPECS["everything"]
    got = engine_logits(spec, 2, window, accuracy_level=0)
    assert relative_rms(got, reference_logits(spec, 2, window, "exact")) < 1e-3, f"window {window}: wrong mask"

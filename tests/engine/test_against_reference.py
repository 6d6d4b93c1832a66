"""Engines against the NumPy reference, for specs that cover every field.

Tolerances.  State is rounded alike on both sides; in fp16 a rounding that falls the other way moves a value by 2^-11.

"cpu", float32 activations (accuracy_level 0, or fp16 weights): one such value in some thousands, all else rounds at
2^-24, so logits move by far less than 1e-3 of their rms.
The same with state in int8, h-int8 or h-int4: a step is a hundredth, in h-int4 a fifteenth of a range, and where it is
taken the other way, or a scale is rounded the other way, one token's K and V move by a few percent.  Values that close
to an edge (2^-24 of 2^-7) are one in 10^5: a few tokens of 150, each one of twenty or more that are attended to, so the
logits move by a thousandth or two; in h-int4, where K and V made of h are rounded to fp16 beside such large steps, by
three or four.  What a mode costs without windows is three times what such flips do, or more; that
is tested too.
"cpu", int8 activations: rounded in the reference by the same rule; a value on the edge of a level that falls the other
way moves a sum over K inputs by 1/127 of one input's share, and such flips breed further ones through 2 + loops blocks:
the rms difference stays below a few percent of the logits' rms.
"cuda": every input of a linear and of attention is rounded to fp16, five of them in a block, and prompt tokens see
weights rounded to fp16: a relative 2^-12 each, independent of one another, so a block adds about 2^-12 · √6 = 6e-4 of
its output's rms, and seven blocks in a row 6e-4 · √7 = 1.6e-3; twice that is allowed.
The same with state in int8: K and V are off by a twentieth of a level, so one value in twenty falls to another level
than the reference's, which moves logits by half of what the mode costs or more, 1.5e-2 at most.  `test_cuda_modes.py`
is tighter: there the reference goes on from the K and V that the engine reads.

A wrong switch, a wrong position or a wrong mask gives 100 percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
from driver import Driver
from engines import Kind, ReadableEngine, engine_of, fitted, make_engine, weights_of
from switches import switches

from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import SIZES, ModelSpec, Quant
from tinyloop_service.types import CacheMode, Sampling

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
SWITCHES = {name.replace("+", ", "): spec for name, spec in switches(BASE).items()}
SPECS = {
    "base": BASE,
    "groups of 32": replace(BASE, quant=Quant(4, 32), d_ff=160),
    "groups of 128": replace(BASE, quant=Quant(4, 128), d_ff=384),
    "fp16 weights": replace(BASE, quant=None, d_ff=100),
    "mqa": replace(BASE, n_kv_heads=1),
    "wide heads": replace(BASE, head_dim=64),
    **SWITCHES,
    "interleaved": replace(SWITCHES["interleaved"], rope_theta=500.0),
    "sandwich": replace(SWITCHES["sandwich"], norm_eps=1e-3),
    "tied fp16": replace(BASE, tie_embeddings=True, quant=None),
    "everything": replace(SWITCHES["everything"], n_kv_heads=2, tie_embeddings=True),
}
TOKENS = tuple(np.random.default_rng(3).integers(0, BASE.vocab_size, 150).tolist())
LENGTH = 90  # of the prefix; the rest is a suffix, so that two segments and three splits are read


@dataclass(frozen=True)
class Arithmetic:
    """How an engine computes, and how near the reference comes to it in a shallow model."""

    kind: Kind
    make: Callable[[ModelSpec], ReadableEngine]
    activations: Literal["exact", "int8"]  # of the reference
    tolerance: float
    mode: CacheMode = CacheMode.FP16
    of_exact: float = 1 / 3  # how far it is from the reference in its mode, at most, of how far from an exact one


def storing(mode: CacheMode) -> Arithmetic:
    """On the CPU, activations in float32."""
    tolerance = {CacheMode.FP16: 1e-3, CacheMode.H_FP16: 1e-3, CacheMode.H_INT4: 5e-3}.get(mode, 3e-3)
    return Arithmetic("cpu", lambda spec: engine_of(spec, mode, accuracy_level=0), "exact", tolerance, mode)


ARITHMETICS = {
    "cpu float": storing(CacheMode.FP16),
    "cpu int8": Arithmetic("cpu", engine_of, "int8", 5e-2),
    "cuda": Arithmetic("cuda", lambda spec: make_engine("cuda", weights_of(spec), row_counts=(1,)), "exact", 3e-3),
}
CUDA_MODES = {
    "cuda int8 state": Arithmetic(
        "cuda",
        lambda spec: make_engine("cuda", weights_of(spec), row_counts=(1,), cache_mode=CacheMode.INT8),
        "exact",
        1.2e-2,
        CacheMode.INT8,
        of_exact=1.0,
    )
}
IN_MODES = {f"cpu {mode.value} state": storing(mode) for mode in CacheMode if mode is not CacheMode.FP16}
FP16_STATE, ARITHMETICS = [*ARITHMETICS], ARITHMETICS | IN_MODES | CUDA_MODES


def combinations(*arithmetics: str, names: list[str]) -> list[Any]:
    """Parameters: an arithmetic and the name of a spec that it can be told apart on."""
    return [
        pytest.param(arithmetic, name, marks=[pytest.mark.gpu] if arithmetic.startswith("cuda") else [])
        for arithmetic in arithmetics
        for name in names
        if SPECS[name].quant or arithmetic != "cpu int8"
    ]


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, relative to that of what is expected."""
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


def reference_logits(arithmetic: Arithmetic, spec: ModelSpec, tokens: tuple[int, ...], **cache: int) -> np.ndarray:
    """After every token."""
    model = Reference(weights_of(spec), np.float32, cache_mode=arithmetic.mode, activations=arithmetic.activations)
    return model.forward(tokens, model.new_cache(**cache))


def prompt_logits(arithmetic: Arithmetic, spec: ModelSpec, loops: int = 2, window: int = 0) -> np.ndarray:
    """After a prefix, and after a child prefix of the remaining tokens."""
    driver = Driver(arithmetic.make(spec), loops=loops)
    parent = driver.prefix(TOKENS[:LENGTH], window=window, chunk=50)
    child = driver.prefix(TOKENS[LENGTH:], parent, window=window)
    got = np.stack([driver.engine.read_logits(held.id) for held in (parent, child)])
    driver.engine.close()
    return got


def prefill_difference(arithmetic: Arithmetic, spec: ModelSpec, loops: int = 2, window: int = 0) -> float:
    spec = fitted(spec, arithmetic.kind, arithmetic.mode)
    expected = reference_logits(arithmetic, spec, TOKENS, loops=loops, window=window)
    return difference(prompt_logits(arithmetic, spec, loops, window), expected[[LENGTH - 1, -1]])


@pytest.mark.parametrize(("arithmetic", "name"), combinations(*FP16_STATE, names=[*SPECS]))
def test_prompts(arithmetic: str, name: str) -> None:
    how = ARITHMETICS[arithmetic]
    assert prefill_difference(how, SPECS[name]) < how.tolerance, f"{name}: not the same model"


@pytest.mark.parametrize(
    ("arithmetic", "name"),
    [
        *combinations("cpu int8 state", "cpu h-int8 state", *CUDA_MODES, names=[*SPECS]),
        *combinations("cpu h-fp16 state", "cpu h-int4 state", names=["base", "everything"]),
    ],
)
def test_prompts_in_every_mode(arithmetic: str, name: str) -> None:
    how = ARITHMETICS[arithmetic]
    spec = fitted(SPECS[name], how.kind, how.mode)
    got = prompt_logits(how, spec)
    alike, exact = (
        difference(got, reference_logits(arithmetic, spec, TOKENS, loops=2)[[LENGTH - 1, -1]])
        for arithmetic in (how, replace(how, mode="exact"))  # type: ignore[arg-type]
    )
    assert alike < how.tolerance, f"{name}: not the same model"
    assert alike < exact * how.of_exact, f"{name}: another rounding of state than the reference's"


@pytest.mark.parametrize("loops", [1, 2, 8, 12])
@pytest.mark.parametrize(("arithmetic", "name"), combinations("cpu int8", "cuda", names=["base"]))
def test_depths(arithmetic: str, name: str, loops: int) -> None:
    how = ARITHMETICS[arithmetic]
    error = prefill_difference(how, SPECS[name], loops)
    assert error < how.tolerance * (1 + loops) ** 0.5, f"{loops} loops: {error}"


@pytest.mark.parametrize("window", [1, 20, 64, 65, 100])
@pytest.mark.parametrize(
    ("arithmetic", "name"),
    combinations("cpu float", "cpu h-int8 state", "cuda", *CUDA_MODES, names=["everything"]),
)
def test_windows(arithmetic: str, name: str, window: int) -> None:
    how = ARITHMETICS[arithmetic]
    assert prefill_difference(how, SPECS[name], window=window) < how.tolerance, f"window {window}: wrong mask"


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(
    ("arithmetic", "name"),
    [
        *combinations("cpu float", names=["base", "everything"]),
        *combinations(*IN_MODES, *CUDA_MODES, names=["everything"]),
        *combinations("cuda", names=[*SPECS]),
    ],
)
def test_generated_tokens(arithmetic: str, name: str, window: int) -> None:
    """The log-probabilities of decode steps, off a prefix, over the end of a page."""
    how, steps = ARITHMETICS[arithmetic], 12
    spec = fitted(SPECS[name], how.kind, how.mode)
    driver = Driver(how.make(spec))
    prefix = driver.prefix(TOKENS[:LENGTH], window=window)
    request = driver.request(prefix, TOKENS[LENGTH:120], sampling=Sampling(logprobs=20), window=window)
    driver.decode([request], steps)
    drawn = driver.drawn[request.id]
    driver.engine.close()
    tokens = (*request.tokens, *(token for token, _ in drawn[:-1]))
    logits = reference_logits(how, spec, tokens, loops=2, window=window)[-steps:].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tops = [dict(logprob.top) for _, logprob in drawn[1:] if logprob]
    got = np.array([list(top.values()) for top in tops])
    error = difference(got, np.stack([row[list(top)] for row, top in zip(expected, tops, strict=True)]))
    assert error < how.tolerance, f"{name}: {error}"


@pytest.mark.gpu
def test_the_served_size() -> None:
    """407m at its 8 loops, where sums run over 8192 inputs and 10 blocks follow one another."""
    how = replace(ARITHMETICS["cuda"], make=lambda _: make_engine("cuda", weights_of("407m"), kv_memory=1 << 30))
    driver, model = (
        Driver(how.make(SIZES["407m"]), loops=8),
        Reference(weights_of("407m"), np.float32, cache_mode=CacheMode.FP16),
    )
    prefix = driver.prefix(TOKENS)
    got = driver.engine.read_logits(prefix.id)
    driver.engine.close()
    assert difference(got, model.forward(TOKENS, model.new_cache(8))[-1]) < 3 * how.tolerance  # (1 + loops) ** 0.5

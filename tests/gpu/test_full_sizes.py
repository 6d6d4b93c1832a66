"""Kernels at the sizes of 407m, where grids have several waves, sums run over 8192 inputs and rows fill every tile.

The small cases of tests/kernels, which run in emulation too, say what is right; here a wrong tile, a wrap of an index
or a race of a full device would show.  Each against float64, and every number of rows against 64 of them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import test_decode_attention as decoding
import test_prefill_attention as prompts
from attention_cases import Sequences
from linear_cases import Case, Host, activations, nan_like

from tinyloop_service.engine.cuda import open_device
from tinyloop_service.engine.cuda.weights import rope_tables
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.kernels import linear
from tinyloop_service.kernels.decode_attention import has_quads
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.references import linear as reference
from tinyloop_service.kernels.references.norm import sum_tree

pytestmark = pytest.mark.gpu
SPEC = SIZES["407m"]
MOST_ROWS, ROWS = 128, (1, 7, 8, 9, 10, 17, 33, 50, 64, 72, 100)
HALF_ULP = 2.0**-11  # of fp16, relative


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = open_device(SPEC)
    yield device
    device.close()


@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize(
    ("kind", "num_out", "num_in"), [("o", 2048, 2048), ("down", 2048, 8192), ("head", SPEC.vocab_size, 2048)]
)
def test_plain_linears(device: Device, kind: Any, num_out: int, num_in: int, group: int) -> None:
    case, y = Case.make(device, kind, (num_out,), num_in, group), activations(MOST_ROWS, num_in)

    def run(rows: int) -> Host:
        given = device.upload(y[:rows])
        if kind == "head":
            logits = nan_like(device, (rows, case.packed.num_padded), np.float32)
            linear.linear_logits(device, case.packed, given, logits)
            return device.download(logits)[:, :num_out]
        count = linear.num_partials(device, case.packed, rows)
        partials = nan_like(device, (count, rows, case.packed.num_padded), np.float32)
        linear.linear_partials(device, case.packed, given, partials)
        return sum_tree(device.download(partials))[:, :num_out]

    most = run(MOST_ROWS)
    assert (np.abs(most - reference.product(case.dense, y)) <= case.slack(y)).all()
    for rows in ROWS:
        assert np.array_equal(run(rows), most[:rows]), f"{rows} rows give other bits than {MOST_ROWS}"


@pytest.mark.parametrize("group", [128, 0])
def test_gate_up(device: Device, group: int) -> None:
    case, y = Case.make(device, "gate_up", (8192, 8192), 2048, group), activations(MOST_ROWS, 2048)

    def run(rows: int) -> Host:
        h = nan_like(device, (rows, 8192), np.float16)
        linear.linear_gate_up(device, case.packed, device.upload(y[:rows]), h)
        return device.download(h)

    most, expected = run(MOST_ROWS).astype(np.float64), np.empty((MOST_ROWS, 8192), np.float16)
    reference.linear_gate_up(case.dense, y, expected)
    gate, up = np.split(reference.product(case.dense, y), 2, axis=1)
    slack_gate, slack_up = np.split(case.slack(y), 2, axis=1)
    # silu is steeper than 1 nowhere by more than a tenth; a result in the middle of two halves may go either way.
    slack = 1.1 * slack_gate * np.abs(up) + np.abs(gate) * slack_up + 2 * HALF_ULP * np.abs(expected) + 2.0**-24
    assert (np.abs(most - expected) <= slack).all()
    for rows in ROWS:
        assert np.array_equal(run(rows), most[:rows]), f"{rows} rows give other bits than {MOST_ROWS}"


@pytest.mark.parametrize("group", [128, 0])
def test_qkv(device: Device, group: int) -> None:
    width, blocks = SPEC.d_model, 16
    case, y = Case.make(device, "qkv", (width,) * 3, width, group, head_dim=128), activations(MOST_ROWS, width)
    position = np.random.default_rng(1).integers(0, 64 * blocks, MOST_ROWS).astype(np.int32)
    slots = np.arange(MOST_ROWS, dtype=np.int32)
    tables = np.zeros((MOST_ROWS, 1, blocks), np.int32)
    tables[:] = slots[:, None, None]  # every row has one page, for all its blocks
    cos, sin = rope_tables(SPEC)
    there = [device.upload(array) for array in (position, slots, tables, cos, sin)]

    def run(rows: int) -> tuple[Host, Host]:
        q, pool = nan_like(device, (rows, width), np.float16), device.zeros((MOST_ROWS, 2 * width * 64), np.float16)
        at, slot, table, cosines, sines = there
        linear.linear_qkv(
            device, case.packed, device.upload(y[:rows]), at[:rows], slot[:rows], table, 0, pool, cosines, sines, q,
            num_kv_heads=SPEC.n_kv_heads,
        )  # fmt: skip
        return device.download(q), device.download(pool)

    q, pool = run(MOST_ROWS)
    expected_q, expected_pool = np.empty_like(q), np.zeros_like(pool)
    reference.linear_qkv(
        case.dense, y, position, slots, tables, 0, expected_pool, cos, sin, expected_q, num_kv_heads=SPEC.n_kv_heads
    )
    slack = 2 * float(case.slack(y).max())  # of two products, turned
    for got, expected in ((q, expected_q), (pool, expected_pool)):
        error = np.abs(got.astype(np.float32) - expected.astype(np.float32))
        assert (error <= slack + 2 * HALF_ULP * np.abs(expected.astype(np.float32))).all()
    for rows in ROWS:
        few_q, few_pool = run(rows)
        assert np.array_equal(few_q, q[:rows]), f"{rows} rows give other bits than {MOST_ROWS}"
        assert np.array_equal(few_pool[:rows], pool[:rows]) and not few_pool[rows:].any()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("prefix", "count"), [(1000, 50), (1024, 50), (1087, 50), (1024, 128), (1000, 256)])
def test_decode_attention(device: Device, prefix: int, count: int, int8: bool) -> None:
    """Rows off one prefix, at different places of their own page; shared pages one by one, and as quads."""
    shared = prefix // 64
    lengths = [prefix + 1 + (7 * row) % (64 * shared + 64 - prefix) for row in range(count)]
    sequences = Sequences(lengths, SPEC.n_heads, SPEC.n_kv_heads, SPEC.head_dim, shared=shared, int8=int8)
    rows = [decoding.Row(slot, length - 1) for slot, length in enumerate(lengths)]
    q = sequences.queries(len(rows))
    a = decoding.run(device, sequences, rows, q)
    if has_quads(device):
        assert np.array_equal(decoding.run(device, sequences, rows, q, quads=True), a), "quads have other bits"
    for row in (0, count // 2, count - 1):
        decoding.check(sequences, rows[row : row + 1], q[row : row + 1], a[row : row + 1])
        alone = decoding.run(device, sequences, rows[row : row + 1], q[row : row + 1])
        assert np.array_equal(alone, a[row : row + 1]), f"row {row} alone has other bits"


def test_prefill_attention(device: Device) -> None:
    length = 1024
    sequences = Sequences([length], SPEC.n_heads, SPEC.n_kv_heads, SPEC.head_dim)
    q = sequences.queries(length)
    whole = prompts.run(device, sequences, q, [(0, 0, length, 0, 0)])
    for token in (0, 63, 64, 500, 1023):
        prompts.check(sequences, q[token : token + 1], whole[token : token + 1], [(0, 0, 1, token, 0)])
    parts = prompts.run(device, sequences, q, [(0, 0, 500, 0, 0), (0, 500, 524, 500, 0)])
    assert np.array_equal(parts, whole), "how the prompt was cut shows"

"""Rows off a long prefix read it four pages at a time, and draw what each draws alone, which reads page by page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driver import Driver
from emulated import HOT, engine_of
from emulation.device import EmulatedDevice
from test_small_cases import PLAIN

from tinyloop_service.types import CacheMode

SPEC = replace(PLAIN, n_heads=4, max_seq_len=640)  # eight rows are 32 queries of a K/V head
TOKENS = tuple(np.random.default_rng(11).integers(0, 96, 580).tolist())


def launched(device: EmulatedDevice) -> set[str]:
    """Sources of kernels that ran."""
    return {stem for (stem, *_), kernel in device._kernels.items() if kernel.num_launches}


@pytest.mark.parametrize("mode", [CacheMode.FP16, CacheMode.INT8])
def test_rows_off_a_long_prefix_draw_what_each_draws_alone(mode: CacheMode) -> None:
    device = EmulatedDevice(num_sms=2)  # which eight pages fill
    engine = engine_of(SPEC, device, cache_mode=mode)
    assert "decode_attention_wide" not in launched(device), "quads wait for a prefix that is long enough"
    driver = Driver(engine)
    prefix = driver.prefix(TOKENS[:560])
    suffixes = [TOKENS[560 : 560 + n] for n in (0, 1, 0, 7, 20)]
    alone = [driver.alone(prefix, suffix, 3, sampling=HOT) for suffix in suffixes]
    assert "decode_attention_wide" not in launched(device)
    rows = [driver.request(prefix, suffix, sampling=HOT) for suffix in suffixes]
    driver.decode(rows, 3, at_once=2)
    assert "decode_attention_wide" in launched(device)
    assert [driver.drawn[row.id] for row in rows] == alone


@pytest.mark.parametrize(("num_sms", "may"), [(16, True), (17, False)])
def test_an_engine_is_made_ready_for_quads_of_several_prefixes(num_sms: int, may: bool) -> None:
    """Eight rows are off four prefixes of at most ten pages: together these fill what one of them does not."""
    device = EmulatedDevice(num_sms=num_sms)
    engine_of(SPEC, device)
    assert ("decode_attention_wide" in {stem for stem, *_ in device._kernels}) == may

"""`device`: every kernel test runs in emulation, and with `-m gpu` on the machine's GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from emulation.device import EmulatedDevice

from tinyloop_service.kernels.availability import open_cupy_device
from tinyloop_service.kernels.build import KERNELS
from tinyloop_service.kernels.device import Device

KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
HERE = Path(__file__).parent


@functools.cache
def make_device(kind: str, sources: Path = KERNELS) -> Device:
    return EmulatedDevice(sources=sources) if kind == "emulated" else open_cupy_device(sources=sources)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Device:
    return make_device(request.param)


@pytest.fixture(params=KINDS)
def probe(request: pytest.FixtureRequest) -> Device:
    """A device whose kernels are those of probe.cu."""
    return make_device(request.param, HERE)

"""The device seam: what every device does, and what the emulated one refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulation.builder import EmulationError
from emulation.device import EmulatedDevice

from tinyloop_service.kernels.device import Device


def scale_add(device: Device, source: object, target: object, *, scale: float = 1, offset: int = 0) -> None:
    kernel = device.kernel("probe", "scale_add")
    n = target.shape[0]
    args = (source, target, np.float32(scale), np.int32(offset), np.int64(n))
    device.launch(kernel, (-(-n // 64), 1, 1), 64, args, dependent=True)


def test_launch_upload_download(probe: Device) -> None:
    values = np.arange(100, dtype=np.float32)
    source, target = probe.upload(values), probe.empty(100, np.float32)
    scale_add(probe, source, target, scale=2, offset=-3)
    assert np.array_equal(probe.download(target), values * 2 - 3)
    assert np.array_equal(probe.download(target[10:20]), values[10:20] * 2 - 3)


def test_none_is_a_null_pointer_and_an_empty_grid_nothing(probe: Device) -> None:
    target = probe.zeros(64, np.float32)
    scale_add(probe, None, target, offset=7)
    probe.launch(
        probe.kernel("probe", "scale_add"), (0, 1, 1), 64, (None, target, np.float32(1), np.int32(0), np.int64(0))
    )
    assert np.array_equal(probe.download(target), np.full(64, 7, np.float32))


def test_copies_through_pinned_memory_and_an_event(probe: Device) -> None:
    host, back = probe.pinned((2, 8), np.float32), probe.pinned(16, np.float32)
    host[...] = np.arange(16).reshape(2, 8)
    array, event = probe.empty((2, 8), np.float32), probe.event()
    probe.copy_in(array, host)
    probe.copy_out(back, array.reshape(16))
    event.record()
    event.synchronize()
    assert event.done
    assert np.array_equal(back, np.arange(16))


def test_a_graph_replays_on_the_same_addresses(probe: Device) -> None:
    kernel = probe.kernel("probe", "scale_add")
    array, back = probe.zeros(64, np.float32), probe.pinned(64, np.float32)

    def work() -> None:
        for _ in range(2):
            args = (array, array, np.float32(2), np.int32(1), np.int64(64))
            probe.launch(kernel, (1, 1, 1), 64, args, dependent=True)
        probe.copy_out(back, array)

    graph = probe.capture(work)
    assert not probe.download(array).any()
    for _ in range(3):
        graph.launch()
    probe.synchronize()
    assert np.array_equal(back, np.full(64, 63, np.float32))  # 2·(2·x + 1) + 1, three times from 0


@pytest.mark.parametrize("out_dtype", [np.float16, np.float32])
def test_gemm_of_whole_arrays_and_of_column_slices(probe: Device, out_dtype: type) -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-4, 5, size).astype(np.float16) for size in ((5, 64), (24, 64)))  # sums are exact
    device_x, device_w, out = probe.upload(x), probe.upload(w), probe.empty((5, 24), out_dtype)
    probe.gemm(device_x, device_w, out)
    expected = x.astype(np.float32) @ w.astype(np.float32).T
    assert np.array_equal(probe.download(out), expected)
    probe.gemm(device_x[:, 16:48], device_w[:, 16:48], out, accumulate=True)
    probe.gemm(device_x[:3, 16:48], device_w[8:16, 16:48], out[:3, 8:16])
    part = x[:, 16:48].astype(np.float32) @ w[:, 16:48].astype(np.float32).T
    expected = expected + part
    expected[:3, 8:16] = part[:3, 8:16]
    assert np.array_equal(probe.download(out), expected)


@pytest.mark.parametrize("out_dtype", [np.float16, np.float32])
def test_every_other_way_is_one_to_the_same_product(probe: Device, out_dtype: type) -> None:
    rng = np.random.default_rng(2)
    x, w = (rng.integers(-2, 3, size).astype(np.float16) for size in ((64, 256), (128, 256)))  # sums are exact
    device_x, device_w, out = probe.upload(x), probe.upload(w), probe.zeros((64, 128), out_dtype)
    expected = x.astype(np.float32) @ w.astype(np.float32).T
    ways = probe.ways(device_x, device_w, out)
    assert ways or probe.name == "emulated"
    for way in ways:
        probe.gemm(device_x, device_w, out, way=way)
        assert np.array_equal(probe.download(out), expected)
        probe.gemm(device_x, device_w, out, accumulate=True, way=way)
        assert np.array_equal(probe.download(out), 2 * expected)


def test_gemm_refuses_shapes_that_do_not_meet(probe: Device) -> None:
    x, w, out = (probe.zeros(shape, np.float16) for shape in ((2, 8), (4, 16), (2, 4)))
    with pytest.raises(ValueError, match="gemm: "):
        probe.gemm(x, w, out)


def test_python_numbers_are_refused(probe: Device) -> None:
    target = probe.zeros(64, np.float32)
    with pytest.raises(TypeError, match="argument 2 is float"):
        probe.launch(probe.kernel("probe", "scale_add"), (1, 1, 1), 64, (None, target, 1.0, np.int32(0), np.int64(64)))


def test_what_a_device_says_of_itself(device: Device) -> None:
    free, total = device.memory()
    assert device.name and device.arch.startswith("sm_") and device.num_sms > 0 and 0 < free <= total
    assert device.max_shared_bytes >= 99 * 1024  # every GPU since sm_80


class TestEmulated:
    """Mistakes that a GPU would let pass."""

    @pytest.fixture
    def emulated(self) -> EmulatedDevice:
        return EmulatedDevice(deferred=True, sources=Path(__file__).parent)

    def test_scalars_of_another_kind(self, emulated: EmulatedDevice) -> None:
        kernel, out = emulated.kernel("probe", "scale_add"), emulated.zeros(64, np.float32)
        with pytest.raises(TypeError, match="arguments are ppfll, its parameters ppfil"):
            emulated.launch(kernel, (1, 1, 1), 64, (None, out, np.float32(1), np.int64(0), np.int64(64)))

    def test_host_arrays_are_no_arguments(self, emulated: EmulatedDevice) -> None:
        with pytest.raises(TypeError, match="not device memory"):
            scale_add(emulated, None, np.zeros(64, np.float32))

    def test_writing_past_an_array(self, emulated: EmulatedDevice) -> None:
        kernel, out = emulated.kernel("probe", "scale_add"), emulated.zeros(60, np.float32)
        emulated.launch(kernel, (1, 1, 1), 64, (None, out, np.float32(1), np.int32(0), np.int64(64)))
        with pytest.raises(EmulationError, match="wrote outside the array it got as argument 1"):
            emulated.synchronize()

    def test_pinned_memory_reused_before_the_copy_ran(self, emulated: EmulatedDevice) -> None:
        host, array = emulated.pinned(4, np.int32), emulated.zeros(4, np.int32)
        host[...] = 1
        emulated.copy_in(array, host)
        host[...] = 2
        assert np.array_equal(emulated.download(array), [2, 2, 2, 2])

    def test_unpinned_copies(self, emulated: EmulatedDevice) -> None:
        with pytest.raises(TypeError, match="pinned"):
            emulated.copy_in(emulated.zeros(4, np.int32), np.zeros(4, np.int32))

    def test_allocating_in_a_capture(self, emulated: EmulatedDevice) -> None:
        with pytest.raises(RuntimeError, match="may not allocate"):
            emulated.capture(lambda: emulated.zeros(4, np.int32))


def test_prepare_runs_nothing(probe: Device) -> None:
    array = probe.zeros(64, np.float32)

    def work() -> None:
        scale_add(probe, None, array, offset=7)
        probe.capture(lambda: scale_add(probe, None, array, offset=8)).launch()

    probe.prepare(work)
    assert not probe.download(array).any()
    work()
    assert np.array_equal(probe.download(array), np.full(64, 8, np.float32))

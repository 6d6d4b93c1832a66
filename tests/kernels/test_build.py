"""Every kernel compiles for every architecture, without a GPU; cubins are kept and found again.

Optimisation is cut short: what is proved is that each file is valid for the architecture (its instructions, registers
and shared memory), and that takes a tenth of the time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinyloop_service.errors import EngineFault
from tinyloop_service.kernels.build import KERNELS, KernelBuilder, KernelBuildError, compile_cubin, options_for

STEMS = sorted(path.stem for path in KERNELS.glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100")
QUICKLY = "--Ofast-compile=max"
GQA_64 = {"TL_HEAD_DIM": 64, "TL_QUERIES_PER_KV": 4}
INT8 = {"TL_INT8": 1}
# The other sides of the kernels' switches; each file's defaults are compiled everywhere.
VARIANTS: dict[str, tuple[dict[str, int], ...]] = {
    "decode_attention": (GQA_64, INT8),
    "decode_attention_many": (GQA_64, INT8, {"TL_QUERIES_PER_KV": 16}),
    "decode_attention_wide": (GQA_64, INT8, {"TL_QUERIES_PER_KV": 16}),
    "prefill_attention": (GQA_64, INT8),
    "prefill_attention_wide": (GQA_64, INT8),
    "rope": ({"TL_HEAD_DIM": 64, "TL_INTERLEAVED": 1}, {"TL_QUERIES_ONLY": 1}),
    "hidden": ({"TL_CODING": 0, "TL_COLUMNS": 1}, {"TL_CODING": 2, "TL_CHUNKS": 3}),
    "rope_int8": ({"TL_HEAD_DIM": 64, "TL_INTERLEAVED": 1},),
    "norm": ({"TL_CHUNKS": 1, "TL_COLUMNS": 1},),
    "linear": (
        {"TL_EPILOGUE": 0, "TL_WARPS_M": 2},
        {"TL_EPILOGUE": 0, "TL_FOLD_ROWS": 4, "TL_KV_ROWS": 1},
        {"TL_EPILOGUE": 1, "TL_ROW_TILES": 7, "TL_RESIDENT": 0},
        {"TL_EPILOGUE": 3, "TL_GROUP": 0},
    ),
    "linear_wide": (
        {"TL_EPILOGUE": 0, "TL_PARTS": 2, "TL_CLUSTER": 4, "TL_COLUMNS": 1},
        {"TL_EPILOGUE": 0, "TL_PARTS": 2, "TL_CLUSTER": 4, "TL_COLUMNS": 1, "TL_KV_ROWS": 1},
        {"TL_EPILOGUE": 1, "TL_ROW_TILES": 8, "TL_CLUSTER": 2, "TL_GROUP": 32, "TL_COLUMNS": 1, "TL_H_COLUMNS": 1},
        {"TL_EPILOGUE": 3, "TL_CLUSTER": 2, "TL_GROUP": 0},
    ),
}


def compile_quickly(stem: str, arch: str, defines: dict[str, int]) -> None:
    options = [*options_for(arch, defines), QUICKLY]
    assert compile_cubin((KERNELS / f"{stem}.cu").read_bytes(), f"{stem}.cu", options).startswith(b"\x7fELF")


@pytest.mark.timeout(500)  # 20 s on two quiet cores
def test_every_kernel_for_every_architecture() -> None:
    assert "linear" in STEMS
    jobs = [(stem, arch, {}) for stem in STEMS for arch in ARCHITECTURES]
    jobs += [(stem, arch, v) for stem, variants in VARIANTS.items() for v in variants for arch in ("sm_80", "sm_90a")]
    with ThreadPoolExecutor() as threads:  # NVRTC releases the GIL
        list(threads.map(lambda job: compile_quickly(*job), jobs))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_probe(arch: str) -> None:
    """Every instruction of ptx.cuh, whether a kernel uses it or not; with the builder's own options."""
    assert KernelBuilder(arch, sources=Path(__file__).parent).compile("probe", {})


def test_cubins_are_kept(tmp_path: Path) -> None:
    builder = KernelBuilder("sm_90", cache=tmp_path)
    first = builder.cubin("tables", {})
    stamp = first.stat().st_mtime_ns
    assert KernelBuilder("sm_90", cache=tmp_path).cubin("tables", {}) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing half-written is left
    assert "sm_90a" in first.name and first.parent.name.startswith("nvrtc-")


def test_another_define_or_architecture_is_another_cubin(tmp_path: Path) -> None:
    builder = KernelBuilder("sm_90", cache=tmp_path)
    paths = {builder.cubin("tables", {}), builder.cubin("tables", {"TL_UNUSED": 1})}
    paths.add(KernelBuilder("sm_80", cache=tmp_path).cubin("tables", {}))
    assert len(paths) == 3


def test_another_header_is_another_cubin(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "one.cu").write_text('#include "one.cuh"\nextern "C" __global__ void one(int* out) { *out = kOne; }')
    builder = KernelBuilder("sm_80", sources=tmp_path, cache=tmp_path / "cache")
    (tmp_path / "include/one.cuh").write_text("constexpr int kOne = 1;")
    first = builder.cubin("one", {})
    (tmp_path / "include/one.cuh").write_text("constexpr int kOne = 2;")
    assert builder.cubin("one", {}) != first


def test_precompiled_cubins_come_first(tmp_path: Path) -> None:
    made = KernelBuilder("sm_90", cache=tmp_path / "cache").cubin("tables", {})
    given = tmp_path / "given"
    given.mkdir()
    (given / made.name).write_bytes(b"given")
    builder = KernelBuilder("sm_90", cache=tmp_path / "never", precompiled=given)
    assert builder.cubin("tables", {}).read_bytes() == b"given"
    assert not (tmp_path / "never").exists()


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = KernelBuilder("sm_80", cache=tmp_path / "file").cubin("tables", {})
    assert path.read_bytes().startswith(b"\x7fELF")


def test_an_error_shows_the_compilers_log(tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { undeclared(); }')
    with pytest.raises(KernelBuildError, match="undeclared") as caught:
        KernelBuilder("sm_80", sources=tmp_path, cache=tmp_path).cubin("wrong", {})
    assert isinstance(caught.value, EngineFault)
    assert "wrong.cu does not compile with --gpu-architecture=sm_80" in str(caught.value)


def test_an_architecture_that_the_compiler_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="sm_999"):
        KernelBuilder("sm_999", cache=tmp_path).cubin("tables", {})


def test_an_architecture_newer_than_the_compiler_runs_the_code_of_an_older_one(tmp_path: Path) -> None:
    assert KernelBuilder("sm_109", cache=tmp_path).cubin("tables", {}).read_bytes().startswith(b"\x7fELF")


def test_the_digest_of_all_sources_changes_with_any_of_them(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    digests = {KernelBuilder("sm_90").digest}
    for name in ("a.cu", "b.cu", "include/c.cuh"):
        (tmp_path / name).write_text("one")
        digests.add(KernelBuilder("sm_90", sources=tmp_path).digest)
        (tmp_path / name).write_text("other")
        digests.add(KernelBuilder("sm_90", sources=tmp_path).digest)
    assert len(digests) == 1 + 2 * 3
    assert KernelBuilder("sm_80", sources=tmp_path).digest in digests, "what it is compiled for is named apart"

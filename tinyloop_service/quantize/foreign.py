"""GPTQ tensors made elsewhere → a model, exactly: the values of every linear are equal, bit for bit.

In: a safetensors file as AutoGPTQ and GPTQModel write tensors, under our names of linears, and a config.

    {base}.qweight  int32 [in/8, out]       input 8·r + i of an output in bits 4·i … 4·i + 3 of word r
    {base}.qzeros   int32 [in/group, out/8]  packed likewise, along out: 7 everywhere (v1 stores zero − 1) or 8 (v2)
    {base}.scales   fp16  [in/group, out]
    {base}.g_idx    int32 [in]               the group of each input; may be missing
    {name}.weight   fp16, bf16 or fp32       norms, embedding, a head that is not quantised

Out: `ModelWeights`, or one ModelFileError that names the tensor, what it is, what was expected and the way out.  A
group's inputs must be neighbours, its zero the middle level: a `.tinyloop` file has no g_idx and no zeros.  Floats
become fp16: what would overflow is refused, what is rounded (fp32, and bf16 below fp16's range) is counted.  A config
without `quant` takes a model whose linears are all floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.container import read_container
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import Int4Linear, ModelWeights, expected_tensors, linear_tensors, pack_nibbles
from tinyloop_service.errors import ModelFileError

Array = NDArray[Any]
Tensors = Mapping[str, Array]

_BF16 = np.dtype([("bf16", "<u2")])  # NumPy has none: the upper half of a float32
_DTYPES = {"F16": np.dtype("<f2"), "BF16": _BF16, "F32": np.dtype("<f4"), "I32": np.dtype("<i4")}
_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)  # of the eight nibbles of a word, first to last
_VERSIONS = {7: "v1", 8: "v2"}  # by what is stored for the middle level


def convert_gptq(path: Path, spec: ModelSpec, tokenizer: bytes | None = None) -> ModelWeights:
    """Raises ModelFileError, or OSError if the file cannot be opened."""
    _, tensors = read_container(path, _DTYPES)
    try:
        return _Conversion(spec, tensors).model(path, tokenizer)
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from None


class _Conversion:
    """One file on its way; remembers what holds for the file as a whole."""

    def __init__(self, spec: ModelSpec, tensors: Tensors) -> None:
        self._spec, self._tensors = spec, tensors
        self._version = ""
        self._num_rounded = 0

    def model(self, path: Path, tokenizer: bytes | None) -> ModelWeights:
        forms = expected_tensors(self._spec, quantised_head="head.qweight" in self._tensors)
        bases = [name.removesuffix(".qweight") for name in forms if name.endswith(".qweight")]
        floats = [name for name in forms if name.endswith(".weight")]
        self._check_names(bases, floats)
        converted: dict[str, Array] = {name: self._fp16(name) for name in floats}
        for base in bases:
            shape = forms[f"{base}.qweight"][1]
            converted |= linear_tensors(base, self._linear(base, shape[0], shape[1] * 2))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        layout = f"GPTQ {self._version}" if bases else "floats"
        conversion = {"file": path.name, "sha256": digest, "layout": layout, "rounded_values": self._num_rounded}
        return ModelWeights.from_tensors(
            self._spec, converted, tokenizer=tokenizer, provenance={"conversion": conversion}
        )

    def _check_names(self, bases: list[str], floats: list[str]) -> None:
        needed = {f"{base}.{part}" for base in bases for part in ("qweight", "qzeros", "scales")} | set(floats)
        known = needed | {f"{base}.g_idx" for base in bases}
        if missing := sorted(needed - self._tensors.keys()):
            way_out = ""
            if missing[0].removesuffix("qweight") + "weight" in self._tensors:
                way_out = "; it is there as floats: convert with quant null in the config, then `tinyloop quantize`"
            raise ModelFileError(
                f"{len(missing)} tensors that the config asks for are missing, first {missing[0]}{way_out}"
            )
        if unexpected := sorted(self._tensors.keys() - known):
            way_out = ""
            if unexpected[0].endswith((".qweight", ".qzeros", ".scales", ".g_idx")) and self._spec.quant is None:
                way_out = "; the config's quant is null, INT4 tensors need {bits, group_size}"
            raise ModelFileError(
                f"{len(unexpected)} tensors are not of this config, first {unexpected[0][:80]!r}{way_out}"
            )

    def _linear(self, base: str, num_out: int, num_in: int) -> Int4Linear:
        assert self._spec.quant is not None, "only then are there quantised linears"
        group = self._spec.quant.group_size
        words = self._words(f"{base}.qweight", num_in, num_out)
        self._check_zeros(base, num_in // group, num_out)
        scales = self._scales(base, num_in, num_out, group)  # (in/group, out)
        nibbles = (words[:, None, :] >> _SHIFTS[:, None] & 15).astype(np.uint8)  # (in/8, 8, out)
        qweight = pack_nibbles(np.ascontiguousarray(nibbles.reshape(num_in, num_out).T))
        return Int4Linear(qweight, np.ascontiguousarray(scales[self._groups(base, num_in, group)].T))

    def _words(self, name: str, num_in: int, num_out: int) -> NDArray[np.uint32]:
        given = self._tensors[name]
        if given.shape != (num_in // 8, num_out) and given.ndim == 2 and given.shape[1] == num_out:
            bits = given.shape[0] * 32 / num_in
            if bits in (2, 3, 8):
                raise ModelFileError(f"tensor {name} is {_form(given)}, which is {bits:g} bits, expected 4 bits")
        return self._int32(name, (num_in // 8, num_out)).view(np.uint32)

    def _int32(self, name: str, shape: tuple[int, ...]) -> Array:
        given = self._tensors[name]
        if given.dtype != np.int32 or given.shape != shape:
            raise ModelFileError(f"tensor {name} is {_form(given)}, expected int32 {list(shape)}")
        return given

    def _check_zeros(self, base: str, num_groups: int, num_out: int) -> None:
        """Every zero is the middle level, in the one way of storing it that the whole file has."""
        name = f"{base}.qzeros"
        words = self._int32(name, (num_groups, -(-num_out // 8))).view(np.uint32)
        stored = np.unique((words[:, :, None] >> _SHIFTS & 15).reshape(num_groups, -1)[:, :num_out]).tolist()
        if len(stored) > 1 or stored[0] not in _VERSIONS:
            raise ModelFileError(
                f"tensor {name} holds the zeros {str(stored)[:60]}, expected 7 (v1) or 8 (v2) everywhere: "
                "it is asymmetric; quantise with sym=True"
            )
        version = _VERSIONS[stored[0]]
        if self._version not in ("", version):
            raise ModelFileError(
                f"tensor {name} is symmetric by {version}, others by {self._version}: one of them is asymmetric; "
                "quantise with sym=True"
            )
        self._version = version

    def _scales(self, base: str, num_in: int, num_out: int, group: int) -> NDArray[np.float16]:
        name = f"{base}.scales"
        given = self._tensors[name]
        if given.shape != (num_in // group, num_out):
            message = f"tensor {name} is {_form(given)}, expected float16 {[num_in // group, num_out]}"
            if given.ndim == 2 and given.shape[1] == num_out and num_in % given.shape[0] == 0:
                message += f": its groups are of {num_in // given.shape[0]}, the config's quant.group_size is {group}"
            raise ModelFileError(message)
        if given.dtype != np.float16:
            raise ModelFileError(f"tensor {name} is {_form(given)}, expected float16")
        if not np.isfinite(given).all():
            raise ModelFileError(f"tensor {name} holds NaN or infinity")
        scales: NDArray[np.float16] = given
        return scales

    def _groups(self, base: str, num_in: int, group: int) -> NDArray[np.intp]:
        """(in/group,): which row of the scales belongs to each run of `group` neighbouring inputs."""
        name = f"{base}.g_idx"
        if name not in self._tensors:
            return np.arange(num_in // group)
        runs = self._int32(name, (num_in,)).reshape(-1, group)
        if (runs != runs[:, :1]).any():
            raise ModelFileError(
                f"tensor {name} scatters groups over the inputs, expected {group} neighbours a group; "
                "quantise with desc_act=False, or with static_groups=True"
            )
        rows = runs[:, 0].astype(np.intp)
        if not ((rows >= 0) & (rows < num_in // group)).all():
            raise ModelFileError(f"tensor {name} names groups outside 0 … {num_in // group - 1}")
        return rows

    def _fp16(self, name: str) -> NDArray[np.float16]:
        """A float tensor as fp16; shapes are checked with the whole model."""
        given = self._tensors[name]
        if given.dtype == np.float16:
            return given
        if given.dtype == _BF16:
            wide = (given.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif given.dtype == np.float32:
            wide = given
        else:
            raise ModelFileError(f"tensor {name} is {_form(given)}, expected float16, bfloat16 or float32")
        with np.errstate(over="ignore", under="ignore"):
            narrow = wide.astype(np.float16)
        if (np.isinf(narrow) & np.isfinite(wide)).any():
            largest = float(np.abs(wide[np.isfinite(wide)]).max())
            raise ModelFileError(f"tensor {name} holds {largest:g}, which fp16 cannot hold (largest 65504)")
        self._num_rounded += int((narrow.astype(np.float32) != wide).sum())
        return narrow


def _form(array: Array) -> str:
    return f"{'bfloat16' if array.dtype == _BF16 else array.dtype.name} {list(array.shape)}"

"""Can this machine run this model on a GPU?

In: a spec.  Out: the device, or DeviceUnavailable with the reason as the end of a sentence.
"""

from __future__ import annotations

from pathlib import Path

from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.kernels.availability import open_cupy_device
from tinyloop_service.kernels.decode_attention import MOST_QUERIES_PER_KV
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.sample import MAX_VOCAB
from tinyloop_service.kernels.unavailable import DeviceUnavailable

HEAD_DIMS = (64, 128)
MULTIPLE = 64  # of every linear's inputs, and of a group where that is larger


def open_device(spec: ModelSpec, precompiled: Path | None = None) -> Device:
    """The machine's GPU, where it can run this model; its kernels come from `precompiled` where they are there.

    Raises DeviceUnavailable; before the GPU is touched, if it is for the model.
    """
    check_spec(spec)
    return open_cupy_device(precompiled=precompiled)


def check_spec(spec: ModelSpec) -> None:
    """Raises DeviceUnavailable for a model that the kernels cannot run."""
    if spec.head_dim not in HEAD_DIMS:
        raise DeviceUnavailable(f"the model's head_dim is {spec.head_dim}; the CUDA kernels have 64 and 128")
    queries = spec.n_heads // spec.n_kv_heads
    if queries > MOST_QUERIES_PER_KV:
        raise DeviceUnavailable(
            f"{queries} heads of the model share keys and values; the CUDA kernels have at most {MOST_QUERIES_PER_KV}"
        )
    if spec.vocab_size >= MAX_VOCAB:
        raise DeviceUnavailable(f"the model has {spec.vocab_size} tokens; the CUDA kernels need fewer than {MAX_VOCAB}")
    multiple = max(MULTIPLE, spec.quant.group_size if spec.quant else 0)
    for name, size in (("d_model", spec.d_model), ("d_ff", spec.d_ff), ("n_heads · head_dim", spec.q_dim)):
        if size % multiple:
            raise DeviceUnavailable(f"the model's {name} is {size}; the CUDA kernels need a multiple of {multiple}")

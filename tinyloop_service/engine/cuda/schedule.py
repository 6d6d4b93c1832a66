"""The order of computation of one step, as data: norms, weights, cache layers, for any switch of a spec.

    fold, attention, fold, mlp     once for each cache layer
    fold                           the final one, whose output the head reads

A *fold* is all that stands between two linears (`kernels/norm.py`), in this order: the sum of the last linear joins the
residual (with placement "sandwich" through a norm of its own), the loop norm, the injected stream, and the norm whose
output the next linear reads.  Decoding and prompts walk the same schedule.

In: a spec and the norms' gains on the device.  Out: `Schedule`s, one per number of loops.  Refuses to know about rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinyloop_service.engine.cuda.weights import DeviceBlock, DeviceModel
from tinyloop_service.kernels.device import Array
from tinyloop_service.kernels.norm import InjectMode


@dataclass(frozen=True, slots=True)
class Step:
    """What a fold does.  Gains are fp16 [d_model]; None: that norm is not there."""

    post: Array | None  # of what joins the residual
    loop: Array | None  # of the residual itself
    inject: InjectMode  # "store": the pre blocks' output, which joins the input of this loop and later ones
    gain: Array  # of the output


@dataclass(frozen=True, slots=True)
class Layer:
    """One application of a block."""

    index: int  # its cache layer
    block: DeviceBlock
    before_attention: Step
    before_mlp: Step


@dataclass(frozen=True, slots=True)
class Schedule:
    layers: tuple[Layer, ...]
    final: Step


def schedule_of(model: DeviceModel, loops: int) -> Schedule:
    layers = tuple(_layers(model, loops))
    last_loop_norm_is_final = model.spec.loop_norm and not model.spec.post_blocks
    loop = None if last_loop_norm_is_final else _loop_norm(model, layers[-1].index, loops)
    return Schedule(layers, Step(layers[-1].block.mlp_post_norm, loop, "none", model.norm))


def _layers(model: DeviceModel, loops: int) -> Iterator[Layer]:
    spec, before = model.spec, None
    for index, kind, inner in spec.schedule(loops):
        block = model.blocks[kind, inner]
        starts_loop = kind == "loop" and inner == 0 and spec.inject == "add"
        inject: InjectMode = "none"
        if starts_loop:
            inject = "store" if index == spec.pre_blocks else "add"
        loop = _loop_norm(model, index - 1, loops)
        enters = Step(before.mlp_post_norm if before else None, loop, inject, block.attn_norm)
        yield Layer(index, block, enters, Step(block.attn_post_norm, None, "none", block.mlp_norm))
        before = block


def _loop_norm(model: DeviceModel, layer: int, loops: int) -> Array | None:
    """The norm of the residual behind cache layer `layer`, if that ends a loop."""
    spec = model.spec
    done = layer + 1 - spec.pre_blocks
    ends_loop = 0 < done <= loops * spec.loop_blocks and done % spec.loop_blocks == 0
    return model.norm if spec.loop_norm and ends_loop else None

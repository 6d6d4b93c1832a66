"""The switches of a model spec: what a loop model can do differently, each of them alone and all of them together."""

from __future__ import annotations

from dataclasses import replace

from tinyloop_service.engine.spec import ModelSpec


def switches(base: ModelSpec) -> dict[str, ModelSpec]:
    """By name, specs that are `base` but for one switch; "everything" has those that go together, and one K/V head.

    base: an even number of heads, each with a K/V head of its own, and every switch off.
    """
    return {
        "gqa": replace(base, n_kv_heads=base.n_heads // 2),
        "interleaved": replace(base, rope_pairing="interleaved"),
        "sandwich": replace(base, norm_placement="sandwich"),
        "loop_norm": replace(base, loop_norm=True),
        "loop_norm+post": replace(base, loop_norm=True, post_blocks=1),
        "inject": replace(base, inject="add"),
        "group of 2": replace(base, loop_blocks=2, post_blocks=2, pre_blocks=1),
        "no pre": replace(base, pre_blocks=0, inject="add"),
        "tied": replace(base, tie_embeddings=True),
        "everything": replace(
            base,
            n_kv_heads=1,
            rope_pairing="interleaved",
            norm_placement="sandwich",
            loop_norm=True,
            inject="add",
            loop_blocks=2,
            post_blocks=1,
        ),
    }

"""Small random models, one a switch of the spec, that take text: one token a byte, ids 256 and 257 for BOS and EOS."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from byte_tokenizer import byte_tokenizer
from switches import switches

from tinyloop_service.engine.spec import SIZES, Quant
from tinyloop_service.engine.weights import ModelWeights, random_model
from tinyloop_service.evaluate import NamedModel
from tinyloop_service.evaluate.run import Report, evaluate
from tinyloop_service.evaluate.windows import NamedText

BASE = replace(
    SIZES["tiny"],
    vocab_size=258,
    d_model=64,
    n_heads=4,
    n_kv_heads=4,
    head_dim=16,
    d_ff=96,
    max_loops=5,
    max_seq_len=64,
    bos_token_id=256,
    eos_token_ids=(257,),
    quant=Quant(4, 32),
)
SPECS = {"pre": BASE, "fp16": replace(BASE, quant=None), **switches(BASE)}
TEXT = NamedText(
    "psalm", "The LORD is my shepherd; I shall not want. — “He maketh me to lie down in green pastures.” " * 2
)


@cache
def model(name: str, seed: int = 1) -> ModelWeights:
    return random_model(SPECS[name], seed, tokenizer=byte_tokenizer())


@cache
def small_report() -> Report:
    """An fp16 model, and an INT4 one beside it."""
    return evaluate([NamedModel("fp16.tinyloop", model("fp16")), NamedModel("int4.tinyloop", model("pre"))], [TEXT])

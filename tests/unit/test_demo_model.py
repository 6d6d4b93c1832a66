"""The shipped model, the text it comes from, and (where torch is installed) the training network against the reference.

The packages with the text need not be there: readers are tested on small inputs of the same formats.
"""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyloop_service import demo
from tinyloop_service.demo import MODEL_PATH, PREFIX_TEXT, SUFFIXES
from tinyloop_service.demo.corpus import (
    HELD_OUT_BOOKS,
    Document,
    build_corpus,
    devil_documents,
    jargon_documents,
    kjv_documents,
    osis_to_text,
    unpack_lzw,
    web_documents,
)
from tinyloop_service.demo.data import (
    BOS_ID,
    EOS_ID,
    batches,
    encode_stream,
    group_entries,
    held_out_windows,
    train_tokenizer,
)
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import ModelSpec, Quant
from tinyloop_service.engine.tensors import Int4Linear, ModelWeights
from tinyloop_service.engine.weights import quantize_rtn, read_model
from tinyloop_service.text import Tokenizer


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return read_model(MODEL_PATH)


@pytest.fixture(scope="module")
def tokenizer(weights: ModelWeights) -> Tokenizer:
    assert weights.tokenizer is not None
    return Tokenizer(weights.tokenizer, weights.spec.bos_token_id)


# --- the shipped file ---


def test_the_file_is_small_whole_and_what_the_design_asks_for(weights: ModelWeights) -> None:
    assert MODEL_PATH.stat().st_size <= 8_000_000
    spec = weights.spec
    assert (spec.pre_blocks, spec.loop_blocks, spec.post_blocks, spec.default_loops) == (2, 1, 0, 8)
    assert spec.max_seq_len >= 1536
    assert 2048 <= spec.vocab_size <= 4096
    assert spec.quant == Quant(4, 128)
    assert isinstance(weights.head, Int4Linear)
    assert weights.provenance["train_config"]["seed"] == 1


def test_text_survives_the_tokenizer(tokenizer: Tokenizer, weights: ModelWeights) -> None:
    for text in ("In the beginning", " two  spaces\n\n", "naïve — “quoted” 東京 🙂\x00", PREFIX_TEXT):
        ids = tokenizer.encode(text, bos=True)
        assert ids[0] == weights.spec.bos_token_id
        assert b"".join(tokenizer.token_bytes(i) for i in ids[1:]).decode() == text


def test_the_prefix_is_as_long_as_is_said_and_every_suffix_fits(tokenizer: Tokenizer, weights: ModelWeights) -> None:
    length = len(tokenizer.encode(PREFIX_TEXT, bos=True))
    assert f"a passage of {length} tokens" in (demo.__doc__ or "")
    assert f"({length} tokens)" in MODEL_PATH.with_name("MODEL_CARD.md").read_text(encoding="utf-8")
    assert len(set(SUFFIXES)) == 10
    longest = max(len(tokenizer.encode(suffix, bos=False)) for suffix in SUFFIXES)
    assert length + longest + 256 <= weights.spec.max_seq_len


@pytest.mark.parametrize(("loops", "most"), [(1, 1.25), (8, 1.22)])
def test_it_predicts_text_it_was_not_trained_on(
    weights: ModelWeights, tokenizer: Tokenizer, loops: int, most: float
) -> None:
    """PREFIX_TEXT is from a held-out book.  Measured: 1.18 at one loop and at eight; gzip needs 4.2, and weights
    that are not what was trained, over 6."""
    text = PREFIX_TEXT[:900]
    assert bits_per_byte(weights, tokenizer, text, loops) < most


def bits_per_byte(weights: ModelWeights, tokenizer: Tokenizer, text: str, loops: int) -> float:
    ids = tokenizer.encode(text, bos=True)
    reference = Reference(weights)
    logits = reference.forward(ids[:-1], reference.new_cache(loops)).astype(np.float64)  # (tokens, vocab)
    logits -= logits.max(axis=1, keepdims=True)
    of_next = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1))
    return float(-of_next.sum() / math.log(2) / len(text.encode()))


# --- the readers ---


def lzw_pack(codes: list[int], bits: int = 9) -> bytes:
    """A compress stream of 9-bit codes; every group of eight codes fills `bits` bytes."""
    value = sum(code << bits * i for i, code in enumerate(codes))
    return b"\x1f\x9d\x90" + value.to_bytes((len(codes) * bits + 7) // 8, "little")


def test_lzw_repeats_the_entry_being_made_and_starts_anew_after_a_clear() -> None:
    # 257 is "ab"; 258 is used in the same step that makes it: the previous entry and its first byte.
    assert unpack_lzw(lzw_pack([97, 98, 257, 259, 99])) == b"abababac"
    # A clear in the middle of a group of eight: the rest of the group is padding, then 9-bit codes again.
    codes = [97, 98, 256, 0, 0, 0, 0, 0, 120, 121, 257]
    assert unpack_lzw(lzw_pack(codes)) == b"abxyxy"


def test_lzw_refuses_other_streams() -> None:
    with pytest.raises(ValueError, match="compress stream"):
        unpack_lzw(b"\x1f\x8b\x08")


def test_kjv_needs_its_magic() -> None:
    with pytest.raises(ValueError, match="EC02"):
        next(kjv_documents(b"\0" * 100))


def test_osis_becomes_lines_without_notes_and_headings() -> None:
    osis = (
        '<title level="1" type="main">Matthew</title> <div sID="a" type="x-p"/><w lemma="strong:G1">Jesus</w> wept,'
        '<note placement="foot"><reference type="annotateRef">1:1 </reference>a note</note><w lemma="x">so</w> he did .'
        '<title canonical="true" type="psalm">A Psalm.</title><l level="1" sID="b"/>“One,<l eID="b" level="1"/>'
        '<l level="2" sID="c"/>two’s.”'
    )
    assert osis_to_text(osis) == 'Jesus wept, so he did.\nA Psalm.\n"One,\ntwo\'s."'


def test_a_sword_module_becomes_books_and_chapters(tmp_path: Path) -> None:
    book = (
        '<div canonical="true" osisID="{0}" sID="g{0}" type="book"/><chapter n="1" osisID="{0}.1" sID="{0}.1"/>First.'
        '<chapter eID="{0}.1"/><chapter n="2" osisID="{0}.2" sID="{0}.2"/>Second.<chapter eID="{0}.2"/>'
        '<div eID="g{0}" osisID="{0}" type="book"/>'
    )
    for testament, name in (("ot", "Ruth"), ("nt", "1John")):
        text = book.format(name).encode()
        blocks = [zlib.compress(text[:70]), zlib.compress(text[70:])]  # a book may span blocks
        index = struct.pack("<6I", 0, len(blocks[0]), 70, len(blocks[0]), len(blocks[1]), len(text) - 70)
        (tmp_path / f"{testament}.bzs").write_bytes(index)
        (tmp_path / f"{testament}.bzz").write_bytes(b"".join(blocks))
    documents = list(web_documents(tmp_path))
    assert [d.title for d in documents] == ["Ruth", "1 John"]
    assert documents[0].text == "Ruth\n\nChapter 1\nFirst.\n\nChapter 2\nSecond."


def test_jargon_entries_lose_wrapping_pronunciation_and_braces() -> None:
    text = (
        "Chapter 1. Hacker Slang and Hacker Culture\n\n   An\n   essay.\n\n"
        "Part II. The Jargon Lexicon\n\n   F\n\n   foo\n\n"
        "   :foo: /foo/, interj.\n\n   Term of\n   disgust. See {bar}.\n\n   ┌──┐\n   │x │\n\n"
        "   G\n\n   gag\n\n   :gag: vi.\n\n"
        "   To fail.\n\n   H\n\nPart III. Appendices\n\n   The end.\n"
    )
    documents = list(jargon_documents(text))
    assert [d.text for d in documents[:2]] == ["foo, interj.\nTerm of disgust. See bar.", "gag, vi.\nTo fail."]
    assert documents[2].text == "Hacker Slang and Hacker Culture\nAn essay."


def test_devil_entries_keep_verse_as_lines() -> None:
    text = (
        "preface\n\nABASEMENT, n.  A decent and\ncustomary attitude.\n\nAPHORISM, n.  Predigested wisdom.\n\n"
        "    The flabby wine-skin of his brain\n    Yields to some strain.\n" + " " * 60 + "Jodo Rem\n"
    )
    first, second = devil_documents(text)
    assert first == Document("devil", "ABASEMENT", "ABASEMENT, n. A decent and customary attitude.")
    assert second.text.splitlines()[1:] == [
        "The flabby wine-skin of his brain",
        "Yields to some strain.",
        "—Jodo Rem",
    ]


def test_missing_packages_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="apt install bible-kjv-text sword-text-web"):
        build_corpus(tmp_path)


@pytest.mark.skipif(not Path("/usr/share/dictd/devil.dict.dz").exists(), reason="the Debian packages are not installed")
def test_the_real_packages_give_the_held_out_books_of_both_translations() -> None:
    corpus = build_corpus()
    assert sorted((d.source, d.title) for d in corpus.held_out) == sorted(
        (source, book) for source in ("kjv", "web") for book in HELD_OUT_BOOKS
    )
    assert not {d.title for d in corpus.train if d.source in ("kjv", "web")} & set(HELD_OUT_BOOKS)
    assert any(d.text.startswith(PREFIX_TEXT) for d in corpus.held_out)
    genesis = next(d for d in corpus.train if (d.source, d.title) == ("kjv", "Genesis"))
    assert genesis.text.startswith("GENESIS\n\nChapter 1\nIn the beginning God created the heaven and the earth.\n")
    assert not any("<" in d.text for d in corpus.train if d.source == "web")
    assert 10_000_000 < sum(len(d.text.encode()) for d in corpus.train) < 12_000_000


# --- windows ---


def test_windows_begin_with_bos_and_a_line() -> None:
    entries = [Document("devil", f"W{i}", f"W{i}, n. A word.\nIts verse number {i}.") for i in range(60)]
    tokenizer = train_tokenizer(entries, 300)
    texts = group_entries(entries, seed=1)
    assert 10 < len(texts) < 60
    assert "\n\n".join(texts).count("Its verse") == 60
    stream = encode_stream(tokenizer, texts)
    assert (stream.ids == BOS_ID).sum() == (stream.ids == EOS_ID).sum() == len(texts)
    lines = {tokenizer.decode(stream.ids[s : s + 1].tolist())[:1] for s in stream.starts if s < len(stream.ids)}
    assert lines <= {"W", "I", "\n", ""}
    batch = next(batches([stream], 32, 4, np.random.default_rng(0)))
    assert batch.shape == (4, 33)
    assert (batch[:, 0] == BOS_ID).all()


def test_held_out_windows_predict_every_token_once() -> None:
    tokenizer = train_tokenizer([Document("kjv", "x", "and he said unto them " * 20)], 280)
    text = "and he said unto them " * 9
    windows = held_out_windows(tokenizer, text, 7)
    assert all(window[0] == BOS_ID and len(window) <= 8 for window in windows)
    assert tokenizer.decode([i for window in windows for i in window[1:]]) == text


# --- the training network ---


def network_from_weights(torch: Any, weights: ModelWeights) -> Any:
    """The torch network with the file's values, INT4 ones multiplied out."""
    from tinyloop_service.demo.network import LINEARS, NORMS, Network

    network = Network(weights.spec)
    with torch.no_grad():
        network.embed.copy_(torch.tensor(weights.embed))
        network.norm.copy_(torch.tensor(weights.norm))
        # A tied file may hold a quantised head, which no longer equals the embedding.
        network.head = torch.nn.Parameter(torch.tensor(weights.head.dequantize()))
        for parameters, block in zip([*network.pre, *network.loop], [*weights.pre, *weights.loop], strict=True):
            for name in LINEARS:
                getattr(parameters, name).copy_(torch.tensor(getattr(block, name).dequantize()))
            for name in NORMS:
                if getattr(block, name) is not None:
                    getattr(parameters, name).copy_(torch.tensor(getattr(block, name)))
    return network


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
@pytest.mark.parametrize(("inject", "loop_norm"), [("none", False), ("add", False), ("add", True)])
def test_the_torch_network_computes_what_the_reference_does(placement: str, inject: str, loop_norm: bool) -> None:
    torch = pytest.importorskip("torch")
    from tinyloop_service.demo.network import Recipe
    from tinyloop_service.engine.weights import random_model

    spec = ModelSpec(
        vocab_size=96, d_model=128, n_heads=2, n_kv_heads=2, head_dim=64, d_ff=128, pre_blocks=2, loop_blocks=1,
        post_blocks=0, default_loops=3, max_loops=4, max_seq_len=64, norm_placement=placement,  # type: ignore[arg-type]
        inject=inject, loop_norm=loop_norm, tie_embeddings=True, quant=Quant(),  # type: ignore[arg-type]
    )  # fmt: skip
    model = random_model(spec, seed=3)
    ids = list(range(5, 42))
    network, reference = network_from_weights(torch, model), Reference(model)
    states = network.states(torch.tensor([ids]), (1, 3), Recipe())
    for loops, state in states.items():
        expected = reference.forward(ids, reference.new_cache(loops))
        given = (state[0] @ network.head.T).detach().numpy()
        # float32 sums in two orders, a few hundred terms each: far below 1e-3 of logits of order 1
        np.testing.assert_allclose(given, expected, atol=2e-3)


def test_training_rounds_as_the_file_does() -> None:
    torch = pytest.importorskip("torch")
    from tinyloop_service.demo.network import fake_int4

    weight = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    given = torch.tensor(weight, requires_grad=True)
    rounded = fake_int4(given, 128)
    np.testing.assert_allclose(rounded.detach().numpy(), quantize_rtn(weight, 128).dequantize(), atol=1e-6)
    rounded.sum().backward()
    assert (given.grad == 1).all()

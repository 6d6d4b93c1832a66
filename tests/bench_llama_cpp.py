"""What llama.cpp takes for what `tinyloop bench` measures: a model with as many layers as the loops unroll to.

    build/llama_cpp/bin/python tests/bench_llama_cpp.py SPEC.json [--prefix 1024] [--rows 1 10 50] [--new-tokens 32]
        [--rounds 1] [--threads 2] [--folder build]            `make bench` does it, beside TinyLoop

It runs in an environment of its own: NumPy, gguf and llama-cpp-python, nothing of TinyLoop.  SPEC.json is a model
file's config, from which it writes a GGUF of the architecture "llama" once: every application of a block is a layer of
its own, all matrices Q4_0 with random nibbles, embedding and head included.  JSON of medians in milliseconds on stdout:

prefill        the whole prompt, its last logits; in batches of 2048, micro-batches of 512
decode step    one token for each of N sequences that share the prompt's cells (seq_cp), as one batch
SHARED(N)      a prefill, then new_tokens − 1 such steps (the prefill gives the first token)
NO_CACHE(1)    a prefill, then new_tokens − 1 steps of one sequence
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import llama_cpp
import numpy as np

Q4_0 = gguf.GGMLQuantizationType.Q4_0
GROUP, GROUP_BYTES = gguf.GGML_QUANT_SIZES[Q4_0]  # weights that share an fp16 scale, and their bytes with it
BATCH, MICRO_BATCH = 2048, 512
CHECKED_ROWS = 4


def num_layers(spec: dict[str, Any]) -> int:
    return spec["pre_blocks"] + spec["default_loops"] * spec["loop_blocks"] + spec["post_blocks"]


def shapes(spec: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of every matrix."""
    width, inner = spec["d_model"], spec["d_ff"]
    queries, keys = spec["n_heads"] * spec["head_dim"], spec["n_kv_heads"] * spec["head_dim"]
    found = {"token_embd": (spec["vocab_size"], width), "output": (spec["vocab_size"], width)}
    for layer in range(num_layers(spec)):
        found |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_q": (queries, width),
                "attn_k": (keys, width),
                "attn_v": (keys, width),
                "attn_output": (width, queries),
                "ffn_gate": (inner, width),
                "ffn_up": (inner, width),
                "ffn_down": (width, inner),
            }.items()
        }
    return found


def random_q4(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """uint8 [outputs, bytes of a row]: random nibbles, one scale that keeps activations about as large as they are."""
    blocks = rng.integers(0, 256, (outputs, inputs // GROUP, GROUP_BYTES), dtype=np.uint8)
    scale = np.array([0.2 / inputs**0.5], np.float16)
    blocks[..., :2] = scale.view(np.uint8)
    return blocks.reshape(outputs, -1)


def write_model(path: Path, spec: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(spec["max_seq_len"])
    writer.add_embedding_length(spec["d_model"])
    writer.add_block_count(num_layers(spec))
    writer.add_feed_forward_length(spec["d_ff"])
    writer.add_head_count(spec["n_heads"])
    writer.add_head_count_kv(spec["n_kv_heads"])
    writer.add_key_length(spec["head_dim"])
    writer.add_value_length(spec["head_dim"])
    writer.add_rope_dimension_count(spec["head_dim"])
    writer.add_rope_freq_base(spec["rope_theta"])
    writer.add_layer_norm_rms_eps(spec["norm_eps"])
    writer.add_vocab_size(spec["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    rng = np.random.default_rng(0)
    norms = [f"blk.{i}.{name}_norm" for i in range(num_layers(spec)) for name in ("attn", "ffn")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", np.ones(spec["d_model"], np.float32))
    for name, (outputs, inputs) in shapes(spec).items():
        writer.add_tensor(f"{name}.weight", random_q4(rng, outputs, inputs), raw_dtype=Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peer:
    """One model and one context; sequence 0 holds the prompt, sequences 1 … N go on from it."""

    def __init__(self, path: Path, *, prefix_len: int, rows: int, new_tokens: int, threads: int) -> None:
        self._keep_quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._keep_quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = prefix_len + (rows + 1) * (new_tokens + 1)
        settings.n_batch, settings.n_ubatch = BATCH, MICRO_BATCH
        settings.n_seq_max = rows + 1
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True  # else sequences could not share cells
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp made no context of {settings.n_ctx} cells for {rows + 1} sequences")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._prefix_len = prefix_len

    def prefill(self, tokens: Sequence[int]) -> float:
        """Milliseconds; what was there before is forgotten."""
        llama_cpp.llama_memory_clear(self._memory, True)
        elapsed = 0.0
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            ends = start + len(part) == len(tokens)
            entries = [(token, start + i, 0, ends and i == len(part) - 1) for i, token in enumerate(part)]
            elapsed += self._decode(entries)
        return elapsed

    def share(self, rows: int) -> None:
        for row in range(1, rows + 1):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, row, -1, -1)

    def forget(self, rows: int) -> None:
        for row in range(1, rows + 1):
            llama_cpp.llama_memory_seq_rm(self._memory, row, -1, -1)

    def step(self, tokens: Sequence[int], index: int) -> float:
        """The row's next tokens at prefix + index; milliseconds."""
        return self._decode([(token, self._prefix_len + index, 1 + i, True) for i, token in enumerate(tokens)])

    def logits(self, row: int) -> np.ndarray:
        """A copy, of the last step."""
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (size,)).copy()

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> float:
        """entries: token, position, sequence, whether its logits are wanted."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(entries)
        began = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        elapsed = (time.perf_counter() - began) * 1e3
        llama_cpp.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode of {len(entries)} tokens gave {status}")
        return elapsed


def check_sharing(peer: Peer, tokens: Sequence[int]) -> None:
    """A row among others sees what a row alone sees, or there is no sense in measuring it.  It may round otherwise."""

    def last_logits(rows: int) -> np.ndarray:
        peer.prefill(tokens)
        peer.share(rows)
        peer.step([7] * rows, 0)
        return peer.logits(rows - 1)

    alone, among_others = last_logits(1), last_logits(CHECKED_ROWS)
    if not np.abs(alone - among_others).max() < 0.2 * alone.std():
        raise SystemExit("llama.cpp: a row among others gives other logits than alone; its figures would mean nothing")


def generate(peer: Peer, tokens: Sequence[int], rows: int, new_tokens: int) -> tuple[float, list[float]]:
    """Milliseconds of a prefill and of every step behind it."""
    prefill = peer.prefill(tokens)
    peer.share(rows)
    steps = [peer.step([7 + row for row in range(rows)], index) for index in range(new_tokens - 1)]
    peer.forget(rows)
    return prefill, steps


def measure(peer: Peer, spec: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    tokens = [(7919 * i + 13) % spec["vocab_size"] for i in range(1, args.prefix + 1)]
    check_sharing(peer, tokens)  # also warms up
    prefills: list[float] = []
    steps: dict[int, list[float]] = {rows: [] for rows in (1, *args.rows)}
    totals: dict[int, list[float]] = {rows: [] for rows in (1, *args.rows)}
    for _ in range(args.rounds):
        for rows in steps:
            prefill, taken = generate(peer, tokens, rows, args.new_tokens)
            prefills.append(prefill)
            steps[rows] += taken
            totals[rows].append(prefill + sum(taken))
    shared = {str(rows): median(totals[rows]) for rows in args.rows}
    return {
        "engine": f"llama-cpp-python {llama_cpp.__version__}, Q4_0",
        "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "threads": args.threads,
        "prefix_len": args.prefix,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "prefill_ms": median(prefills),
        "decode_step_ms": {str(rows): median(times) for rows, times in steps.items()},
        "shared_ms": shared,
        "no_cache_ms": {str(rows): rows * median(totals[1]) for rows in args.rows},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where the GGUF is kept")
    args = parser.parse_args()
    text = args.spec.read_bytes()
    spec = json.loads(text)
    path = args.folder / f"{args.spec.stem}-{zlib.crc32(text):08x}.gguf"
    if not path.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        write_model(path, spec)
    rows = max(*args.rows, CHECKED_ROWS)
    peer = Peer(path, prefix_len=args.prefix, rows=rows, new_tokens=args.new_tokens, threads=args.threads)
    print(json.dumps(measure(peer, spec, args)))


if __name__ == "__main__":
    main()

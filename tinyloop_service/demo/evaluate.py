"""Bits per byte on the held-out books, at several depths.

    python -m tinyloop_service.demo.evaluate [FILE ...] [--root /] [--depths 1 2 4 8 12] [--max-bytes N]

In: model files, and the Debian packages of `corpus.py` below --root.  Out: one table, a row per file and
translation.  A book is cut into pieces of 1535 tokens, BOS before each; every token is predicted once; bits are
summed and divided by the text's UTF-8 bytes.  Needs torch (the extra `train`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.demo.corpus import Document, build_corpus
from tinyloop_service.demo.data import held_out_windows
from tinyloop_service.demo.network import LINEARS, NORMS, BlockParameters, Network, Recipe
from tinyloop_service.engine.weights import BlockWeights, ModelWeights, read_model

WINDOW = 1535
DEPTHS = (1, 2, 4, 8, 12)


def network_from_weights(weights: ModelWeights) -> Network:
    """The torch network with the file's values, INT4 ones multiplied out."""
    network = Network(weights.spec)
    with torch.no_grad():
        network.embed.copy_(torch.tensor(weights.embed))
        network.norm.copy_(torch.tensor(weights.norm))
        # A tied file may hold a quantised head, which no longer equals the embedding.
        network.head = torch.nn.Parameter(torch.tensor(weights.head.dequantize()))
        for parameters, block in zip([*network.pre, *network.loop], [*weights.pre, *weights.loop], strict=True):
            assert isinstance(parameters, BlockParameters)
            _load_block(parameters, block)
    return network


def _load_block(parameters: BlockParameters, block: BlockWeights) -> None:
    for name in LINEARS:
        getattr(parameters, name).copy_(torch.tensor(getattr(block, name).dequantize()))
    for name in NORMS:
        if getattr(block, name) is not None:
            getattr(parameters, name).copy_(torch.tensor(getattr(block, name)))


@torch.no_grad()
def bits_per_byte(
    network: Network, tokenizer: Tokenizer, documents: Sequence[Document], depths: Sequence[int], recipe: Recipe
) -> dict[int, float]:
    """Depth → bits per byte over all `documents` together."""
    device = network.embed.device
    nats = dict.fromkeys(depths, 0.0)
    for document in documents:
        for window in held_out_windows(tokenizer, document.text, WINDOW):
            ids = torch.tensor(window, dtype=torch.long, device=device)[None]
            for depth, state in network.states(ids[:, :-1], depths, recipe).items():
                nats[depth] += network.token_losses(state, ids[:, 1:], recipe).sum().item()
    num_bytes = sum(len(document.text.encode()) for document in documents)
    return {depth: total / math.log(2) / num_bytes for depth, total in nats.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[MODEL_PATH])
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the Debian packages are installed")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--max-bytes", type=int, default=None, help="only so much of each book (a quick look)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    held_out = build_corpus(options.root).held_out
    print("file".ljust(24), "text", *(f"L={depth}".rjust(7) for depth in options.depths))
    for path in options.files:
        weights = read_model(path)
        assert weights.tokenizer is not None, "the demo model carries its tokenizer"
        tokenizer = Tokenizer.from_str(weights.tokenizer.decode())
        network = network_from_weights(weights).to(options.device)
        for source in ("kjv", "web"):
            documents = [
                Document(d.source, d.title, d.text[: options.max_bytes]) for d in held_out if d.source == source
            ]
            found = bits_per_byte(network, tokenizer, documents, options.depths, Recipe())
            print(path.name.ljust(24), source.ljust(4), *(f"{found[d]:7.3f}" for d in options.depths), flush=True)


if __name__ == "__main__":
    main()

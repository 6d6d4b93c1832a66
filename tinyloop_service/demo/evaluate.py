"""The quality report of `tinyloop evaluate` on the held-out books, one for each translation.

    python -m tinyloop_service.demo.evaluate [FILE ...] [--root /] [--depths 1 2 4 8 12] [--max-bytes N]

In: model files, and the Debian packages of `corpus.py` below --root.  Out: two tables of bits per byte and of what
differs from the first file.  Every book is a text of its own, cut into windows of 1535 tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.demo.corpus import build_corpus
from tinyloop_service.engine.weights import read_model
from tinyloop_service.evaluate import NamedModel, NamedText, Options, evaluate
from tinyloop_service.evaluate.report import render

DEPTHS = (1, 2, 4, 8, 12)
TRANSLATIONS = {"kjv": "King James Version", "web": "World English Bible"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[MODEL_PATH])
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the Debian packages are installed")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--max-bytes", type=int, default=None, help="only so much of each book (a quick look)")
    options = parser.parse_args()
    held_out = build_corpus(options.root).held_out
    models = [NamedModel(path.name, read_model(path)) for path in options.files]
    console = Console(highlight=False, soft_wrap=True)
    for source, translation in TRANSLATIONS.items():
        books = [NamedText(d.title, d.text[: options.max_bytes]) for d in held_out if d.source == source]
        report = evaluate(models, books, Options(tuple(options.depths), int8_activations=False, cache_modes=()))
        console.print(translation, render(report), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()

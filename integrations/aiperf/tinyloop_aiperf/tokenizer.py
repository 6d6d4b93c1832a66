"""The tokenizer of a model file as a directory that AIPerf takes: `python -m tinyloop_aiperf.tokenizer DIR [MODEL]`.

Without MODEL: the demo model's.  AIPerf makes its prompts with it, and counts tokens of texts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.weights import read_model


def write(directory: Path, model: Path) -> None:
    """tokenizer.json as the model file has it, and the least of a tokenizer_config.json beside it."""
    weights = read_model(model)
    if not weights.tokenizer:
        raise SystemExit(f"{model} has no tokenizer; AIPerf sends texts, so the server's model needs one")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(weights.tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": weights.spec.max_seq_len}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else MODEL_PATH)

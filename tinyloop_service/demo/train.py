"""Train the demo model and write its files: one command, from Debian packages to `demo.tinyloop`.

    python -m tinyloop_service.demo.train --out DIR [--root /] [--steps N] [--seed S] …

Depth is sampled: each step draws the deepest loop from DEEPEST_WEIGHTS and a shallower one below it, runs once to
the deepest, and adds the two losses.  So every depth is trained as an end of its own and the shallow ones
cost little.  From `quantise_from` of the steps on the linears compute with what INT4 rounding makes of them.  The
state that did best on the held-out books in that last part is written, in INT4 (demo.tinyloop) and in fp16
(demo-fp16.tinyloop, for comparison).  Eleven megabytes of text are read many times: dropout, weight decay and
re-cut words (BPE dropout) stand against learning them by heart.

Needs torch (the extra `train`) and, for the full run, a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinyloop_service.demo.corpus import PACKAGES, Corpus, Document, build_corpus
from tinyloop_service.demo.data import (
    BOS_ID,
    EOS_ID,
    Ids,
    batches,
    encode_stream,
    group_entries,
    held_out_windows,
    train_tokenizer,
)
from tinyloop_service.demo.evaluate import DEPTHS
from tinyloop_service.demo.network import Network, Recipe
from tinyloop_service.engine.spec import Inject, ModelSpec, NormPlacement, Quant
from tinyloop_service.engine.weights import ModelWeights, quantize_tensors, write_model
from tinyloop_service.evaluate import WINDOW_TOKENS

MAX_LOOPS = 16
#                            depth: 1  2  3  4  5  6  7  8  9 10 11 12
DEEPEST_WEIGHTS = np.array([0, 1, 1, 2, 2, 2, 2, 6, 2, 2, 2, 2], float)
LINEAR_NAMES = {"q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.o"}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything the result depends on besides the text and the library versions."""

    steps: int = 2700
    batch: int = 8
    seq_len: int = 2048
    seed: int = 1
    vocab_size: int = 4096
    d_model: int = 384
    d_ff: int = 1536
    norm_placement: NormPlacement = "sandwich"
    loop_norm: bool = False
    inject: Inject = "add"
    tie_embeddings: bool = True
    matrix_lr: float = 0.004  # Muon, scaled to AdamW's update size
    vector_lr: float = 0.002  # AdamW: embedding and norms
    weight_decay: float = 0.3
    dropout: float = 0.25
    bpe_dropout: float = 0.1
    bpe_cuts: int = 4  # re-cut versions of the text besides the plain one
    plain_from: float = 0.75  # share of the steps after which words are cut as in use only
    warmup: int = 100
    decay_from: float = 0.4  # share of the steps after which the learning rate falls linearly to nothing
    quantise_from: float = 0.6
    shallow_share: float = 0.4  # of the loss
    evaluate_every: int = 300

    def spec(self) -> ModelSpec:
        heads = self.d_model // 64
        return ModelSpec(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=heads,
            n_kv_heads=heads,
            head_dim=64,
            d_ff=self.d_ff,
            pre_blocks=2,
            loop_blocks=1,
            post_blocks=0,
            default_loops=8,
            max_loops=MAX_LOOPS,
            max_seq_len=self.seq_len,
            norm_placement=self.norm_placement,
            loop_norm=self.loop_norm,
            inject=self.inject,
            tie_embeddings=self.tie_embeddings,
            bos_token_id=BOS_ID,
            eos_token_ids=(EOS_ID,),
            quant=Quant(),
        )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Factor on the peak rates: linear warm-up, level, linear to nothing."""
    rise = (step + 1) / config.warmup
    fall = (1 - step / config.steps) / (1 - config.decay_from)
    return min(1.0, rise, fall)


def draw_depths(rng: np.random.Generator) -> tuple[int, int]:
    """(deepest, shallow) with 1 ≤ shallow < deepest ≤ 12."""
    deepest = int(rng.choice(len(DEEPEST_WEIGHTS), p=DEEPEST_WEIGHTS / DEEPEST_WEIGHTS.sum())) + 1
    return deepest, int(rng.integers(1, deepest))


class Trainer:
    """Network, optimisers and the best state so far; `run` does the rest."""

    def __init__(self, config: TrainConfig, corpus: Corpus, device: str, *, compiled: bool) -> None:
        torch.manual_seed(config.seed)
        self.config, self.corpus, self.device = config, corpus, device
        self.tokenizer = train_tokenizer(corpus.train, config.vocab_size)
        self.network = Network(config.spec(), compiled=compiled).to(device)
        matrices = [p for name, p in self.network.named_parameters() if p.ndim == 2 and "." in name]
        vectors = [p for name, p in self.network.named_parameters() if p.ndim != 2 or "." not in name]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(vectors, lr=config.vector_lr, betas=(0.9, 0.98), weight_decay=0.01),
        ]
        self.peak_rates = [group["lr"] for o in self.optimisers for group in o.param_groups]
        self.dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.best_score = math.inf
        self.best_state: dict[str, Tensor] = {}
        self.best_entry: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []

    def run(self) -> None:
        """Train for config.steps, then put the best quantised state back."""
        config = self.config
        rng = np.random.default_rng(config.seed)
        texts = group_entries(self.corpus.train, config.seed)
        cuts = [0.0] + [config.bpe_dropout] * (config.bpe_cuts if config.bpe_dropout else 0)
        streams = [encode_stream(self.tokenizer, texts, dropout) for dropout in cuts]
        print(
            f"{len(streams[0].ids)} tokens, {sum(p.numel() for p in self.network.parameters())} parameters", flush=True
        )
        started, running = time.monotonic(), 0.0
        recut = batches(streams, config.seq_len, config.batch, rng)
        plain = batches(streams[:1], config.seq_len, config.batch, rng)
        for step in range(config.steps):
            batch = next(recut if step < config.plain_from * config.steps else plain)
            loss = self._step(step, batch, draw_depths(rng))
            running = 0.98 * running + 0.02 * loss if step else float(loss)
            if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
                self._evaluate(step + 1, float(running), time.monotonic() - started)
        self.network.load_state_dict(self.best_state)

    def _step(self, step: int, batch: Ids, depths: tuple[int, int]) -> Tensor:
        config = self.config
        factor = learning_rate(step, config)
        groups = [group for o in self.optimisers for group in o.param_groups]
        for group, peak in zip(groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        recipe = Recipe(self.dtype, self._quantised(step), config.dropout)
        ids = torch.from_numpy(batch).long().to(self.device, non_blocking=True)
        deepest, shallow = depths
        states = self.network.states(ids[:, :-1], depths, recipe)
        deep_loss = self.network.loss(states[deepest], ids[:, 1:], recipe)
        shallow_loss = self.network.loss(states[shallow], ids[:, 1:], recipe)
        share = config.shallow_share
        ((1 - share) * deep_loss + share * shallow_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return deep_loss.detach()

    def _quantised(self, step: int) -> bool:
        return step >= self.config.quantise_from * self.config.steps

    def _evaluate(self, step: int, running: float, seconds: float) -> None:
        recipe = Recipe(self.dtype, self._quantised(step))
        self.network.eval()
        found = bits_per_byte(self.network, self.tokenizer, self.corpus.held_out, DEPTHS, recipe)
        self.network.train()
        score = (found[2] + found[4] + 2 * found[8]) / 4
        entry = {"step": step, "train_nats": running, "held_out_bpb": found, "seconds": round(seconds)}
        self.history.append(entry)
        if self._quantised(step) and score < self.best_score:
            self.best_score, self.best_entry = score, entry
            self.best_state = {name: value.clone() for name, value in self.network.state_dict().items()}
        columns = " ".join(f"L{depth}={value:.4f}" for depth, value in found.items())
        print(f"step {step} {seconds:.0f}s train {running:.4f} held-out bpb {columns}", flush=True)


@torch.no_grad()
def bits_per_byte(
    network: Network, tokenizer: Tokenizer, documents: Sequence[Document], depths: Sequence[int], recipe: Recipe
) -> dict[int, float]:
    """Depth → bits per byte over all `documents` together, as `evaluate` computes them of files."""
    device = network.embed.device
    nats = dict.fromkeys(depths, 0.0)
    for document in documents:
        for window in held_out_windows(tokenizer, document.text, WINDOW_TOKENS):
            ids = torch.tensor(window, dtype=torch.long, device=device)[None]
            for depth, state in network.states(ids[:, :-1], depths, recipe).items():
                nats[depth] += network.token_losses(state, ids[:, 1:], recipe).sum().item()
    num_bytes = sum(len(document.text.encode()) for document in documents)
    return {depth: total / math.log(2) / num_bytes for depth, total in nats.items()}


def float_tensors(network: Network) -> dict[str, np.ndarray[Any, Any]]:
    """The network's weights under their names in the file, float32."""
    tensors = {"embed.weight": network.embed, "norm.weight": network.norm}
    if network.head is not None:
        tensors["head.weight"] = network.head
    for kind, blocks in (("pre", network.pre), ("loop", network.loop)):
        for index, block in enumerate(blocks):
            for name, parameter in block.named_parameters():
                part = name if "norm" in name else LINEAR_NAMES.get(name, f"mlp.{name}")
                tensors[f"{kind}.{index}.{part}.weight"] = parameter
    return {name: value.detach().float().cpu().numpy() for name, value in tensors.items()}


def export(network: Network, tokenizer: Tokenizer, provenance: dict[str, Any], out: Path) -> None:
    """Write demo.tinyloop (INT4, the head too) and demo-fp16.tinyloop."""
    tensors = float_tensors(network)
    token_bytes = tokenizer.to_str().encode()
    spec = network.spec
    assert spec.quant is not None
    to_quantise = tensors if "head.weight" in tensors else tensors | {"head.weight": tensors["embed.weight"]}
    for name, spec_written, values in (
        ("demo.tinyloop", spec, quantize_tensors(to_quantise, spec.quant)),
        ("demo-fp16.tinyloop", replace(spec, quant=None), {n: v.astype(np.float16) for n, v in tensors.items()}),
    ):
        weights = ModelWeights.from_tensors(spec_written, values, tokenizer=token_bytes, provenance=provenance)
        write_model(out / name, weights)
        print(f"{out / name}: {(out / name).stat().st_size} bytes, model_id {weights.model_id}")


def describe(trainer: Trainer) -> dict[str, Any]:
    """What a reader needs to make the model again."""
    cuda = trainer.device.startswith("cuda")
    return {
        "name": "TinyLoop demo",
        "licence": "Apache-2.0; trained on public-domain text",
        "data": [f"Debian package {name}" for name in PACKAGES],
        "command": "python -m tinyloop_service.demo.train --out DIR",
        "train_config": asdict(trainer.config),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "driver": _driver() if cuda else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "kept": trainer.best_entry,
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the two files and history.json")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the Debian packages are installed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do without torch.compile")
    defaults = TrainConfig()
    for field in fields(TrainConfig):
        default = getattr(defaults, field.name)
        kind = (lambda text: text == "true") if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=default, help=f"default {default}")
    options = vars(parser.parse_args())
    config = TrainConfig(**{field.name: options[field.name] for field in fields(TrainConfig)})
    options["out"].mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, build_corpus(options["root"]), options["device"], compiled=not options["eager"])
    trainer.run()
    (options["out"] / "history.json").write_text(json.dumps(trainer.history, indent=1))
    export(trainer.network, trainer.tokenizer, describe(trainer), options["out"])


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Train a reference model (Llama or OPT architecture) on a folder of novels and on recall passages.

    python scripts/train_reference.py cpu  --data ../shared/data/books --out runs/llama --init-from FOLDER
    python scripts/train_reference.py cuda --data ../shared/data/books --out runs/llama-16k
    python scripts/train_reference.py opt  --data ../shared/data/books --out runs/opt --tokenizer FOLDER

Started again with the same arguments it goes on from its last checkpoint, bit for bit (on a CPU).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from reference_data import (
    END_OF_TEXT,
    VALIDATION_BOOK,
    Corpus,
    Encoder,
    Mixture,
    load_corpus,
    make_batch,
    train_tokenizer,
    training_books,
)
from reference_eval import bits_per_byte, nats_by_context, recall, scored_bytes, share_right


@dataclass(frozen=True)
class Shape:
    """The architecture. head_dim is 64 throughout; `kv_heads` is for Llama only (OPT has no grouped queries)."""

    architecture: str = "llama"
    vocab_size: int = 2048
    layers: int = 8
    hidden: int = 256
    mlp: int = 640
    heads: int = 4
    kv_heads: int = 2
    rope_theta: float = 50_000.0
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if self.architecture not in ("llama", "opt"):
            raise ValueError(f"architecture must be 'llama' or 'opt', got {self.architecture!r}")
        if self.hidden != 64 * self.heads:
            raise ValueError(f"head_dim is 64: hidden must be 64 * heads = {64 * self.heads}, got {self.hidden}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    def config(self) -> PreTrainedConfig:
        """The transformers configuration of this shape."""
        common = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if self.architecture == "opt":
            no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
            return OPTConfig(ffn_dim=self.mlp, word_embed_proj_dim=self.hidden, pad_token_id=None, **no_dropout, **common)
        return LlamaConfig(
            intermediate_size=self.mlp,
            num_key_value_heads=self.kv_heads,
            head_dim=64,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            **common,
        )


@dataclass(frozen=True)
class Stage:
    """A part of training: up to `until` (share of all tokens), sequence lengths drawn by `lengths` [(length, share)]."""

    until: float
    lengths: tuple[tuple[int, float], ...]
    mixture: Mixture = field(default_factory=Mixture)

    def __post_init__(self) -> None:
        if not 0 < self.until <= 1:
            raise ValueError(f"a stage ends in (0, 1] of training, got {self.until}")
        if not self.lengths or any(length < 64 or share <= 0 for length, share in self.lengths):
            raise ValueError(f"a stage needs lengths >= 64 with shares > 0, got {self.lengths}")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result. Units: tokens, steps; the learning rate is constant after `warmup_steps` and
    falls as a half cosine over the last `decay_share` of training (1.0: a cosine schedule all the way)."""

    shape: Shape
    stages: tuple[Stage, ...]
    total_tokens: int
    tokens_per_step: int
    peak_lr: float
    warmup_steps: int = 100
    decay_share: float = 1.0
    final_lr_share: float = 0.05
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    evaluate_every: int = 200
    evaluate_lengths: tuple[int, ...] = (256, 1024)
    evaluate_passages: int = 24

    def __post_init__(self) -> None:
        if not self.stages or [s.until for s in self.stages] != sorted({s.until for s in self.stages}):
            raise ValueError("stages must be given in rising order of `until`")
        if self.stages[-1].until != 1.0:
            raise ValueError(f"the last stage must end at 1.0, got {self.stages[-1].until}")
        longest = self.longest()
        if self.tokens_per_step < longest or self.total_tokens < self.tokens_per_step:
            raise ValueError(
                f"need longest sequence ({longest}) <= tokens_per_step ({self.tokens_per_step}) "
                f"<= total_tokens ({self.total_tokens})"
            )
        if longest > self.shape.max_positions:
            raise ValueError(f"sequences of {longest} exceed max_positions {self.shape.max_positions}")
        if not 0 < self.decay_share <= 1 or self.peak_lr <= 0:
            raise ValueError(f"need 0 < decay_share <= 1 and peak_lr > 0, got {self.decay_share} and {self.peak_lr}")

    def longest(self) -> int:
        return max(length for stage in self.stages for length, _ in stage.lengths)

    def steps(self) -> int:
        return self.total_tokens // self.tokens_per_step

    def stage(self, step: int) -> Stage:
        return next(stage for stage in self.stages if step < stage.until * self.steps() or stage.until == 1.0)

    def length(self, step: int) -> int:
        """The sequence length of a step: a function of (seed, step), like the batch itself."""
        lengths, shares = zip(*self.stage(step).lengths, strict=True)
        rng = np.random.default_rng([self.seed, step, 1])
        return int(rng.choice(lengths, p=np.array(shares) / sum(shares)))

    def learning_rate(self, step: int) -> float:
        steps = self.steps()
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        done = max(0.0, (step - (1 - self.decay_share) * steps) / (self.decay_share * steps))
        low = self.final_lr_share
        return self.peak_lr * warm * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def _curriculum(*parts: tuple[float, tuple[tuple[int, float], ...], float, float]) -> tuple[Stage, ...]:
    return tuple(Stage(until, lengths, Mixture(recall=recall, copy=copy)) for until, lengths, recall, copy in parts)


PRESETS: dict[str, TrainConfig] = {
    "cpu": TrainConfig(
        shape=Shape(),
        stages=_curriculum(
            (0.25, ((128, 0.4), (256, 0.6)), 0.55, 0.08),
            (0.55, ((256, 0.6), (512, 0.4)), 0.55, 0.04),
            (0.80, ((256, 0.2), (512, 0.5), (1024, 0.3)), 0.5, 0.0),
            (1.00, ((512, 0.3), (1024, 0.2), (2048, 0.5)), 0.5, 0.0),
        ),
        total_tokens=14_000_000,
        tokens_per_step=4096,
        peak_lr=1e-3,
        decay_share=0.6,
    ),
    "cuda": TrainConfig(
        shape=Shape(vocab_size=8192, layers=8, hidden=512, mlp=1280, heads=8, rope_theta=500_000.0, max_positions=16_384),
        stages=_curriculum(
            (0.20, ((128, 0.3), (256, 0.3), (512, 0.4)), 0.55, 0.05),
            (0.50, ((512, 0.5), (1024, 0.5)), 0.5, 0.02),
            (0.75, ((512, 0.2), (2048, 0.5), (4096, 0.3)), 0.5, 0.0),
            (1.00, ((1024, 0.2), (8192, 0.4), (16_384, 0.4)), 0.5, 0.0),
        ),
        total_tokens=1_000_000_000,
        tokens_per_step=65_536,
        peak_lr=1e-3,
        warmup_steps=300,
        decay_share=1.0,
        checkpoint_every=500,
        evaluate_every=1000,
        evaluate_lengths=(512, 4096, 16_384),
    ),
    "opt": TrainConfig(
        shape=Shape(architecture="opt", layers=5, mlp=1024, kv_heads=4, max_positions=2048),
        stages=_curriculum(
            (0.40, ((128, 0.4), (256, 0.6)), 0.5, 0.1),
            (0.75, ((256, 0.6), (512, 0.4)), 0.5, 0.05),
            (1.00, ((512, 0.4), (1024, 0.3), (2048, 0.3)), 0.5, 0.0),
        ),
        total_tokens=8_000_000,
        tokens_per_step=4096,
        peak_lr=1.5e-3,
        decay_share=0.6,
    ),
}


def blocked_causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention by blocks of queries, query `[B, H, N, d]`, key and value `[B, Hkv, N, d]` -> `[B, N, H, d]`.

    For training on a CPU only: torch's fused kernel takes up to 2.6 times as long there (backward above all), and a
    plain product computes the half above the diagonal. Same result up to rounding.
    """
    batch, heads, n, d = query.shape
    groups = heads // key.shape[1]
    query = query * (d**-0.5 if scaling is None else scaling)
    block = max(64, n // 8)
    flat_k, flat_v = key.flatten(0, 1), value.flatten(0, 1)
    outputs = []
    for begin in range(0, n, block):
        end = min(begin + block, n)
        q = query[:, :, begin:end].reshape(len(flat_k), groups * (end - begin), d)
        scores = torch.bmm(q, flat_k[:, :end].transpose(1, 2)).view(-1, groups, end - begin, end)
        above = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).triu(begin + 1)
        weights = torch.softmax(scores.masked_fill_(above, -torch.inf), -1)
        out = torch.bmm(weights.view(len(flat_k), -1, end), flat_v[:, :end])
        outputs.append(out.view(batch, heads, end - begin, d))
    return torch.cat(outputs, 2).transpose(1, 2), None


def grow(model: PreTrainedModel, shape: Shape) -> PreTrainedModel:
    """The same function with more layers: copies of layers whose output projections are zero, spread evenly among them
    (a form of Gong et al. 2019's stacking that changes no logit). Raises ValueError where the rest of the shape differs.
    """
    config = shape.config()
    same = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    different = [name for name in same if getattr(model.config, name, None) != getattr(config, name, None)]
    old = model.config.num_hidden_layers
    if config.model_type != "llama" or different or shape.layers < old:
        raise ValueError(
            f"--init-from needs a Llama checkpoint of the preset's shape with at most {shape.layers} layers; "
            f"this one has {old} layers and differs in {different or 'nothing else'}"
        )
    grown = AutoModelForCausalLM.from_config(config)
    new_at = {(i + 1) * shape.layers // (shape.layers - old + 1) for i in range(shape.layers - old)}
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("model.layers.")}
    source = -1
    for i in range(shape.layers):
        source = max(source, 0) if i in new_at else source + 1
        for name, value in model.model.layers[source].state_dict().items():
            zero = i in new_at and name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            weights[f"model.layers.{i}.{name}"] = torch.zeros_like(value) if zero else value.clone()
    grown.load_state_dict(weights)
    return grown


def build_model(config: TrainConfig, init_from: Path | None) -> PreTrainedModel:
    """Fresh float32 weights from the seed, or those of `init_from` grown to the configured shape."""
    torch.manual_seed(config.seed)
    if init_from is None:
        return AutoModelForCausalLM.from_config(config.shape.config(), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(init_from, dtype=torch.float32, use_safetensors=True)
    return grow(model, config.shape)


def build_optimizer(model: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), no decay on vectors and embeddings."""
    inside = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name]
    outside = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    groups = [{"params": inside, "weight_decay": config.weight_decay}, {"params": outside, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=True)


def weighted_loss(model: PreTrainedModel, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy of ids `[B, N]`, each token's loss times its weight `[B, N]`, over the number of tokens."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1]).float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).mean()


def save_atomically(state: Any, path: Path) -> None:
    """A reader, or a run killed at any moment, sees the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Run:
    """One training run in a folder: tokenizer.json, corpus.npy, state.pt, log.jsonl, and checkpoint/ at the end."""

    def __init__(self, config: TrainConfig, data: Path, out: Path, init_from: Path | None, tokenizer: Path | None) -> None:
        self.config, self.out = config, out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        out.mkdir(parents=True, exist_ok=True)
        AttentionInterface.register("blocked_causal", blocked_causal_attention)
        self._prepare_data(data, tokenizer or init_from)
        self.step = 0
        self.model = build_model(config, init_from).to(self.device)
        self.optimizer = build_optimizer(self.model, config)
        self._resume()

    def _prepare_data(self, data: Path, tokenizer: Path | None) -> None:
        vocabulary, corpus, books = self.out / "tokenizer.json", self.out / "corpus.npy", training_books(data)
        if not vocabulary.exists():
            made = (
                Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
                if tokenizer
                else train_tokenizer(books, self.config.shape.vocab_size)
            )
            made.save(str(vocabulary))
        self.tokenizer = Tokenizer.from_file(str(vocabulary))
        if self.tokenizer.get_vocab_size() != self.config.shape.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.get_vocab_size()} tokens, the model {self.config.shape.vocab_size}"
            )
        if not corpus.exists():
            np.save(corpus.with_suffix(".tmp.npy"), load_corpus(books, self.tokenizer).ids)
            os.replace(corpus.with_suffix(".tmp.npy"), corpus)
        self.encoder = Encoder(self.tokenizer)
        self.corpus = Corpus.from_ids(np.load(corpus), self.tokenizer)
        watched = data / VALIDATION_BOOK
        self.validation = load_corpus([watched], self.tokenizer) if watched.exists() else self.corpus

    def _fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its continuation; the length of training may."""
        kept = json.loads(json.dumps(asdict(replace(self.config, total_tokens=self.config.tokens_per_step))))
        return {"config": kept, "corpus_tokens": len(self.corpus.ids)}

    def _resume(self) -> None:
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["fingerprint"] != self._fingerprint():
            raise ValueError(f"{path} belongs to a run with other settings or data; choose another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        self.step = state["step"]

    def save(self) -> None:
        state = {
            "fingerprint": self._fingerprint(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        save_atomically(state, self.out / "state.pt")

    def train_step(self) -> float:
        """One optimiser step; returns the weighted loss in nats."""
        config, length = self.config, self.config.length(self.step)
        ids, weights = make_batch(
            config.seed,
            self.step,
            config.tokens_per_step // length,
            length,
            config.stage(self.step).mixture,
            self.corpus,
            self.encoder,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate(self.step)
        self.model.train()
        self.model.set_attn_implementation("blocked_causal" if self.device.type == "cpu" else "sdpa")
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = weighted_loss(
                self.model, torch.from_numpy(ids).to(self.device), torch.from_numpy(weights).to(self.device)
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach())

    def evaluate(self) -> dict[str, float]:
        """Recall of held-out names (4 facts) and bits per byte on the validation book, small samples, for watching."""
        self.model.eval()
        self.model.set_attn_implementation("sdpa")
        found: dict[str, float] = {}
        settings = {"corpus": self.validation, "encoder": self.encoder, "passages": self.config.evaluate_passages, "seed": 1}
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            for length in self.config.evaluate_lengths:
                found[f"recall_{length}"] = share_right(recall(self.model, length=length, facts=4, **settings))
            context = min(512, max(self.config.evaluate_lengths))
            sample = {"windows": 32, "scored": context // 4}
            nats = nats_by_context(self.model, self.validation.ids, [context], batch=8, **sample)[context]
            sizes = scored_bytes(self.tokenizer, self.validation.ids, context, **sample)
            found[f"bits_per_byte_{context}"] = bits_per_byte(nats, sizes)
        return found

    def log(self, **values: float) -> None:
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, "tokens": self.step * self.config.tokens_per_step, **values}) + "\n")

    def train(self, console: Console) -> None:
        """Train to the end, logging, evaluating and saving on the way; a killed run loses what followed its last save."""
        config, steps = self.config, self.config.steps()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("training", total=steps, completed=self.step)
            losses: list[float] = []
            since, at = time.monotonic(), self.step
            while self.step < steps:
                losses.append(self.train_step())
                progress.update(task, completed=self.step, description=f"loss {losses[-1]:.3f}")
                if self.step % config.evaluate_every == 0 or self.step == steps:
                    rate = (self.step - at) * config.tokens_per_step / (time.monotonic() - since)
                    found = self.evaluate()
                    self.log(loss=float(np.mean(losses)), tokens_per_second=round(rate), **found)
                    progress.console.print(f"step {self.step}: loss {np.mean(losses):.3f}, {rate:.0f} tokens/s, {found}")
                    losses, since, at = [], time.monotonic(), self.step
                if self.step % config.checkpoint_every == 0 or self.step == steps:
                    self.save()
        self.export(self.out / "checkpoint")

    def export(self, folder: Path) -> None:
        """An ordinary transformers folder, bf16 safetensors in shards under 16 MiB."""
        self.model.set_attn_implementation("sdpa")
        AutoModelForCausalLM.from_config(self.model.config)  # fails here, not at the user's, if the config is unusable
        stored = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        stored.load_state_dict(self.model.state_dict())
        stored.save_pretrained(folder, max_shard_size="15MB")
        fast = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
        fast.save_pretrained(folder)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--data", type=Path, required=True, help="folder of .txt books")
    parser.add_argument("--out", type=Path, required=True, help="the run's folder: checkpoints, log, final model")
    parser.add_argument("--init-from", type=Path, help="start from this checkpoint (and its tokenizer), grown in depth")
    parser.add_argument("--tokenizer", type=Path, help="use the tokenizer.json of this folder instead of training one")
    parser.add_argument("--total-tokens", type=int, help="length of training; may change when a run goes on")
    parser.add_argument("--export-now", action="store_true", help="write checkpoint/ from the last state and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse_arguments(arguments)
    console = Console(stderr=True)
    config = PRESETS[args.preset]
    try:
        if args.total_tokens:
            config = replace(config, total_tokens=args.total_tokens)
        run = Run(config, args.data, args.out, args.init_from, args.tokenizer)
    except (ValueError, FileNotFoundError) as error:
        console.print(f"[red]{error}")
        return 2
    if args.export_now:
        run.export(args.out / "checkpoint")
    else:
        run.train(console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

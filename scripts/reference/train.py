"""Train a reference model (Llama, OPT or hybrid architecture) on a folder of novels and on recall passages.

    python scripts/reference/train.py cpu  --data ../shared/data/books --out runs/llama --init-from FOLDER
    python scripts/reference/train.py cpu-longer --data ../shared/data/books --out runs/more --init-from CHECKPOINT
    python scripts/reference/train.py cuda --data ../shared/data/books --out runs/llama-16k
    python scripts/reference/train.py opt  --data ../shared/data/books --out runs/opt --tokenizer FOLDER
    python scripts/reference/train.py opt-longer --data ../shared/data/books --out runs/opt2 --init-from CHECKPOINT
    python scripts/reference/train.py hybrid --data ../shared/data/books --out runs/hybrid --tokenizer FOLDER

If started again with the same arguments, training resumes from its last checkpoint, bit-exactly on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from build import blocked_causal_attention, build_model, build_optimizer, weighted_loss
from config import PRESETS, TrainConfig
from data import (
    END_OF_TEXT,
    VALIDATION_BOOK,
    Corpus,
    Encoder,
    load_corpus,
    make_batch,
    train_tokenizer,
    training_books,
)
from evaluate import bits_per_byte, nats_by_context, recall, scored_bytes, share_right
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedTokenizerFast

_auto: Any = AutoModelForCausalLM  # untyped in transformers
_tokenizer: Any = PreTrainedTokenizerFast


def save_atomically(state: Any, path: Path) -> None:
    """Save `state` atomically: after a crash, the file is either the old or the new version."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class TrainingRun:
    """A training run in a folder.

    The files are tokenizer.json, corpus.npy, state.pt and log.jsonl, and finally checkpoint/.
    """

    def __init__(
        self, config: TrainConfig, data: Path, out: Path, init_from: Path | None, tokenizer: Path | None
    ) -> None:
        self.config, self.out = config, out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        out.mkdir(parents=True, exist_ok=True)
        AttentionInterface.register("blocked_causal", blocked_causal_attention)
        self._prepare_data(data, tokenizer or init_from)
        self.step, self.stopped = 0, False
        self.model = build_model(config, init_from)
        self.model.to(self.device)  # type: ignore[arg-type]  # transformers types its argument as itself
        self.optimizer = build_optimizer(self.model, config)
        self._resume()

    def _prepare_data(self, data: Path, tokenizer: Path | None) -> None:
        vocabulary, corpus, books = self.out / "tokenizer.json", self.out / "corpus.npy", training_books(data)
        if tokenizer and not (tokenizer / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{tokenizer} holds no tokenizer.json")
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
        """Return the settings that must not change when a run is resumed.

        These are all settings except the length of training.
        """
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
        """Save the training state. There is no state of the data to save, because batches depend only on the step."""
        state = {
            "fingerprint": self._fingerprint(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        save_atomically(state, self.out / "state.pt")

    def train_step(self) -> float:
        """Run one optimizer step, and return the weighted loss in nats."""
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
            tensors = torch.from_numpy(ids).to(self.device), torch.from_numpy(weights).to(self.device)
            loss = weighted_loss(self.model, *tensors, config.first_position(self.step))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach())

    def evaluate(self) -> dict[str, float]:
        """Measure, on small samples, the recall of held-out names (4 facts) and the bits per byte of the validation
        book.
        """
        self.model.train(False)
        self.model.set_attn_implementation("sdpa")
        found: dict[str, float] = {}
        settings: dict[str, Any] = {
            "corpus": self.validation,
            "encoder": self.encoder,
            "passages": self.config.evaluate_passages,
            "seed": 1,
        }
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
            file.write(
                json.dumps({"step": self.step, "tokens": self.step * self.config.tokens_per_step, **values}) + "\n"
            )

    def train(self, console: Console) -> None:
        """Train to the end, and log, evaluate and save periodically.

        After SIGTERM or Ctrl-C, the current step is completed and saved, and training stops. If the process is killed,
        the steps since the last save are lost.
        """
        config, steps = self.config, self.config.steps()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress, self._stopping_on_signals():
            task = progress.add_task("training", total=steps, completed=self.step)
            losses: list[float] = []
            since, at = time.monotonic(), self.step
            while self.step < steps and not self.stopped:
                losses.append(self.train_step())
                progress.update(task, completed=self.step, description=f"loss {losses[-1]:.3f}")
                if self.step % config.evaluate_every == 0 or self.step == steps:
                    rate = (self.step - at) * config.tokens_per_step / (time.monotonic() - since)
                    found = self.evaluate()
                    self.log(loss=float(np.mean(losses)), tokens_per_second=round(rate), **found)
                    progress.console.print(
                        f"step {self.step}: loss {np.mean(losses):.3f}, {rate:.0f} tokens/s, {found}"
                    )
                    losses, since, at = [], time.monotonic(), self.step
                if self.step % config.checkpoint_every == 0 or self.step == steps or self.stopped:
                    self.save()
        self.export(self.out / "checkpoint")

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            self.stopped = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def export(self, folder: Path) -> None:
        """Write a transformers model folder with bf16 safetensors, in shards of less than 16 MiB."""
        self.model.set_attn_implementation("sdpa")
        stored = _auto.from_config(self.model.config, dtype=torch.bfloat16)
        stored.load_state_dict(self.model.state_dict())
        stored.save_pretrained(folder, max_shard_size="15MB")
        fast = _tokenizer(tokenizer_object=self.tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
        fast.save_pretrained(folder)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--data", type=Path, required=True, help="folder of .txt books")
    parser.add_argument("--out", type=Path, required=True, help="the run's folder: checkpoints, log, final model")
    parser.add_argument("--init-from", type=Path, help="start from this checkpoint (and its tokenizer), grown in depth")
    parser.add_argument("--tokenizer", type=Path, help="use the tokenizer.json of this folder instead of training one")
    parser.add_argument("--total-tokens", type=int, help="length of training; may change when a run continues")
    parser.add_argument("--export-now", action="store_true", help="write checkpoint/ from the last state and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train or export. Return 2 if the arguments are invalid."""
    args = parse_arguments(arguments)
    console = Console(stderr=True)
    config = PRESETS[args.preset]
    try:
        if args.total_tokens:
            config = replace(config, total_tokens=args.total_tokens)
        run = TrainingRun(config, args.data, args.out, args.init_from, args.tokenizer)
    except (ValueError, FileNotFoundError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    if args.export_now:
        run.export(args.out / "checkpoint")
    else:
        run.train(console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

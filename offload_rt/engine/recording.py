"""Record the selected tokens of a run in a folder: `run.json` and shards, written during the run.

A shard is a safetensors file with two int32 tensors: `counts` `[steps, S]`, the number of tokens that each KV head
selected in each of the S layers that select, and `positions` `[sum(counts) * Hkv]`, their positions by step, layer and
head, ascending. A selected token takes four bytes. One shard at a time is kept in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file
from transformers import PreTrainedTokenizerBase

from ..core import CHUNK
from ..errors import InputError
from ..utils.small_files import read_json, read_small
from .detokenizer import TextStream
from .runner import Runner

VERSION: Final = 1
SHARD_BYTES: Final = 4 << 20

_FORMAT: Final = "offload-rt recording"
_ABOUT: Final = "run.json"


@dataclass(frozen=True)
class RunInfo:
    """Description of a run.

    Attributes:
        row_bytes: Size of K and V of one token, layer and KV head.
        selecting: Layers that select tokens.
        tokens: Token ids of prompt and answer.
        pieces: Text of each token; empty without a tokenizer. Joined they are the whole text.
    """

    model: str
    fingerprint: str
    policy: str
    options: Mapping[str, Any]
    layers: int
    kv_heads: int
    row_bytes: int
    selecting: tuple[int, ...]
    sinks: int
    recent: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...] = ()

    @classmethod
    def of(cls, runner: Runner, prompt: Sequence[int]) -> Self:
        geometry, policy = runner.adapter.geometry, runner.policy
        return cls(
            model=runner.model.name,
            fingerprint=runner.model.fingerprint,
            policy=policy.name,
            options=dict(runner.config.policy_options),
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            row_bytes=runner.pool.chunk_bytes // (CHUNK * geometry.layers * geometry.kv_heads),
            selecting=tuple(layer for layer in range(geometry.layers) if layer not in policy.dense_layers),
            sinks=policy.sinks,
            recent=policy.recent,
            prompt_tokens=len(prompt),
            tokens=tuple(prompt),
        )

    def possible(self) -> bool:
        """Return whether the fields, which come from a file, have valid types and values."""
        texts = (self.model, self.fingerprint, self.policy)
        lists = (self.selecting, self.tokens, self.pieces)
        counts = (self.layers, self.kv_heads, self.row_bytes, self.sinks, self.recent, self.prompt_tokens)
        return (
            all(isinstance(text, str) for text in texts)
            and isinstance(self.options, Mapping)
            and all(isinstance(each, tuple) for each in lists)
            and all(isinstance(piece, str) for piece in self.pieces)
            and all(type(n) is int and 0 <= n < 1 << 62 for n in (*counts, *self.selecting, *self.tokens))
            and self.kv_heads > 0
            and all(layer < self.layers for layer in self.selecting)
            and self.prompt_tokens <= len(self.tokens)
        )


class RunWriter:
    """Record one sequence into its own folder. Call `close` in any case, because it writes the rest.

    A killed run lacks its last shard and the text of new tokens.

    Raises:
        InputError: The folder is not empty or cannot be written.
    """

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self.folder, self._info = folder, info
        self._layer_of = {layer: i for i, layer in enumerate(info.selecting)}
        self._counts: list[list[int]] = []
        self._positions: list[NDArray[np.int32]] = []
        self._held = self._shards = self.bytes = 0
        self._last = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise InputError(f"{str(folder)!r} is not empty: choose a new folder for the recording")
            self._write_info(info)
        except OSError as error:
            raise InputError(f"cannot record to {str(folder)!r}: {error.strerror}") from error

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """Record that the token at `position` selects the positions `tokens` `[Hkv, n]` in `layer`.

        Steps and layers must come in ascending order.
        """
        if position != self._last:
            assert position > self._last, "one sequence, step by step"
            if self._held >= SHARD_BYTES:
                self._flush()
            self._counts.append([0] * len(self._layer_of))
            self._last = position
        rows = tokens.detach().to("cpu", torch.int32).sort(dim=1).values.numpy()
        self._counts[-1][self._layer_of[layer]] = rows.shape[1]
        self._positions.append(rows.reshape(-1))
        self._held += rows.nbytes

    def close(self, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Finish the recording. `tokens` are those of prompt and answer."""
        try:
            self._flush()
            self._write_info(replace(self._info, tokens=tuple(tokens), pieces=_pieces(tokens, tokenizer)))
        except OSError as error:
            raise InputError(f"cannot record to {str(self.folder)!r}: {error.strerror}") from error

    def _flush(self) -> None:
        if not self._counts:
            return
        shard = {
            "counts": np.asarray(self._counts, np.int32),
            "positions": np.concatenate(self._positions) if self._positions else np.empty(0, np.int32),
        }
        path = self.folder / f"selections-{self._shards:05d}.safetensors"
        save_file(shard, path)
        self.bytes += path.stat().st_size
        self._counts, self._positions, self._held = [], [], 0
        self._shards += 1

    def _write_info(self, info: RunInfo) -> None:
        record = {"format": _FORMAT, "version": VERSION, **asdict(info)}
        temporary = self.folder / f".{_ABOUT}.tmp"
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / _ABOUT)


def _pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """Return the text of each token. Tokens within a character have "", and a later token has the text."""
    if tokenizer is None:
        return ()
    stream = TextStream(tokenizer, ())
    pieces = [stream.push(token) for token in tokens]
    pieces[-1] += stream.flush()
    return tuple(pieces)


StepSelections = list[NDArray[np.int32]]
"""Positions `[Hkv, n]` for each selecting layer, ascending for each KV head."""


@dataclass(frozen=True)
class Recording:
    """A recorded run on disk. Shards are read one at a time."""

    folder: Path
    info: RunInfo

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a recording. Raise InputError if there is none, or if it is damaged or of another version."""
        try:
            record = read_json(folder / _ABOUT)
        except OSError as error:
            raise InputError(
                f"{str(folder)!r} is not a recording ({error.strerror}): make one with --record"
            ) from error
        except ValueError as error:
            raise InputError(f"{str(folder / _ABOUT)!r} is damaged: {error}; record the run again") from error
        if not isinstance(record, dict) or record.pop("format", None) != _FORMAT:
            raise InputError(f"{str(folder / _ABOUT)!r} is not a recording of offload-rt")
        if (version := record.pop("version", None)) != VERSION:
            raise InputError(f"{str(folder)!r} is a recording of version {version}, this program reads {VERSION}")
        try:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
            info = RunInfo(**fields)
        except TypeError as error:
            raise InputError(f"{str(folder / _ABOUT)!r} is damaged: {error}; record the run again") from error
        if not info.possible():
            raise InputError(f"{str(folder / _ABOUT)!r} is damaged: its values are impossible; record the run again")
        return cls(folder, info)

    def steps(self) -> Iterator[tuple[int, StepSelections]]:
        """Yield (position, selections) of each decode step. The first step is at position `prompt_tokens`.

        Raises InputError for a damaged shard.
        """
        position = self.info.prompt_tokens
        for path in sorted(self.folder.glob("selections-*.safetensors")):
            counts, positions = self._shard(path)
            start = 0
            for row in counts.tolist():
                step: StepSelections = []
                for count in row:
                    stop = start + count * self.info.kv_heads
                    step.append(positions[start:stop].reshape(self.info.kv_heads, count))
                    start = stop
                yield position, step
                position += 1

    def _shard(self, path: Path) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        try:
            shard = load(read_small(path))
            counts, positions = shard["counts"], shard["positions"]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InputError(f"{str(path)!r} is damaged: {error}; record the run again") from error
        whole = counts.dtype == positions.dtype == np.int32 and counts.ndim == 2 and not (counts < 0).any()
        wanted = (len(self.info.selecting), int(counts.sum()) * self.info.kv_heads)
        if not whole or (counts.shape[1], positions.size) != wanted:
            raise InputError(f"{str(path)!r} is damaged: counts and positions do not agree; record the run again")
        return counts, positions

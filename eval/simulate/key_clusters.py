"""Tokens whose keys are near each other, side by side: where each would lie if rows were stored by clusters of keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from ...engine.recording import Recording
from ...errors import InputError
from ...models.loading import load_model
from ..core.teacher_forced import prefill_layers

ROUNDS = 10
"""Of k-means."""

Places = NDArray[np.int64]
"""Of each KV head of a layer, int64 `[Hkv, n]`: where a token lies."""


def places_by_cluster(keys: torch.Tensor, size: int, seed: int = 0) -> Places:
    """Of keys `[Hkv, n, d]`, in clusters of `size` tokens on average (k-means): cluster by cluster, those whose centres
    are alike in what tells them apart most next to each other, tokens of a cluster by position."""
    count = max(1, keys.shape[1] // size)
    places = np.empty(keys.shape[:2], np.int64)
    for head, own in enumerate(keys.float().cpu().numpy()):
        centres, labels = kmeans2(own, count, iter=ROUNDS, minit="points", rng=seed, missing="warn")
        _, _, axes = np.linalg.svd(centres - centres.mean(0), full_matrices=False)
        rank = np.argsort(np.argsort(centres @ axes[0], kind="stable"))
        places[head, np.argsort(rank[labels], kind="stable")] = np.arange(len(own))
    return places


def recorded_places(recording: Recording, size: int) -> Sequence[Places]:
    """Of each layer that selects, `places_by_cluster` of the prompt that a recording begins with, whose model computes
    its keys again. Raises InputError where the model is another one by now."""
    info = recording.info
    model = load_model(info.model)
    if model.fingerprint != info.fingerprint:
        raise InputError(f"{info.model!r} is not the model that {str(recording.folder)!r} is of: its weights differ")
    keys = prefill_layers(model.adapter, info.tokens[: info.prompt_tokens]).k
    return [places_by_cluster(keys[layer], size) for layer in info.selecting]

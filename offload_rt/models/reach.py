"""Rotary frequencies that follow the length of the text, held at those of the longest one that a runtime is for.

Cached keys were rotated when their tokens came; frequencies that change later would leave them stale. So a runtime
decides once, as vLLM does: "longrope" (Phi) has one set for texts up to the length that the model was first trained on
and one for longer ones, "dynamic" the trained ones up to that length and others for every length beyond.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from .text_part import text_config, text_decoder

FOLLOWS = ("dynamic", "longrope")
"""RoPE types whose frequencies follow the length."""


def hold_frequencies(model: Any, reach: int | None) -> None:
    """From now on `model` rotates as for texts of `reach` tokens (None: of all its positions), whatever it is given;
    its configuration says how many positions that is for. A model of other RoPE types, or with several, stays as it is.

    Raises ModelError where no one set of frequencies is right up to `reach`.
    """
    rotary, config = getattr(text_decoder(model), "rotary_emb", None), text_config(model.config)
    kind = getattr(rotary, "rope_type", None)
    if rotary is None or kind not in FOLLOWS:
        return
    stated: int = config.max_position_embeddings
    trained = int(config.rope_parameters["original_max_position_embeddings"]) if kind == "longrope" else stated
    if (reach or stated) <= trained:
        config.max_position_embeddings = trained
    elif kind == "dynamic":
        raise ModelError(
            f"RoPE type 'dynamic' changes its frequencies with every token beyond {trained}, so cached keys would go "
            f"stale; max_model_len={reach} must be at most {trained}",
            reason="rope_length",
        )
    elif not rotary.inv_freq.is_meta:
        device = rotary.inv_freq.device
        rotary(torch.zeros(1, device=device), torch.full((1, 1), trained, device=device))  # takes the long ones over
    rotary.rope_type = "default"

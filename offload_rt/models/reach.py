"""Fix rotary frequencies that depend on the text length to those of the longest supported text.

Keys are rotated before they are cached, so they become invalid if the frequencies change later. The frequencies are
therefore chosen once, as in vLLM. "longrope" (Phi) has two sets: one for texts up to the original training length and
one for longer texts. "dynamic" has one set up to the training length and different frequencies for each longer length.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from .text_part import text_config, text_decoder

FOLLOWS = ("dynamic", "longrope")
"""RoPE types with frequencies that depend on the text length."""


def hold_frequencies(model: Any, reach: int | None) -> None:
    """Fix the rotary frequencies of `model` in place to those for texts of `reach` tokens.

    If `reach` is at most the training length, `max_position_embeddings` is set to the training length. Models with
    other RoPE types, or with several, are left unchanged.

    Args:
        model: A loaded transformers model.
        reach: Length of the longest text in tokens. None stands for `max_position_embeddings`.

    Raises:
        ModelError: No single set of frequencies is valid up to `reach`.
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
        rotary(
            torch.zeros(1, device=device), torch.full((1, 1), trained, device=device)
        )  # a pass beyond `trained` switches to the long set
    rotary.rope_type = "default"

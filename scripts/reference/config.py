"""Training configurations of the reference models: shape, curriculum, schedule and presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from data import Mixture
from transformers import LlamaConfig, OPTConfig, PreTrainedConfig, Qwen3_5TextConfig


@dataclass(frozen=True)
class ReferenceShape:
    """Model architecture with head dimension 64. `kv_heads` does not apply to OPT.

    In "qwen3_5", every fourth layer has attention, and all other layers are recurrent (gated delta rule).
    """

    architecture: str = "llama"
    vocab_size: int = 2048
    layers: int = 8
    hidden: int = 256
    mlp: int = 640
    heads: int = 4
    kv_heads: int = 2
    rope_theta: float = 50_000.0
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.architecture not in ("llama", "opt", "qwen3_5"):
            raise ValueError(f"architecture must be 'llama', 'opt' or 'qwen3_5', got {self.architecture!r}")
        if self.hidden != 64 * self.heads:
            raise ValueError(f"head_dim is 64: hidden must be 64 * heads = {64 * self.heads}, got {self.hidden}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    def config(self) -> PreTrainedConfig:
        common: dict[str, Any] = {
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
            no_dropout: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
            return OPTConfig(
                ffn_dim=self.mlp, word_embed_proj_dim=self.hidden, pad_token_id=None, **no_dropout, **common
            )
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        common |= {
            "intermediate_size": self.mlp,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
        }
        if self.architecture == "llama":
            return LlamaConfig(rope_parameters=rope, **common)
        return Qwen3_5TextConfig(
            linear_num_key_heads=self.heads,
            linear_num_value_heads=self.heads,
            linear_key_head_dim=32,
            linear_value_head_dim=64,
            rope_parameters={**rope, "partial_rotary_factor": 0.25},
            **common,
        )


@dataclass(frozen=True)
class Stage:
    """A stage of training.

    It ends at the fraction `until` of all tokens. `lengths` contains pairs (sequence length, probability).
    """

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
    """All settings that determine the trained weights.

    The learning rate is constant after `warmup_steps`. Over the last fraction `decay_share` of training (1.0: the whole
    training), it decays as a half cosine.
    """

    shape: ReferenceShape
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
    shifted: float = 0.0  # fraction of steps with a random start position (SHAPE, Kiyono et al. 2021)

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
        if not 0 <= self.shifted <= 1:
            raise ValueError(f"shifted is a share of steps in [0, 1], got {self.shifted}")

    def longest(self) -> int:
        return max(length for stage in self.stages for length, _ in stage.lengths)

    def steps(self) -> int:
        return self.total_tokens // self.tokens_per_step

    def stage(self, step: int) -> Stage:
        return next(stage for stage in self.stages if step < stage.until * self.steps() or stage.until == 1.0)

    def length(self, step: int) -> int:
        """Return the sequence length in a step. It depends only on the seed and the step."""
        lengths, shares = zip(*self.stage(step).lengths, strict=True)
        rng = np.random.default_rng([self.seed, step, 1])
        return int(rng.choice(lengths, p=np.array(shares) / sum(shares)))

    def first_position(self, step: int) -> int:
        """Return the position at which the sequences of a step start.

        It is random in the fraction `shifted` of steps, and 0 in all other steps.
        """
        rng = np.random.default_rng([self.seed, step, 2])
        if rng.random() >= self.shifted:
            return 0
        return int(rng.integers(self.shape.max_positions - self.length(step) + 1))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate.

        It rises linearly, stays constant, and then falls as a half cosine to `final_lr_share` of the peak.
        """
        steps = self.steps()
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        done = max(0.0, (step - (1 - self.decay_share) * steps) / (self.decay_share * steps))
        low = self.final_lr_share
        return self.peak_lr * warm * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def _curriculum(*parts: tuple[float, tuple[tuple[int, float], ...], float, float]) -> tuple[Stage, ...]:
    return tuple(Stage(until, lengths, Mixture(recall=recall, copy=copy)) for until, lengths, recall, copy in parts)


_OPT = ReferenceShape(architecture="opt", layers=5, mlp=1024, kv_heads=4, max_positions=2048)

PRESETS: dict[str, TrainConfig] = {
    "cpu": TrainConfig(
        shape=ReferenceShape(),
        stages=_curriculum(
            (0.40, ((128, 0.25), (256, 0.35), (512, 0.25), (1024, 0.15)), 0.53, 0.02),
            (0.75, ((256, 0.3), (512, 0.35), (1024, 0.35)), 0.53, 0.0),
            (1.00, ((512, 0.3), (1024, 0.3), (2048, 0.4)), 0.5, 0.0),
        ),
        total_tokens=8_000_000,
        tokens_per_step=4096,
        peak_lr=1e-3,
        decay_share=0.8,
    ),
    # Continues a checkpoint of `cpu` (--init-from), because `cpu` trains only little on sequences of 2,048 tokens.
    "cpu-longer": TrainConfig(
        shape=ReferenceShape(),
        stages=_curriculum(
            (0.50, ((256, 0.20), (512, 0.30), (1024, 0.30), (2048, 0.20)), 0.55, 0.0),
            (1.00, ((512, 0.15), (1024, 0.25), (2048, 0.60)), 0.50, 0.0),
        ),
        total_tokens=12_000_000,
        tokens_per_step=4096,
        peak_lr=1e-3,
        decay_share=0.7,
        evaluate_lengths=(512, 2048),
    ),
    "cuda": TrainConfig(
        shape=ReferenceShape(
            vocab_size=8192, layers=8, hidden=512, mlp=1280, heads=8, rope_theta=500_000.0, max_positions=16_384
        ),
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
        shape=_OPT,
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
    # Continues a checkpoint of `opt`, because positions beyond 512 are hardly trained there. Shifted short sequences
    # train these positions as well as long sequences do.
    "opt-longer": TrainConfig(
        shape=_OPT,
        stages=_curriculum(
            (0.50, ((256, 0.25), (512, 0.30), (1024, 0.25), (2048, 0.20)), 0.50, 0.03),
            (1.00, ((512, 0.20), (1024, 0.25), (2048, 0.55)), 0.50, 0.0),
        ),
        total_tokens=16_000_000,
        tokens_per_step=4096,
        peak_lr=1.2e-3,
        decay_share=0.7,
        evaluate_lengths=(512, 2048),
        shifted=0.5,
    ),
    # A hybrid model for testing selection and snapshots with learned states. It is trained for only a few minutes.
    "hybrid": TrainConfig(
        shape=ReferenceShape(
            architecture="qwen3_5", layers=8, hidden=192, mlp=256, heads=3, kv_heads=1, rope_theta=10_000.0
        ),
        stages=_curriculum(
            (0.50, ((128, 0.5), (256, 0.5)), 0.55, 0.15),
            (1.00, ((256, 0.5), (512, 0.3), (1024, 0.2)), 0.6, 0.05),
        ),
        total_tokens=880_000,
        tokens_per_step=2048,
        peak_lr=2e-3,
        warmup_steps=40,
        decay_share=0.8,
        checkpoint_every=50,
        evaluate_every=100,
        evaluate_lengths=(256, 512),
    ),
}

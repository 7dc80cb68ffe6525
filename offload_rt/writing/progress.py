"""Progress and result of writing a document."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..outputs import FinishReason, Stats


@dataclass(frozen=True)
class WritingProgress:
    """Progress of a document, reported after each token.

    Attributes:
        new_tokens: Number of generated tokens, including those of earlier runs.
        total_tokens: Number of generated tokens that the complete document will have.
        chapter: Number of the current chapter, or 0 if the document has no chapters.
        tokens_per_second: Speed at which the latest tokens were generated, or 0 before the first measurement.
        repeated: Whether the file already contains this token, because an interrupted turn is being repeated.
        prefilled: Fraction of the layers that have finished the prefill of the context. It is 1 from the first
            generated token on.
    """

    new_tokens: int
    total_tokens: int
    chapter: int
    tokens_per_second: float
    repeated: bool
    prefilled: float = 1.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the document is complete, or None before the first measurement."""
        left = max(0, self.total_tokens - self.new_tokens)
        return left / self.tokens_per_second if self.tokens_per_second else None


@dataclass(frozen=True)
class Document:
    """Result of `write_document`.

    Attributes:
        path: File with the text.
        new_tokens: Number of generated tokens, including those of earlier runs.
        chapters: Number of chapters.
        finish_reason: "length", or "stop" if the model ended the text or a stop string was found.
        context_tokens: Number of tokens in the context at the end.
        removed_tokens: Number of tokens that were removed, oldest first, to stay within the model's context length.
        stats: Statistics of the last turn, or None if no turn ran.
    """

    path: Path
    new_tokens: int
    chapters: int
    finish_reason: FinishReason
    context_tokens: int
    removed_tokens: int
    stats: Stats | None = field(repr=False)

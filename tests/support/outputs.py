"""Collect completions from request outputs."""

from __future__ import annotations

from collections.abc import Iterable

from offload_rt.outputs import CompletionOutput, RequestOutput


def completed(outputs: Iterable[RequestOutput]) -> list[CompletionOutput]:
    return [completion for output in outputs for completion in output.outputs]

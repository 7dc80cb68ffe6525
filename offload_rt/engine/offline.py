"""Run a list of prompts to their end, with continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

from ..sampling_params import SamplingParams
from ..utils.progress import Progress
from .engine import Engine
from .request import Request


def run_all(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], cache_salt: str, progress: Progress
) -> list[Request]:
    """Run one request for each prompt, with its parameters, and return the ended requests in order.

    Raises:
        InputError, ModelError, PoolFullError: A request failed. All others were cancelled.
    """
    each = list(zip(prompts, params, strict=True))
    for prompt, one in each:
        engine.runner.cache_manager.check(len(prompt), len(prompt) + one.max_tokens)
    requests = [engine.add(prompt, one, cache_salt=cache_salt) for prompt, one in each]
    try:
        with progress.items("generate", sum(one.n for one in params)) as on_done:
            while not engine.idle:
                for event in engine.step():
                    if event.finish_reason is not None:
                        on_done()
    finally:
        for request in requests:
            engine.cancel(request)
    return requests

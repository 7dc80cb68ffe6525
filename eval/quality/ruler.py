"""RULER's tasks of the LM Evaluation Harness: without what they fetch and do not need, the same documents in every
process, and no more of them than are asked for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

MAKERS = ("generate_samples", "sys_kwext", "sys_vartrack_w_noise_random", "sys_word_pair_random")
"""What makes documents one after the other in the tasks' modules, each with an argument `num_samples`."""


@contextmanager
def without_downloads() -> Iterator[None]:
    """RULER's tasks fetch a trained sentence splitter when they are imported, whether they need it or not: here they
    find it. A task that does need it fails with nltk's own message."""
    try:
        import nltk
    except ModuleNotFoundError:
        yield
        return
    find = nltk.data.find

    def found(name: str, *places: Any) -> Any:
        return name if name == "tokenizers/punkt_tab" else find(name, *places)

    with patch.object(nltk.data, "find", found):
        yield


def begin_documents(seed: int) -> None:
    """RULER makes its documents from the global generators, and cwe's from one of its module's own that goes on from
    load to load: from here the global ones begin at `seed`, and that module anew, so that a task that is loaded next
    has the same documents in every process, whatever was loaded before it."""
    random.seed(seed)
    np.random.seed(seed)
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)


@contextmanager
def first_documents(limit: int | None) -> Iterator[None]:
    """Tasks that are loaded within make their first `limit` documents and not all 500, which takes minutes at 32k
    tokens (None: all)."""
    from lm_eval.api.task import ConfigurableTask

    download = ConfigurableTask.download

    def fewer(task: Any, *args: Any, **kwargs: Any) -> Any:
        made = getattr(task.config.custom_dataset, "__globals__", {})
        with patch.dict(made, {name: _at_most(limit, made[name]) for name in MAKERS if name in made}):
            return download(task, *args, **kwargs)

    with patch.object(ConfigurableTask, "download", download if limit is None else fewer):
        yield


def _at_most(limit: int | None, make: Callable[..., Any]) -> Callable[..., Any]:
    def limited(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.pop("num_samples", limit)
        return make(*args, **kwargs, num_samples=min(asked, limit))

    return limited

"""Patches for the RULER tasks in the LM Evaluation Harness.

The patches avoid unnecessary downloads, make the documents reproducible, and limit the number of generated documents.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

MAKERS = ("generate_samples", "sys_kwext", "sys_vartrack_w_noise_random", "sys_word_pair_random")
"""Names of the functions that generate documents in the task modules. Each has a parameter `num_samples`."""


@contextmanager
def without_downloads() -> Iterator[None]:
    """Within the `with` block, prevent RULER's tasks from downloading the punkt sentence splitter.

    If a task uses the splitter, it fails with nltk's error message.
    """
    # The task modules look for the splitter when they are imported, even if they do not need it.
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
    """Reset RULER's random generators, so that the documents of the next loaded task are reproducible."""
    random.seed(seed)
    np.random.seed(seed)
    # The cwe task has a module-level generator that is not reset between loads.
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)


@contextmanager
def first_documents(limit: int | None) -> Iterator[None]:
    """Limit tasks that are loaded within the `with` block to `limit` documents (None: no limit)."""
    # Generating all 500 documents takes minutes at 32k tokens.
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

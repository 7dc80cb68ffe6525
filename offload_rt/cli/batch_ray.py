"""A file's requests answered by several engines, each an actor of Ray Data.

Requests that begin alike are one row of the data set, so that one engine computes what they share. What Ray Data
promises is what is kept here: a row that was given to an actor that died is given to another, and comes once. The
process that asks writes the answers, as they come, so that it goes on where it was like any other batch."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError
from .batch_files import Answers, BatchRequest, answered, in_groups


class Worker:
    """An engine of its own. What it is given and gives back are rows of one text each: JSON of a group's requests, JSON
    of their answers."""

    def __init__(self, model: str, config: EngineConfig, defaults: Mapping[str, Any]) -> None:
        from ..llm import LLM

        self._llm, self._defaults = LLM(model, config), defaults

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """The answers to the groups of a batch."""
        groups = [[BatchRequest(**one) for one in json.loads(group)] for group in batch["requests"]]
        return {"answers": [json.dumps(answered(self._llm, group, self._defaults)) for group in groups]}


def answer_on_ray(
    model: str,
    config: EngineConfig,
    requests: Sequence[BatchRequest],
    defaults: Mapping[str, Any],
    answers: Answers,
    at_once: int,
    workers: int,
    show: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Answers `requests` with so many engines, on the cluster of RAY_ADDRESS or a new one of this machine alone, groups
    of at most `at_once` in the order in which they are done. Returns how many could not be answered. Raises
    ConfigError where Ray Data is not installed, or no engine can be made."""
    if not all(importlib.util.find_spec(name) for name in ("ray", "pyarrow", "pandas")):
        raise ConfigError("--ray needs Ray Data: pip install 'offload-rt[ray]'")
    import ray
    import ray.data

    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"requests": json.dumps([asdict(one) for one in group])} for group in in_groups(requests, at_once)]
    told = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker,
        fn_constructor_args=(model, config, dict(defaults)),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows))),
        num_cpus=1,
        num_gpus=0 if config.device == "cpu" else 1,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    done = failed = 0
    try:
        for row in told.iter_rows():
            group = json.loads(row["answers"])
            answers.add(group)
            done, failed = done + len(group), failed + sum("error" in one for one in group)
            show(done, len(requests))
    except ray.exceptions.RayError as error:
        raise ConfigError(f"the engines on Ray cannot go on: {str(error).strip().splitlines()[-1]}") from error
    return failed

"""Batch processing with several engines, each a Ray Data actor.

Requests with a common prefix form one row of the data set, so that one engine computes the prefix. If an actor dies,
Ray Data assigns its row to another actor and returns each row once. The calling process writes the results as they
arrive, so that a batch can be resumed.
"""

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
    """Actor with an engine. Input and output rows contain the requests and the results of a group as JSON."""

    def __init__(self, model: str, config: EngineConfig, defaults: Mapping[str, Any]) -> None:
        from ..llm import LLM

        self._llm, self._defaults = LLM(model, config), defaults

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
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
    """Process `requests` with `workers` engines on the cluster of RAY_ADDRESS, or on a new local cluster.

    Groups of at most `at_once` requests are written in the order of completion. Return the number of failed requests.
    Raises ConfigError if Ray Data is not installed or the engines fail.
    """
    if not all(importlib.util.find_spec(name) for name in ("ray", "pyarrow", "pandas")):
        raise ConfigError("--ray needs Ray Data: pip install 'offload-rt[ray]'")
    import ray
    import ray.data

    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"requests": json.dumps([asdict(one) for one in group])} for group in in_groups(requests, at_once)]
    results = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
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
        for row in results.iter_rows():
            group = json.loads(row["answers"])
            answers.add(group)
            done, failed = done + len(group), failed + sum("error" in one for one in group)
            show(done, len(requests))
    except ray.exceptions.RayError as error:
        raise ConfigError(f"the engines on Ray failed: {str(error).strip().splitlines()[-1]}") from error
    return failed

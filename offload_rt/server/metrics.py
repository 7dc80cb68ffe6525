"""Metrics in Prometheus format, and as JSON for the web page. Names and histogram buckets are those of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..outputs import RequestOutput
from .engines import Engines

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.3, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 10, 100, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
"""Upper bounds of histogram buckets: time to the first token (s), time per token (s), time per request (s), tokens."""

_GAUGES = {
    "num_requests_waiting": ("waiting requests", "waiting"),
    "num_requests_running": ("running requests", "running"),
    "kv_pool_used_bytes": ("KV in host memory", "pool_used_bytes"),
    "kv_pool_limit_bytes": ("capacity of the KV cache in host memory", "pool_limit_bytes"),
    "kv_kept_bytes": ("KV in host memory that no request uses, kept for prefix caching", "kept_bytes"),
    "kv_device_bytes": ("KV on the device", "device_kv_bytes"),
    "kv_store_bytes": ("size of the store on disk", "store_bytes"),
    "weight_bytes": ("size of the model weights", "weight_bytes"),
}
_TOTALS = {
    "prompt_tokens": ("prompt tokens", "prompt_tokens"),
    "prompt_tokens_cached": ("prompt tokens found in the prefix cache", "cached_tokens"),
    "generation_tokens": ("generated tokens", "generated_tokens"),
    "h2d_bytes": ("KV bytes copied from host to device", "h2d_bytes"),
}
_TIERS = {
    "host": "host_hit_tokens",
    "disk": "disk_hit_tokens",
    "lost": "lost_tokens",
}
"""For each place where KV of earlier tokens can be found, the field of `EngineLoad` that counts these tokens."""

PREFIX = "offload_rt_"


@dataclass(frozen=True)
class Usage:
    """Token counts of a request so far.

    Attributes:
        cached: Prompt tokens for which KV was already cached.
        recomputed: Prompt tokens that a hybrid model had to compute although their KV was cached.
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    recomputed: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def from_output(cls, output: RequestOutput) -> Usage:
        generated = sum(len(each.token_ids) for each in output.outputs)
        return cls(len(output.prompt_token_ids), output.num_cached_tokens, generated, output.num_recomputed_tokens)


class Metrics:
    """Metrics of one server. Each server has its own registry."""

    def __init__(self, engines: Engines, model: str) -> None:
        self._engines = engines
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines, model))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(PREFIX + name, help, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "time from arrival to first token", _FIRST_TOKEN)
        self._token = histogram(
            "time_per_output_token_seconds", "mean time per token after the first one, per request", _PER_TOKEN
        )
        self._whole = histogram("e2e_request_latency_seconds", "time from arrival to last token", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self._new = histogram("request_generation_tokens", "new tokens of a request", _TOKENS)
        self._ended = Counter(
            PREFIX + "request_success",
            "finished requests",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._model = model

    def record_first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def record_request(self, reason: str, usage: Usage, seconds: float, after_first: float) -> None:
        """Record a finished request. `reason` is its finish reason.

        `seconds` is the duration of the request. `after_first` is the time from its first to its last token, in
        seconds.
        """
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        self._prompt.observe(usage.prompt)
        self._new.observe(usage.generated)
        if usage.generated > 1:
            self._token.observe(after_first / (usage.generated - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def load(self) -> dict[str, int]:
        load = self._engines.load()
        counted = [field for _, field in (*_GAUGES.values(), *_TOTALS.values())]
        return {field: int(getattr(load, field)) for field in (*counted, *_TIERS.values())}


class _EngineCollector(Collector):
    def __init__(self, engines: Engines, model: str) -> None:
        self._engines, self._model = engines, model

    def collect(self) -> Iterator[Metric]:
        load = self._engines.load()

        def gauge(name: str, help: str, value: float) -> Metric:
            made = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            made.add_metric([self._model], value)
            return made

        for name, (help, field) in _GAUGES.items():
            yield gauge(name, help, getattr(load, field))
        usage = load.pool_used_bytes / max(1, load.pool_limit_bytes)
        yield gauge("kv_cache_usage_perc", "fraction of the KV cache in host memory that is in use", usage)
        for name, (help, field) in _TOTALS.items():
            total = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            total.add_metric([self._model], getattr(load, field))
            yield total
        help = "prompt tokens by the tier of their cached KV (lost: KV of named sessions that was computed again)"
        tiers = CounterMetricFamily(PREFIX + "prefix_cache_tokens", help, labels=["model_name", "tier"])
        for tier, field in _TIERS.items():
            tiers.add_metric([self._model, tier], getattr(load, field))
        yield tiers

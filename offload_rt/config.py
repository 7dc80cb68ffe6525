"""Configuration: frozen dataclasses, validated when they are made; unknown keys raise `ConfigError`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from .config_fields import check, check_choice, check_mapping, check_types, from_mapping, option
from .units import parse_duration, parse_size

Source = Literal["attention_input", "normed_input", "residual"]
SkewMethod = Literal["svd", "balanced"]
KVFormatName = Literal["auto", "int8", "int4", "int2"]
Overflow = Literal["truncate", "error"]
EvictionName = Literal["fifo", "lru", "counter"]
DraftName = Literal["sparse", "lookup", "both", "model", "lookup+model"]
Protected = Literal["window", "none"]
Verify = Literal["auto", "always", "off"]
DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]

Size = Annotated[int, "bytes"]
"""Bytes; a configuration also takes text such as "200GiB"."""

Duration = Annotated[float, "seconds"]
"""Seconds; a configuration also takes text such as "7d"."""


@dataclass(frozen=True)
class EvictionOptions:
    """What leaves when a sequence outgrows the pool (InfiniGen §4.4).

    policy: "fifo", "lru", or "counter" (saturating counts of selections, per step that a token could be selected).
    protect: "window" spares sinks and recent tokens; "none" spares only the recent ones, as the paper's FIFO.
    """

    policy: EvictionName = option("counter", help="what leaves when the pool is full", flag="--eviction")
    protect: Protected = option("window", help="what eviction spares (window: sinks and recent)")

    def __post_init__(self) -> None:
        check_choice("eviction", self.policy, get_args(EvictionName))
        check_choice("protect", self.protect, get_args(Protected))


@dataclass(frozen=True)
class DraftOptions:
    """How tokens are drafted that full attention then verifies.

    method: "sparse" decodes them under the policy; "lookup" takes what followed the last words where the text has them
        before, which costs nothing; "both" takes what is found or decodes, whichever gives more tokens a second, and
        where `adaptive` is False what is found first; "model" decodes them with a small model, "lookup+model" is to
        that what "both" is to "sparse".
    tokens: the most of one draft.
    adaptive: as many are drafted as pays, by what was accepted so far and what drafts and verifications took; False
        drafts `tokens` always.
    ngram: tokens at the end of the text that are looked up, at most; at least two of them must be found.
    model: that small model, as `LLM` takes one: of the same family, since tokens must be the same ones. It computes in
        the same place and dtype with all its rows, which have their share of `host_memory`. Without a method it is
        "model".
    """

    method: DraftName = option("both", help="how tokens are drafted", flag="--draft")
    tokens: int = option(8, help="tokens of a draft at most", metavar="N", flag="--draft-tokens")
    adaptive: bool = option(True, help="draft as many as pays, by what they took so far", flag="--draft-adaptive")
    ngram: int = option(4, help="tokens that are looked up at most", metavar="N", flag="--draft-ngram")
    model: str | None = option(None, help="a small model that drafts", metavar="MODEL", flag="--draft-model")

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("draft method", self.method, get_args(DraftName))
        named = self.method in ("model", "lookup+model")
        check(not named or self.model is not None, f"draft method={self.method!r} needs a small model: give `model`")
        check(
            named or self.model is None,
            f"draft method={self.method!r} has no use for the model {self.model!r}: choose 'model' or 'lookup+model'",
        )
        check(self.tokens >= 1, f"draft tokens={self.tokens} must be at least 1")
        check(self.ngram >= 2, f"draft ngram={self.ngram} must be at least 2")

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in the text first."""
        return self.method in ("lookup", "both", "lookup+model")

    @property
    def by_policy(self) -> bool:
        """Whether the policy decodes drafts."""
        return self.method in ("sparse", "both")

    @property
    def decodes(self) -> bool:
        """Whether drafts are decoded at all, by the policy or a model."""
        return self.method != "lookup"


@dataclass(frozen=True)
class EngineConfig:
    """All that a runtime is made of besides the model: `LLM(model, config)`, or any of these fields by keyword.

    Text is parsed when a configuration is made: sizes may be written "200GiB", `eviction` as a policy's name or as a
    mapping of `EvictionOptions`, `dtype` and `device` as torch's objects, folders as strings that begin with "~".

    policy, policy_options: "full", "infinigen", ... and its options; for infinigen `preset="paper"` is one of them.
    device, dtype: "auto" takes CUDA where there is one, and the checkpoint's dtype there. On a CPU it takes bfloat16
        where the checkpoint is in half precision and the processor multiplies bfloat16 itself, else float32.
    device_memory: hard limit on bytes of the device: weights, scoring keys, resident and fetched rows, activations.
        Decoder layers that do not fit stay in host memory and cross the link for every step; scoring keys that still do
        not fit are scored on the host. The tokens are the same. None takes what there is and keeps everything there.
    experts_on_device: of a mixture of experts, how many of each layer stay on the device, those used last; all are in
        host memory, and the others cross the link when a token's router chooses them. None keeps all on the device, or
        with `device_memory` as many as fit, before whole layers leave it. The tokens are the same.
    embedding_on_host: look token ids up in host memory, so that only rows of the embedding cross the link. Refused
        where the head is the same matrix, which every token reads whole.
    max_context: tokens of the longest sequence: `device_memory` is planned for it, and rotary frequencies that follow
        the length of the text (longrope, dynamic) are those of this length. None takes all positions of the model, for
        the plan as far as the host pool holds them.
    host_memory: hard limit on bytes of KV in host memory; None takes half of what is free.
    disk: folder on a fast local disk where the rows of running contexts lie, as a file without a name that goes with
        the process: `host_memory` then limits what is in memory of them (rows that were used, what is being read and
        written), and a context may be as long as the disk holds. None keeps all rows in memory. The tokens are the
        same.
    disk_limit: most bytes of rows on that disk; None takes 16 times `host_memory`, or half of what is free there where
        that is less.
    eviction: what leaves when a sequence outgrows the pool; None makes that an error.
    skew: path of a skew artifact, or of a folder that `offload-rt skew` or `tune` wrote: what `tune` chose are then the
        policy's default options. None calibrates once on the packaged text and caches by model fingerprint.
    kv_format: "auto" keeps rows of K and V in host memory as they are, "int8", "int4" and "int2" round them there:
        fewer bytes in the pool and on the link. Prefill is exact in any case; rounded prefixes are not shared.
    prefix_sharing: prompts that begin alike are computed and stored once, also those of earlier calls. Shared rows are
        exact: a result does not depend on what ran before.
    swap: folder on a fast disk where `LLM.generate` keeps the rows of requests that are preempted in a full pool, if
        that is estimated cheaper than computing them again; nothing of it outlives the object.
    missed_mass_every: decode steps between two measurements of the missed attention mass; 0 never measures. None is 16
        on a CPU, and 0 on a device: a measurement reads all keys where they are, in host memory.
    working_set: rows of each KV head, in each layer that selects and for each sequence, that stay on the device after
        they were fetched, those used most and latest: only other rows cross the link; 0 is none. The tokens are the
        same. On a CPU, where rows are otherwise attended to where they lie, this copies them as a device would: it
        shows what a device saves and makes the run slower.
    exact: the text of full attention, from fewer passes over all rows: tokens are drafted, several are verified by one
        pass, and those that full attention would not have chosen are taken back. True drafts under the policy ("full":
        by lookup); a method's name or a mapping of `DraftOptions` says how. None attends to what the policy selects.
    cuda_graphs: capture decode steps as CUDA graphs and replay them where all that they launch can be repeated
        (`forward/cuda_graphs.py`). None does so on a CUDA device whose memory is not limited; under `device_memory`
        True plans for one graph, which takes the memory of its step from what sequences have.
    prefill_slice: tokens whose queries, attention and MLP are computed together in prefill; bounds device memory. None
        is 512 on a CPU and 2,048 on a device; there as few as 512 where `device_memory` would else keep less on it.
    prefill_tokens: prompt tokens prefilled per step while others decode (at least one layer of one prompt).
    max_batch: sequences decoded together by `LLM.generate`, `score` and `turns`.
    verify: "auto" compares the model with transformers' own forward, layer by layer over a few random tokens, the first
        time it is loaded by this version (about a second; remembered in the cache folder), "always" each time; a model
        that differs is refused with the first layer that does. "off" trusts the architectures that are declared, and
        refuses all others.
    revision, hf_token, download_dir: of a model on the hub.
    trust_remote_code: run the code that a checkpoint brings, which may do anything. What its class computes is proved.
    progress: show progress bars on stderr for long work.
    """

    policy: str = option("infinigen", help="what selects the tokens that are attended", group="policy", plans=True)
    policy_options: Mapping[str, Any] = option(None, help="options of the policy, by name", plans=True)
    device: str = option("auto", help="what computes", metavar="auto|cpu|cuda", group="device", plans=True)
    dtype: str = option("auto", help="what is computed in", plans=True)
    device_memory: Size | None = option(
        None, help="limit of all that is on the device: weights beyond it stream", group="device", plans=True
    )
    experts_on_device: int | None = option(
        None, help="experts of each layer that stay on the device; others cross the link when chosen", metavar="N",
        group="device", plans=True,
    )  # fmt: skip
    embedding_on_host: bool = option(
        False,
        help="look tokens up in host memory: the embedding takes no room on the device",
        group="device",
        plans=True,
    )
    max_context: int | None = option(
        None, help="tokens of the longest sequence that is planned for (default: all)", metavar="N", group="device"
    )
    host_memory: Size | None = option(None, help="limit of KV in host memory, such as 200GiB", group="pool", plans=True)
    disk: Path | None = option(
        None, help="folder on a fast disk for contexts beyond host memory", metavar="DIR", group="pool", plans=True
    )
    disk_limit: Size | None = option(None, help="limit of KV on that disk, such as 200GiB", group="pool", plans=True)
    eviction: EvictionOptions | None = option(None, help="what leaves a full pool", group="pool")
    skew: Path | None = option(
        None, help="skew artifact (default: calibrated once and cached)", metavar="FILE|DIR", group="policy"
    )
    kv_format: KVFormatName = option("auto", help="rows in host memory", group="pool")
    prefix_sharing: bool = option(True, help="compute and keep once what prompts have in common", group="pool")
    swap: Path | None = option(None, help="folder for the rows of preempted requests", metavar="DIR")
    missed_mass_every: int | None = option(
        None, help="steps between two measurements of the missed attention mass; 0: none (default: 16, on a GPU 0)",
        metavar="N", group="device",
    )  # fmt: skip
    working_set: int = option(
        0, help="fetched rows per layer and KV head that stay on the device", metavar="ROWS", group="device", plans=True
    )
    exact: DraftOptions | None = option(
        None, help="the text of full attention: drafts are verified by all rows", group="policy"
    )
    cuda_graphs: bool | None = option(
        None, help="replay decode steps as CUDA graphs (default: on a GPU without --device-memory)", group="device",
        plans=True,
    )  # fmt: skip
    prefill_slice: int | None = option(
        None, help="prompt tokens whose attention is computed together (default: 512, on a GPU 2048)", metavar="N",
        group="device", plans=True,
    )  # fmt: skip
    prefill_tokens: int = option(512, help="prompt tokens prefilled per step while others decode", metavar="N")
    max_batch: int = option(32, help="sequences decoded together", metavar="N")
    verify: Verify = option("auto", help="compare the model with transformers' own when it is loaded", group="device")
    revision: str | None = option(None, help="branch, tag or commit of a model on the hub", group="hub", plans=True)
    hf_token: str | None = option(
        None, help="the hub's token (default: $HF_TOKEN, or that of hf auth login)", repr=False, group="hub", plans=True
    )
    download_dir: Path | None = option(
        None,
        help="where models of the hub are kept (default: its cache folder)",
        metavar="DIR",
        group="hub",
        plans=True,
    )
    trust_remote_code: bool = option(False, help="run the code that a checkpoint brings", group="hub", plans=True)
    progress: bool = option(False, help="progress bars on stderr")

    def __post_init__(self) -> None:
        parsed = {
            "policy_options": _parsed_options(self.policy_options),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device_memory": _parsed_size(self.device_memory, "device_memory"),
            "host_memory": _parsed_size(self.host_memory, "host_memory"),
            "disk": _parsed_path(self.disk, "disk"),
            "disk_limit": _parsed_size(self.disk_limit, "disk_limit"),
            "eviction": _parsed_eviction(self.eviction),
            "exact": _parsed_exact(self.exact, self.policy),
            "skew": _parsed_path(self.skew, "skew"),
            "swap": _parsed_path(self.swap, "swap"),
            "download_dir": _parsed_path(self.download_dir, "download_dir"),
        }
        for name, value in parsed.items():
            object.__setattr__(self, name, value)
        check_types(self)
        check_choice("verify", self.verify, get_args(Verify))
        check_choice("kv_format", self.kv_format, get_args(KVFormatName))
        check(self.max_context is None or self.max_context > 0, f"max_context={self.max_context} must be positive")
        for name in ("experts_on_device", "prefill_slice", "prefill_tokens", "max_batch"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name}={value} must be at least 1")
        check((self.missed_mass_every or 0) >= 0, f"missed_mass_every={self.missed_mass_every} must not be negative")
        check(
            self.device_memory is None or self.exact is None or self.exact.model is None,
            "device_memory is planned for one model, and a draft model would be on the device besides: leave one out",
        )
        check(
            self.disk_limit is None or self.disk is not None,
            f"disk_limit={self.disk_limit} is of a pool on disk: name its folder with disk=..., or leave it out",
        )
        check(
            self.disk is None or not self.working_set,
            f"working_set={self.working_set} keeps rows on the device, and with disk=... those that are used stay in "
            "host memory: leave working_set out",
        )
        check(
            self.working_set >= 0,
            f"working_set={self.working_set} must not be negative: rows per layer and KV head, 0 is none",
        )

    def replays(self, device: str) -> bool:
        """Whether decode steps are captured and replayed on a device of this type."""
        return device == "cuda" and (self.device_memory is None if self.cuda_graphs is None else self.cuda_graphs)


def _parsed_size(size: int | str | None, name: str) -> int | None:
    return None if size is None else parse_size(size, name)


def _parsed_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is None:
        return {}
    check_mapping("policy_options", options)
    wrong = next((key for key in options if not isinstance(key, str)), None)
    check(wrong is None, f"policy_options has the key {wrong!r:.80}; options are named by text")
    return dict(options)


def _parsed_path(path: str | os.PathLike[str] | None, name: str) -> Path | None:
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    check(
        isinstance(text, str) and "\0" not in text,
        f"{name}={path!r:.80} is {type(path).__name__}; it must be a path",
    )
    return Path(path).expanduser()


def _parsed_eviction(eviction: EvictionOptions | str | Mapping[str, Any] | None) -> EvictionOptions | None:
    """`EvictionOptions` from a policy's name or from a mapping. Raises ConfigError for what does not exist."""
    if eviction is None or isinstance(eviction, EvictionOptions):
        return eviction
    return from_mapping(EvictionOptions, {"policy": eviction} if isinstance(eviction, str) else eviction)


def _parsed_exact(exact: DraftOptions | bool | str | Mapping[str, Any] | None, policy: str) -> DraftOptions | None:
    """`DraftOptions` from True, a method's name or a mapping. Raises ConfigError for what does not exist, and where the
    policy "full" is to draft for itself."""
    if exact is None or exact is False:
        return None
    full = isinstance(policy, str) and policy == "full"
    named = isinstance(exact, Mapping) and exact.get("model") is not None
    own = "model" if named else "lookup" if full else "both"
    if isinstance(exact, DraftOptions):
        found = exact
    elif isinstance(exact, str):
        found = DraftOptions(exact)  # type: ignore[arg-type]
    else:
        check(exact is True or isinstance(exact, Mapping), f"exact={exact!r:.80}: True, a method's name, or a mapping")
        found = from_mapping(DraftOptions, {"method": own} | ({} if exact is True else dict(exact)))
    check(
        not full or not found.by_policy,
        f"exact={found.method!r} lets the policy draft, and 'full' is what verifies: choose 'lookup' or a draft model, "
        "or policy 'infinigen'",
    )
    return found


LIVE_POLICIES = ("lookahead", "lru", "fifo")
"""What orders a store that runs (`storage/policies.py`); the simulator has Belady's oracle besides."""


@dataclass(frozen=True)
class StoreOptions:
    """The tiers behind sessions (CachedAttention §3.3). `limit` may be written "50GiB", `ttl` as "7d".

    limit: most bytes of all files of the store's folder; None is no limit.
    policy: "lookahead" spares what waiting turns will use (least recently used first otherwise, so without a queue it
        is "lru"); "lru" and "fifo" do not look ahead and fetch nothing early.
    ttl: seconds after the last use from which stored chunks are given up, and parked sessions leave host memory; None
        is for ever.
    free_host: share of the host pool that parked sessions leave free, for fetching without waiting for an eviction.
    overflow: "truncate" forgets the oldest half of a conversation (all but its first tokens, with nothing computed
        again) before a turn that would outgrow the model's positions; "error" refuses the turn. Models whose stored
        keys do not allow it (absolute positions) are never truncated.
    """

    limit: Size | None = option(
        None, help="most bytes of its files, such as 50GiB (default: none)", flag="--store-limit", group="store"
    )
    policy: Literal["lookahead", "lru", "fifo"] = option(
        "lookahead", help="what leaves it first (default: lookahead, here lru)", flag="--store-policy", group="store"
    )
    ttl: Duration | None = option(
        None, help="give up rows not used for so long, such as 7d or 12h", flag="--store-ttl", group="store"
    )
    free_host: float = option(0.1, help="share of the host pool left free for fetching, [0, 1)", metavar="F")
    overflow: Overflow = option(
        "truncate", help="before a turn that outgrows the model: forget the oldest half (default), or refuse it",
        group="store",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", _parsed_size(self.limit, "limit"))
        object.__setattr__(self, "ttl", None if self.ttl is None else parse_duration(self.ttl, "ttl"))
        check_types(self)
        check_choice("store policy", self.policy, LIVE_POLICIES)
        check_choice("overflow", self.overflow, get_args(Overflow))
        check(0 <= self.free_host < 1, f"free_host={self.free_host} must be a share in [0, 1)")

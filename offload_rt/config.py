"""Configuration of the engine: frozen dataclasses that validate their fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from .utils.config_fields import check, check_choice, check_mapping, check_types, from_mapping, option
from .utils.units import parse_size

Source = Literal["attention_input", "normed_input", "residual"]
SkewMethod = Literal["svd", "balanced"]
KVFormatName = Literal["auto", "int8", "int4", "int2"]
EvictionName = Literal["fifo", "lru", "counter"]
DraftName = Literal["sparse", "lookup", "both", "model", "lookup+model"]
Protected = Literal["window", "none"]
Verify = Literal["auto", "always", "off"]
DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Quantize = Literal["auto", "none", "int4", "int8"]

Size = Annotated[int, "bytes"]
"""Size in bytes. A configuration also accepts text such as "200GiB"."""

Duration = Annotated[float, "seconds"]
"""Duration in seconds. A configuration also accepts text such as "7d"."""


@dataclass(frozen=True)
class EvictionOptions:
    """Token eviction for sequences that outgrow the KV cache (InfiniGen §4.4).

    Attributes:
        policy: "fifo", "lru", or "counter". "counter" evicts the tokens with the lowest selection rate: a saturating
            count of selections, divided by the number of steps in which the token could be selected.
        protect: Tokens that are never evicted. "window": sinks and recent tokens. "none": only recent tokens, as in the
            paper's FIFO policy.
    """

    policy: EvictionName = option("counter", help="token eviction policy for a full KV cache", flag="--eviction")
    protect: Protected = option("window", help="tokens that are never evicted (window: sinks and recent)")

    def __post_init__(self) -> None:
        check_choice("eviction", self.policy, get_args(EvictionName))
        check_choice("protect", self.protect, get_args(Protected))


@dataclass(frozen=True)
class DraftOptions:
    """Options for generating draft tokens in lossless mode (`exact`).

    Attributes:
        method: Source of draft tokens. "sparse": decode with the policy. "lookup": find the last n-gram earlier in the
            text and copy its continuation (prompt lookup). "model": decode with a draft model. "both": "lookup" or
            "sparse". "lookup+model": "lookup" or "model". The last two choose the source that is expected to give more
            tokens per second, or with `adaptive=False` lookup whenever there is a match.
        tokens: Maximum number of draft tokens.
        adaptive: Choose the number of draft tokens by the acceptance rate and the measured times. If False, always use
            `tokens`.
        ngram: Maximum length in tokens of the n-gram that is looked up. At least two tokens must match.
        model: The draft model, as accepted by `LLM`. It must use the same tokenizer. It runs on the same device, in the
            same dtype and with full attention, and its KV cache counts towards `host_memory`. Setting it changes the
            default method to "model".
    """

    method: DraftName = option("both", help="source of draft tokens", flag="--draft")
    tokens: int = option(8, help="maximum number of draft tokens", metavar="N", flag="--draft-tokens")
    adaptive: bool = option(
        True, help="adapt the number of draft tokens to the acceptance rate", flag="--draft-adaptive"
    )
    ngram: int = option(4, help="maximum length of the n-gram for lookup", metavar="N", flag="--draft-ngram")
    model: str | None = option(None, help="draft model", metavar="MODEL", flag="--draft-model")

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("draft method", self.method, get_args(DraftName))
        named = self.method in ("model", "lookup+model")
        check(not named or self.model is not None, f"draft method={self.method!r} needs a draft model: set `model`")
        check(
            named or self.model is None,
            f"draft method={self.method!r} does not use the model {self.model!r}: choose 'model' or 'lookup+model'",
        )
        check(self.tokens >= 1, f"draft tokens={self.tokens} must be at least 1")
        check(self.ngram >= 2, f"draft ngram={self.ngram} must be at least 2")

    @property
    def looks_up(self) -> bool:
        return self.method in ("lookup", "both", "lookup+model")

    @property
    def by_policy(self) -> bool:
        """Whether the policy decodes draft tokens (sparse attention)."""
        return self.method in ("sparse", "both")

    @property
    def decodes(self) -> bool:
        """Whether the policy or a draft model decodes draft tokens."""
        return self.method != "lookup"


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine: `LLM(model, config)`, or the fields as keywords: `LLM(model, host_memory="64GiB")`.

    Sizes may be strings such as "200GiB". `eviction` may be a policy name or a mapping of `EvictionOptions`. `dtype`
    and `device` may be torch objects. Paths may begin with "~". The generated tokens do not depend on `device_memory`,
    `disk`, `working_set` and `device_kv_memory`.

    Attributes:
        policy: Selection policy: "infinigen", "auto", "full", "quest", "h2o", "streaming", "oracle" or the name of a
            policy that you have registered.
        policy_options: Options of the policy by name, for example `{"preset": "paper"}`.
        device: "auto" uses CUDA if it is available.
        dtype: "auto" uses the checkpoint's dtype on CUDA. On a CPU it uses bfloat16 for half-precision checkpoints and
            float32 otherwise.
        quantize: Format of the weights. "auto" keeps the format of the checkpoint. "none" dequantises GGUF files, and
            loads other packed checkpoints with transformers' packages. "int4" and "int8" quantise the linear layers of
            a 16-bit checkpoint when it is loaded.
        device_memory: Hard limit in bytes on device memory for weights, approximate KV, resident and fetched KV
            entries, and activations. Decoder layers that do not fit stay in host memory and are copied to the device in
            every step. If approximate KV still does not fit, scoring runs on the host. None uses all device memory and
            keeps all weights and approximate KV on the device.
        experts_on_device: Number of most recently used experts that stay on the device, per mixture-of-experts layer.
            Other experts are copied from host memory when the router chooses them. None keeps all experts on the
            device, or as many as fit in `device_memory`.
        embedding_on_host: Keep the embedding in host memory and copy only the rows of the tokens. Not available if the
            output head shares the embedding's weights.
        max_model_len: Maximum number of tokens of a sequence. `device_memory` is planned for it, and length-dependent
            RoPE scaling (longrope, dynamic) uses it. None uses the model's maximum, limited by the KV cache.
        host_memory: Hard limit on KV in host memory in bytes. None uses half of the free memory.
        snapshot_memory: Part of `host_memory`, in bytes, for snapshots of recurrent state (hybrid models). None uses an
            eighth of `host_memory`. If not even one snapshot fits, prefixes are not shared.
        disk: Folder on a local disk for contexts larger than host memory. KV of running requests is stored in an
            unnamed file there, which is deleted when the process ends. `host_memory` then limits the memory that caches
            this KV.
        disk_limit: Hard limit on the file in `disk` in bytes. None uses 16 times `host_memory`, at most half of the
            free space.
        eviction: Token eviction for sequences that outgrow the KV cache. None raises an error instead.
        skew: Skew artifact (result of a calibration): a file, or a folder written by `offload-rt skew` or `offload-rt
            tune`. A folder written by `tune` also sets default options of the policy. None calibrates the model once on
            a text in the package and caches the result.
        kv_cache_dtype: "auto" stores KV in the model's dtype. "int8", "int4" and "int2" quantise KV in host memory,
            which reduces memory and transfers. Prefill uses unquantised KV. Prefixes with quantised KV are not shared.
        enable_prefix_caching: Compute and store a common prefix of prompts once, even for prompts in different calls.
            Only KV of exact attention is shared, so results do not depend on earlier requests.
        swap: Folder on a fast disk for the KV of preempted requests, used if reading is estimated to be faster than
            recomputation. The files are deleted when the process ends.
        missed_mass_every: Number of decode steps between measurements of the missed attention mass, which read all keys
            in host memory. 0 disables measurements. None means 16 on a CPU, and 0 on a GPU or with `disk`.
        working_set: Number of fetched KV entries that stay on the device, per layer, KV head and sequence. Entries that
            are used often and recently are kept, and need no further transfer. 0 disables it. On a CPU, it makes
            decoding slower and is useful only to measure the saved bytes.
        device_kv_memory: Size in bytes of device memory for copies of KV blocks, beginning with the first blocks of
            running requests. KV with a copy is not transferred. None makes no copies.
        exact: Lossless mode: the text equals the text of full attention, but fewer steps read all KV. Draft tokens are
            proposed, one pass of full attention verifies several of them, and rejected tokens are discarded. True
            chooses the method ("lookup" for policy "full", else "both"). A method name or a mapping of `DraftOptions`
            is also accepted.
        cuda_graphs: Whether decode steps are captured as CUDA graphs and replayed, if possible. None enables it on CUDA
            unless `device_memory` is set. With `device_memory`, True reserves memory for one graph.
        prefill_chunk_size: Number of tokens whose attention and MLP are computed together in prefill. It bounds device
            memory. None means 512 on a CPU and 2,048 on a GPU, or less if `device_memory` requires it.
        max_num_batched_tokens: Number of prompt tokens prefilled per engine step while other requests decode. A step
            runs at least one layer.
        max_num_seqs: Maximum number of sequences decoded together by `generate`, `score` and `turns`.
        verify: Load-time verification: compare the model with transformers' own forward pass, layer by layer, on random
            tokens. A model that differs is refused. "auto" verifies a model the first time it is loaded (about a
            second), "always" every time. "off" skips verification and refuses architectures that are not registered.
        tokenizer: Folder or hub id of a tokenizer. None uses the tokenizer of the checkpoint.
        revision: Branch, tag or commit of a model on the hub.
        hf_token: Access token for the hub.
        download_dir: Cache folder for models from the hub.
        trust_remote_code: Run code that comes with the checkpoint. It can do anything that your user can do.
        progress: Show progress bars on stderr.
    """

    policy: str = option("infinigen", help="selection policy", group="policy", plans=True)
    policy_options: Mapping[str, Any] = option(None, help="options of the policy by name", plans=True)
    device: str = option("auto", help="compute device", metavar="auto|cpu|cuda", group="device", plans=True)
    dtype: str = option("auto", help="compute dtype", plans=True)
    quantize: Quantize = option(
        "auto", help="format of the weights (none: dequantise GGUF files)", group="device", plans=True
    )
    device_memory: Size | None = option(
        None, help="limit on device memory; weights beyond it are streamed", group="device", plans=True
    )
    experts_on_device: int | None = option(
        None, help="experts per layer on the device; others are copied on demand", metavar="N",
        group="device", plans=True,
    )  # fmt: skip
    embedding_on_host: bool = option(
        False,
        help="keep the embedding in host memory",
        group="device",
        plans=True,
    )
    max_model_len: int | None = option(
        None, help="maximum number of tokens of a sequence (default: the model's)", metavar="N", group="device"
    )
    host_memory: Size | None = option(None, help="limit on KV in host memory, such as 200GiB", group="pool", plans=True)
    snapshot_memory: Size | None = option(
        None, help="limit on snapshots of recurrent state, a part of --host-memory (default: an eighth of it)",
        group="pool", plans=True,
    )  # fmt: skip
    disk: Path | None = option(
        None, help="folder on a fast disk for contexts larger than host memory", metavar="DIR", group="pool", plans=True
    )
    disk_limit: Size | None = option(None, help="limit on KV on that disk, such as 200GiB", group="pool", plans=True)
    eviction: EvictionOptions | None = option(
        None, help="token eviction for sequences that outgrow the KV cache", group="pool"
    )
    skew: Path | None = option(
        None, help="skew artifact (default: calibrated once and cached)", metavar="FILE|DIR", group="policy"
    )
    kv_cache_dtype: KVFormatName = option("auto", help="format of KV in host memory", group="pool")
    enable_prefix_caching: bool = option(True, help="compute and store common prefixes once", group="pool")
    swap: Path | None = option(None, help="folder for KV of preempted requests", metavar="DIR")
    missed_mass_every: int | None = option(
        None, help="steps between measurements of the missed attention mass; 0: never (default: 16; 0 on a GPU)",
        metavar="N", group="device",
    )  # fmt: skip
    working_set: int = option(
        0,
        help="fetched KV entries per layer and KV head kept on the device",
        metavar="ROWS",
        group="device",
        plans=True,
    )
    device_kv_memory: Size | None = option(
        None, help="device memory for copies of KV, such as 20GiB", group="device", plans=True
    )
    exact: DraftOptions | None = option(
        None, help="lossless mode: verify draft tokens with full attention", group="policy"
    )
    cuda_graphs: bool | None = option(
        None, help="replay decode steps as CUDA graphs (default: on a GPU without --device-memory)", group="device",
        plans=True,
    )  # fmt: skip
    prefill_chunk_size: int | None = option(
        None, help="prompt tokens computed together (default: 512; 2048 on a GPU)", metavar="N",
        group="device", plans=True,
    )  # fmt: skip
    max_num_batched_tokens: int = option(
        512, help="prompt tokens prefilled per step while other requests decode", metavar="N"
    )
    max_num_seqs: int = option(32, help="maximum number of sequences decoded together", metavar="N")
    verify: Verify = option("auto", help="load-time verification against transformers", group="device")
    tokenizer: str | None = option(
        None, help="folder or hub id of another tokenizer (default: the model's)", metavar="DIR|ID", group="hub"
    )
    revision: str | None = option(None, help="branch, tag or commit on the hub", group="hub", plans=True)
    hf_token: str | None = option(
        None,
        help="access token for the hub (default: $HF_TOKEN, or hf auth login)",
        repr=False,
        group="hub",
        plans=True,
    )
    download_dir: Path | None = option(
        None,
        help="folder for models from the hub (default: its cache)",
        metavar="DIR",
        group="hub",
        plans=True,
    )
    trust_remote_code: bool = option(False, help="run code that comes with the checkpoint", group="hub", plans=True)
    progress: bool = option(False, help="show progress bars on stderr")

    def __post_init__(self) -> None:
        parsed = {
            "policy_options": _parsed_options(self.policy_options),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device_memory": _parsed_size(self.device_memory, "device_memory"),
            "device_kv_memory": _parsed_size(self.device_kv_memory, "device_kv_memory"),
            "host_memory": _parsed_size(self.host_memory, "host_memory"),
            "snapshot_memory": _parsed_size(self.snapshot_memory, "snapshot_memory"),
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
        check_choice("quantize", self.quantize, get_args(Quantize))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVFormatName))
        check(
            self.max_model_len is None or self.max_model_len > 0, f"max_model_len={self.max_model_len} must be positive"
        )
        for name in ("experts_on_device", "prefill_chunk_size", "max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name}={value} must be at least 1")
        check((self.missed_mass_every or 0) >= 0, f"missed_mass_every={self.missed_mass_every} must not be negative")
        check(
            self.device_memory is None or self.exact is None or self.exact.model is None,
            "device_memory is planned for one model only and cannot be combined with a draft model: remove one of them",
        )
        check(
            self.exact is None or self.eviction is None,
            "`exact` needs the complete KV cache and cannot be combined with `eviction`: remove one of them",
        )
        check(
            self.exact is None or self.kv_cache_dtype == "auto",
            f"`exact` needs unquantised KV and cannot be combined with kv_cache_dtype={self.kv_cache_dtype!r}: remove "
            "one of them",
        )
        check(
            self.disk_limit is None or self.disk is not None,
            f"disk_limit={self.disk_limit} needs a folder: set disk, or remove disk_limit",
        )
        check(
            self.disk is None or not self.working_set,
            f"working_set={self.working_set} cannot be combined with disk: remove working_set",
        )
        for name in ("disk", "working_set"):
            check(
                self.device_kv_memory is None or not getattr(self, name),
                f"device_kv_memory cannot be combined with {name}: remove one of them",
            )
        check(
            self.working_set >= 0,
            f"working_set={self.working_set} must not be negative (KV entries per layer and KV head; 0 disables it)",
        )

    def replays(self, device: str) -> bool:
        """Return whether decode steps on a `device` ("cpu", "cuda") are replayed as CUDA graphs."""
        return device == "cuda" and (self.device_memory is None if self.cuda_graphs is None else self.cuda_graphs)


def _parsed_size(size: int | str | None, name: str) -> int | None:
    return None if size is None else parse_size(size, name)


def _parsed_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is None:
        return {}
    check_mapping("policy_options", options)
    wrong = next((key for key in options if not isinstance(key, str)), None)
    check(wrong is None, f"policy_options has the key {wrong!r:.80}; keys must be strings")
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
    if eviction is None or isinstance(eviction, EvictionOptions):
        return eviction
    return from_mapping(EvictionOptions, {"policy": eviction} if isinstance(eviction, str) else eviction)


def _parsed_exact(exact: DraftOptions | bool | str | Mapping[str, Any] | None, policy: str) -> DraftOptions | None:
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
        check(
            exact is True or isinstance(exact, Mapping), f"exact={exact!r:.80} must be True, a method name or a mapping"
        )
        found = from_mapping(DraftOptions, {"method": own} | ({} if exact is True else dict(exact)))
    check(
        not full or not found.by_policy,
        f"exact={found.method!r} drafts with the policy, but policy 'full' verifies drafts: choose 'lookup', a "
        "draft model, or policy 'infinigen'",
    )
    return found

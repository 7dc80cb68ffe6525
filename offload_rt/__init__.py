"""Run language models on long contexts whose KV cache is in host memory.

from offload_rt import LLM, SamplingParams

llm = LLM("reference")
for event in llm.stream("It was a dark night", SamplingParams(max_tokens=100)):
    print(event.text, end="", flush=True)

Importing the package is fast. torch and transformers are imported when `LLM` or `AsyncLLM` is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from .config import EngineConfig
from .errors import (
    ArtifactError,
    ConfigError,
    DiskError,
    EngineError,
    InputError,
    MemoryLimitError,
    ModelError,
    OffloadError,
    PoolFullError,
    QueueFullError,
    SessionBusyError,
    StoreError,
)
from .outputs import CompletionOutput, Logprob, RequestOutput
from .sampling_params import SamplingParams, StructuredOutputs
from .storage.options import StoreOptions
from .utils.control_groups import processor_limit

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .drop_in import OffloadedCache, offload
    from .llm import LLM
    from .writing.writer import write_document

    __version__: str

# torch uses one thread per processor of the machine, but the limit of a container may be lower. OpenMP reads this
# variable only once, when torch is imported.
if "torch" not in sys.modules and "OMP_NUM_THREADS" not in os.environ and (_limit := processor_limit()) is not None:
    os.environ["OMP_NUM_THREADS"] = str(_limit)

__all__ = [
    "LLM",
    "ArtifactError",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "DiskError",
    "EngineConfig",
    "EngineError",
    "InputError",
    "Logprob",
    "MemoryLimitError",
    "ModelError",
    "OffloadError",
    "OffloadedCache",
    "PoolFullError",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "SessionBusyError",
    "StoreError",
    "StoreOptions",
    "StructuredOutputs",
    "__version__",
    "offload",
    "write_document",
]


_LATER = {
    "LLM": ".llm",
    "AsyncLLM": ".async_llm",
    "OffloadedCache": ".drop_in",
    "offload": ".drop_in",
    "write_document": ".writing.writer",
}


def __getattr__(name: str) -> Any:
    """Import `name` on first use (PEP 562)."""
    if name in _LATER:
        found = getattr(importlib.import_module(_LATER[name], __name__), name)
    elif name == "__version__":
        found = importlib.import_module("importlib.metadata").version("offload-rt")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

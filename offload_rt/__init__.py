"""Run language models on long contexts whose KV cache lives in host memory.

from offload_rt import LLM, SamplingParams

llm = LLM("reference")
for event in llm.stream("It was a dark night", SamplingParams(max_new_tokens=100)):
    print(event.text, end="", flush=True)
"""

from .config import EngineConfig, SamplingParams
from .errors import (
    ArtifactError,
    ConfigError,
    InputError,
    MemoryLimitError,
    ModelError,
    OffloadError,
    PoolFullError,
    StoreError,
)
from .llm import LLM

__all__ = [
    "LLM",
    "ArtifactError",
    "ConfigError",
    "EngineConfig",
    "InputError",
    "MemoryLimitError",
    "ModelError",
    "OffloadError",
    "PoolFullError",
    "SamplingParams",
    "StoreError",
]

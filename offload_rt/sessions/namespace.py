"""The namespace of a session store: the model and the number format of its KV."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import torch

from ..config import DType, KVFormatName
from ..kv_cache.prefix_tree import root_key
from ..storage.chunk_file import LAYOUT_VERSION


@dataclass(frozen=True)
class Namespace:
    """KV of one namespace is never used in another. `kv_cache_dtype`: name of a `KVFormat` (the dtype for "auto")."""

    fingerprint: str
    dtype: torch.dtype
    kv_cache_dtype: str

    def __str__(self) -> str:
        return f"{self.fingerprint} {self.dtype} {self.kv_cache_dtype} v{LAYOUT_VERSION}"

    @property
    def folder_name(self) -> str:
        """Name of its folder in a store."""
        return root_key(str(self)).hex()

    @property
    def options(self) -> str:
        """The number format as arguments of `LLM`."""
        dtype = str(self.dtype).removeprefix("torch.")
        shown = "auto" if self.kv_cache_dtype == dtype else self.kv_cache_dtype
        return f"dtype={dtype!r} and kv_cache_dtype={shown!r}"

    def siblings(self) -> Iterator[Namespace]:
        """Yield the namespaces of the same model in all other number formats."""
        dtypes = [name for name in get_args(DType) if name != "auto"]
        for dtype, kv_cache_dtype in itertools.product(dtypes, get_args(KVFormatName)):
            stored = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
            sibling = replace(self, dtype=getattr(torch, dtype), kv_cache_dtype=stored)
            if sibling != self:
                yield sibling

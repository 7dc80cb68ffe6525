"""Namespace of a session store: the model and the number format of its KV."""

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
    """Identity of the KV of a model. KV is used only in its own namespace.

    Attributes:
        fingerprint: Fingerprint of the model.
        dtype: Number format of the computation.
        kv_cache_dtype: Name of the `KVFormat`; for "auto", the name of `dtype`.
    """

    fingerprint: str
    dtype: torch.dtype
    kv_cache_dtype: str

    def __str__(self) -> str:
        return f"{self.fingerprint} {self.dtype} {self.kv_cache_dtype} v{LAYOUT_VERSION}"

    @property
    def folder_name(self) -> str:
        """Folder name of the namespace in a store."""
        return root_key(str(self)).hex()

    @property
    def options(self) -> str:
        """Number format, written as arguments of `LLM`."""
        dtype = str(self.dtype).removeprefix("torch.")
        shown = "auto" if self.kv_cache_dtype == dtype else self.kv_cache_dtype
        return f"dtype={dtype!r} and kv_cache_dtype={shown!r}"

    def siblings(self) -> Iterator[Namespace]:
        """Yield the namespaces of the same model with all other number formats."""
        dtypes = [name for name in get_args(DType) if name != "auto"]
        for dtype, kv_cache_dtype in itertools.product(dtypes, get_args(KVFormatName)):
            stored = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
            sibling = replace(self, dtype=getattr(torch, dtype), kv_cache_dtype=stored)
            if sibling != self:
                yield sibling

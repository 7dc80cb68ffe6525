"""Importers of checkpoint folders with packed weights, chosen by `quant_method` in the configuration."""

from __future__ import annotations

from .awq import AWQ
from .base import Importer
from .compressed_tensors import CompressedTensors
from .gptq import GPTQ
from .mxfp4 import MXFP4Experts

IMPORTERS: dict[str, Importer] = {
    importer.method: importer for importer in (GPTQ(), AWQ(), CompressedTensors(), MXFP4Experts())
}

"""Fixtures of the server's tests."""

from __future__ import annotations

import pytest
from support.serving import reference_tokenizer
from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return reference_tokenizer()

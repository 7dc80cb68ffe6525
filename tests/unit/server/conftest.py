"""Fixtures for tests of the server.

A test module may define `say`, which returns the answer to a prompt, and `SERVED`, the options of the server.

If this folder is named on the command line, pytest reads this file before `pytest_collection` selects Triton's
interpreter. Functions therefore import torch and transformers, which import Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

if TYPE_CHECKING:
    from support.serving import ScriptedEngine
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    from support.serving import reference_tokenizer

    return reference_tokenizer()


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    from support.serving import ScriptedEngine

    return ScriptedEngine(tokenizer, getattr(request.module, "say", lambda prompt: "It was a dark night."))


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, engine: ScriptedEngine) -> Iterator[str]:
    from support.serving import run_server

    with run_server(engine, **getattr(request.module, "SERVED", {})) as address:
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url) as made:
        yield made


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, url: str) -> Iterator[openai.OpenAI]:
    key, *_ = getattr(request.module, "SERVED", {}).get("api_keys", ("none",))
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made

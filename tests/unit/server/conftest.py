"""Fixtures for a server with scripted answers.

A test module may define `say(prompt)`, which returns the answer to a prompt, and `SERVER_OPTIONS`.

torch and transformers are imported only in fixtures, because both import Triton. If this folder is given on the command
line, pytest loads this file before Triton's interpreter is selected.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

if TYPE_CHECKING:
    from support.serving import ScriptedEngine
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session", autouse=True)
def shared_ssl_context() -> Iterator[None]:
    """Read the certificates only once. Otherwise, each client would spend 50 ms on it, although no test uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


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

    with run_server(engine, **getattr(request.module, "SERVER_OPTIONS", {})) as address:
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url) as made:
        yield made


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, url: str) -> Iterator[openai.OpenAI]:
    key, *_ = getattr(request.module, "SERVER_OPTIONS", {}).get("api_keys", ("none",))
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made

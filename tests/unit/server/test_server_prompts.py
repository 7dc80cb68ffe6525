"""Test long prompts: too long ones are refused before tokenization, and others do not delay short prompts."""

from __future__ import annotations

import random
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from support.serving import ScriptedEngine, reference_tokenizer, run_server, wait_until
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from offload_rt.server import prompts
from offload_rt.server.tokenizing import NFC_SHRINKS, max_token_bytes

CORPUS = [
    "It was a dark night, and the river was high.",
    "  deep\n\n\twater 1234 5678 don't DON'T",
    "的 é à ﬁ 한국어 …",
    "a b c",
]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(
    normalizer: Any = None, pre_tokenizer: Any = None, model: Any = None, *added: AddedToken
) -> PreTrainedTokenizerBase:
    made = Tokenizer(model or models.BPE(byte_fallback=False))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ▁"]
    kind: dict[type, Callable[..., Any]] = {
        models.BPE: trainers.BpeTrainer, models.WordPiece: trainers.WordPieceTrainer,
        models.Unigram: trainers.UnigramTrainer,
    }  # fmt: skip
    special = ["[UNK]"]
    trainer = kind[type(made.model)](
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS * 20, trainer)
    made.add_tokens([AddedToken("<|end|>", normalized=False), *added])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_level(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gemma() -> PreTrainedTokenizerBase:
    """Create a tokenizer like Gemma's: it does not split the text, but no token continues after a space."""
    made = trained(None, pre_tokenizers.Metaspace(prepend_scheme="never"), models.BPE(byte_fallback=True))
    backend = made.backend_tokenizer  # type: ignore[attr-defined]
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


BOUNDED: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "reference": reference_tokenizer,
    "gpt2": lambda: trained(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: trained(None, byte_level(LLAMA)),
    "qwen": lambda: trained(normalizers.NFC(), byte_level(LLAMA)),
    "gemma": gemma,
    "prefix": lambda: trained(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "prepend": lambda: trained(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "behind spaces": lambda: trained(None, pre_tokenizers.Split(" ", "merged_with_previous")),
    "pattern": lambda: trained(None, byte_level(r"[a-z]+ [a-z]+|.")),
}
"""Tokenizers with a limit on the text of a token, by model family or special step."""

UNBOUNDED: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "lstrip": lambda: trained(None, byte_level(LLAMA), None, AddedToken("high", lstrip=True)),
    "unigram": lambda: trained(normalizers.NFKC(), pre_tokenizers.Metaspace(), models.Unigram()),
    "wordpiece": lambda: trained(
        normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), models.WordPiece(unk_token="[UNK]")
    ),
}
"""Tokenizers that remove or join parts of a text, so that a token may represent text of any length."""


def text_of(seed: int, size: int) -> str:
    rng = random.Random(seed)
    words = ["a", "bc", " ", "  ", "\n", "\t", "12", "é", "的", "e\u0301", "\u1112\u1161\u11ab", ".", "'s"]
    words += ["<|end|>", "▁", "Ġ", " high", " the", "x y"]
    return "".join(rng.choice(words) for _ in range(size))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_token_represents_no_more_bytes(name: str) -> None:
    tokenizer = BOUNDED[name]()
    most = max_token_bytes(tokenizer)
    assert most is not None and most < 600
    longest = max(tokenizer.get_vocab(), key=len) * 50
    for text in (longest, *(text_of(seed, 200) for seed in range(60))):
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert len(text.encode()) <= most * tokens


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokens_without_a_limit_have_no_bound(name: str) -> None:
    assert max_token_bytes(UNBOUNDED[name]()) is None


def test_nfc_shrinks_texts_within_the_bound() -> None:
    """Every character is checked with the longest canonical equivalents of its parts."""
    longest: dict[str, int] = {}
    found = ((chr(i), unicodedata.decomposition(chr(i))) for i in range(0x30000))
    characters = [character for character, parts in found if parts and "<" not in parts]
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        size = sum(max(len(part.encode()), longest.get(part, 0)) for part in parts)
        assert size <= NFC_SHRINKS * len(unicodedata.normalize("NFC", character).encode())


class Recorded:
    """Tokenizer that records the lengths of its texts. Long texts wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.asked, self.given_back = threading.Event(), list[int](), 0
        whole = prompts.encode_rendered

        def encode_rendered(tokenizer: Any, text: str, **named: Any) -> list[int]:
            self.asked.append(len(text))
            if len(text) > 1000:
                assert self.go.wait(20)
            return whole(tokenizer, text, **named)

        def give_back() -> None:
            self.given_back += 1

        monkeypatch.setattr(prompts, "encode_rendered", encode_rendered)
        monkeypatch.setattr(prompts, "give_back", give_back)


PATHS: dict[str, Callable[[str], Any]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": ["short", text]},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/tokenize": lambda text: {"prompt": text},
}


def test_a_prompt_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client must get an answer before the connection closes."""
    recorded = Recorded(monkeypatch)
    engine = ScriptedEngine(reference_tokenizer(), lambda prompt: "Yes.")
    with run_server(engine, timeout=0.1) as url, ThreadPoolExecutor(len(PATHS)) as threads:
        try:
            text = "It was a dark night. " * 50
            posts = {
                path: threads.submit(httpx2.post, url + path, json=body(text), timeout=30)
                for path, body in PATHS.items()
            }
            for path, post in posts.items():
                answer = post.result()
                assert answer.status_code == 408, path
                assert answer.json()["error"]["type"] == "timeout_error"
        finally:
            recorded.go.set()


def test_prompts_that_can_never_fit_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    engine = ScriptedEngine(reference_tokenizer(), lambda prompt: "Yes.")
    with run_server(engine) as url, httpx2.Client(base_url=url, timeout=30) as http:
        for path, body in PATHS.items():
            answer = http.post(path, json=body("It was a dark night. " * 40_000))
            assert answer.status_code == 400, path
            assert "maximum context length is 4,096" in answer.json()["error"]["message"]
        assert max(recorded.asked) < 1000 and engine.begun == 0
        assert recorded.given_back == len(PATHS)


@pytest.mark.slow
def test_a_long_prompt_delays_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    engine = ScriptedEngine(reference_tokenizer(), lambda prompt: "Yes.")
    engine.llm.geometry.max_positions = engine.llm.max_model_len = 10**7
    long = {"prompt": "It was a dark night. " * 40_000, "max_tokens": 2}
    with run_server(engine) as url, ThreadPoolExecutor(2) as threads:
        leaving = httpx2.Client(base_url=url, timeout=0.5)
        waiting = [threads.submit(leaving.post, "/v1/completions", json=long) for _ in range(2)]
        wait_until(lambda: len(recorded.asked) == 1)
        with httpx2.Client(base_url=url, timeout=20) as http:
            short = http.post("/v1/completions", json={"prompt": "Who?", "max_tokens": 2})
            assert short.status_code == 200, "beside a long one"
            assert all(isinstance(each.exception(), httpx2.TimeoutException) for each in waiting)
            leaving.close()
            recorded.go.set()
            wait_until(lambda: recorded.given_back == 1)
            assert [size for size in recorded.asked if size > 1000] == recorded.asked[:1], "one of the two"
            assert http.post("/v1/completions", json=long).status_code == 200

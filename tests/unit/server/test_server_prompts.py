"""Test long prompts: they do not delay short ones, and if they cannot fit, they are refused before tokenization."""

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
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from offload_rt.outputs import Logprob
from offload_rt.server import prompts
from offload_rt.server.openai.text_offsets import TextOffsets, prompt_offsets
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


def train_tokenizer(
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


def gemma_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer like Gemma's, which applies BPE to the whole text without splitting it first."""
    made = train_tokenizer(None, pre_tokenizers.Metaspace(prepend_scheme="never"), models.BPE(byte_fallback=True))
    backend = made.backend_tokenizer  # type: ignore[attr-defined]
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


BOUNDED: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "reference": reference_tokenizer,
    "gpt2": lambda: train_tokenizer(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: train_tokenizer(None, byte_level(LLAMA)),
    "qwen": lambda: train_tokenizer(normalizers.NFC(), byte_level(LLAMA)),
    "gemma": gemma_tokenizer,
    "prefix": lambda: train_tokenizer(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "prepend": lambda: train_tokenizer(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "behind spaces": lambda: train_tokenizer(None, pre_tokenizers.Split(" ", "merged_with_previous")),
    "pattern": lambda: train_tokenizer(None, byte_level(r"[a-z]+ [a-z]+|.")),
}
"""Tokenizers that limit how long the text of a token can be, by model family or special step."""

UNBOUNDED: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "lstrip": lambda: train_tokenizer(None, byte_level(LLAMA), None, AddedToken("high", lstrip=True)),
    "unigram": lambda: train_tokenizer(normalizers.NFKC(), pre_tokenizers.Metaspace(), models.Unigram()),
    "wordpiece": lambda: train_tokenizer(
        normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), models.WordPiece(unk_token="[UNK]")
    ),
}
"""Tokenizers that remove or join parts of a text, so that one token may represent text of any length."""


def text_of(seed: int, size: int) -> str:
    rng = random.Random(seed)
    words = ["a", "bc", " ", "  ", "\n", "\t", "12", "é", "的", "e\u0301", "\u1112\u1161\u11ab", ".", "'s"]
    words += ["<|end|>", "▁", "Ġ", " high", " the", "x y"]
    return "".join(rng.choice(words) for _ in range(size))


@pytest.mark.parametrize("name", BOUNDED)
def test_tokens_represent_at_most_the_computed_bytes(name: str) -> None:
    tokenizer = BOUNDED[name]()
    most = max_token_bytes(tokenizer)
    assert most is not None and most < 600
    longest = max(tokenizer.get_vocab(), key=len) * 50
    for text in (longest, *(text_of(seed, 200) for seed in range(60))):
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert len(text.encode()) <= most * tokens


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_without_a_limit_have_no_bound(name: str) -> None:
    assert max_token_bytes(UNBOUNDED[name]()) is None


def test_nfc_shortens_no_text_by_more_than_the_bound() -> None:
    longest: dict[str, int] = {}  # bytes of the longest character that is equivalent to a part
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


class TokenizationRecorder:
    """Records the lengths of tokenized texts. Texts of more than 1,000 characters wait until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.lengths, self.given_back = threading.Event(), list[int](), 0
        whole = prompts.encode_rendered

        def encode_rendered(tokenizer: Any, text: str, **named: Any) -> list[int]:
            self.lengths.append(len(text))
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


def test_a_prompt_that_waits_too_long_gets_status_408(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TokenizationRecorder(monkeypatch)
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
            recorder.go.set()


def test_prompts_that_can_never_fit_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TokenizationRecorder(monkeypatch)
    engine = ScriptedEngine(reference_tokenizer(), lambda prompt: "Yes.")
    with run_server(engine) as url, httpx2.Client(base_url=url, timeout=30) as http:
        for path, body in PATHS.items():
            answer = http.post(path, json=body("It was a dark night. " * 40_000))
            assert answer.status_code == 400, path
            assert "maximum context length is 4,096" in answer.json()["error"]["message"]
        assert max(recorder.lengths) < 1000 and engine.begun == 0
        assert recorder.given_back == len(PATHS)


@pytest.mark.slow
def test_a_long_prompt_delays_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TokenizationRecorder(monkeypatch)
    engine = ScriptedEngine(reference_tokenizer(), lambda prompt: "Yes.")
    engine.llm.runner.max_positions = engine.llm.max_model_len = 10**7
    long = {"prompt": "It was a dark night. " * 15_000, "max_tokens": 2}
    with run_server(engine) as url, ThreadPoolExecutor(2) as threads:
        leaving = httpx2.Client(base_url=url, timeout=0.5)
        waiting = [threads.submit(leaving.post, "/v1/completions", json=long) for _ in range(2)]
        wait_until(lambda: len(recorder.lengths) == 1)
        with httpx2.Client(base_url=url, timeout=20) as http:
            short = http.post("/v1/completions", json={"prompt": "Who?", "max_tokens": 2})
            assert short.status_code == 200, "the long prompt does not delay it"
            assert all(isinstance(each.exception(), httpx2.TimeoutException) for each in waiting)
            leaving.close()
            recorder.go.set()
            wait_until(lambda: recorder.given_back == 1)
            assert [size for size in recorder.lengths if size > 1000] == recorder.lengths[:1], (
                "the cancelled request is not tokenized"
            )
            assert http.post("/v1/completions", json=long).status_code == 200


def test_positions_in_an_echoed_prompt_count_no_special_tokens_and_no_first_space() -> None:
    tokenizer: Any = train_tokenizer(None, pre_tokenizers.Metaspace(), models.BPE())
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    text = "It was a<s> dark night"
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    texts = [str(tokenizer.decode([token] * 2))[len(tokenizer.decode([token])) :] for token in ids]
    logprobs = [None, *({token: Logprob(-1.0, 1, piece)} for token, piece in zip(ids[1:], texts[1:], strict=True))]
    found = prompt_offsets(tokenizer, ids, logprobs, text)
    assert found[:2] == [0, 0] and texts[1].startswith(" ") and found[-1] == len(text) - len(texts[-1])
    assert all(text.startswith(piece, at) for piece, at in zip(texts[2:], found[2:], strict=True))


def test_a_token_within_a_character_has_its_position_after_a_token_with_a_space() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = models.BPE({letter: i for i, letter in enumerate([*letters, "Ġâ"])}, [("Ġ", "â")])
    backend = Tokenizer(merged)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    ids, end = tokenizer("a \N{SNOWMAN} b")["input_ids"], tokenizer.eos_token_id
    offsets = TextOffsets(tokenizer, (), 0, special=False)
    assert [offsets.add(token) for token in [*ids[:2], end, *ids[2:]]] == [0, 1, 2, 2, 2, 3, 4]

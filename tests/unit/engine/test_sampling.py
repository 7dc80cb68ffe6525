"""Test sampling, seeds, stop strings, and text that ends in an incomplete character."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outputs import completed
from support.sampling import examples
from support.tiny_models import tiny_model, tiny_prompt
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from offload_rt import LLM, SamplingParams
from offload_rt.core import Prompt
from offload_rt.engine.detokenizer import TextStream, token_bytes, token_text
from offload_rt.engine.request import SampledRequest
from offload_rt.engine.sampler import Sampler, logprobs_of
from offload_rt.models.loading import load_model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded = load_model("reference").tokenizer
    assert loaded is not None
    return loaded


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"min_p": 0.3},
        {"repetition_penalty": 50.0},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_filtered_distribution(options: dict[str, float]) -> None:
    model = tiny_model("llama")
    prompt = tiny_prompt(5)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 5, dtype=torch.long),
        max_new_tokens=1,
        do_sample=True,
        output_scores=True,
        return_dict_in_generate=True,
        **({"top_k": 0} | options),
    )
    expected = torch.softmax(out.scores[0][0].double(), dim=-1)
    logits = model(torch.tensor([prompt])).logits[0, -1].float()
    sampler = Sampler(SamplingParams(seed=0, **options))  # type: ignore[arg-type]
    counts = torch.bincount(
        torch.tensor([sampler.pick(logits, prompt, shift=i) for i in range(2000)]), minlength=len(expected)
    )
    assert not counts[expected == 0].any()
    error = (expected * (1 - expected) / 2000).sqrt()  # standard error of 2,000 draws
    assert ((counts / 2000 - expected).abs() <= 5 * error + 1e-3).all()


def test_the_same_seed_gives_the_same_text_in_any_batch() -> None:
    llm = LLM(tiny_model("llama", dtype=torch.float32), policy="full", host_memory="8MiB", dtype="float32")
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
    alone = completed(llm.generate([tiny_prompt(9)], params))[0].token_ids
    in_batch = completed(llm.generate([tiny_prompt(30, seed=3), tiny_prompt(9)], params))[1].token_ids
    other = completed(llm.generate([tiny_prompt(9)], SamplingParams(max_tokens=20, temperature=1.0, seed=8)))[
        0
    ].token_ids
    assert alone == in_batch
    assert alone != other


def test_eos_ends_a_text_unless_it_is_ignored() -> None:
    model = tiny_model("llama")
    free = completed(
        LLM(model, policy="full", host_memory="8MiB").generate(
            [tiny_prompt(5)], SamplingParams(max_tokens=30, temperature=0)
        )
    )[0]
    eos = free.token_ids[10]
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    llm = LLM(model, policy="full", host_memory="8MiB")
    [stopped] = completed(llm.generate([tiny_prompt(5)], SamplingParams(max_tokens=30, temperature=0)))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    [ignored] = completed(llm.generate([tiny_prompt(5)], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)))
    assert ignored.token_ids == free.token_ids and ignored.finish_reason == "length"


@settings(max_examples=examples(50))
@given(text=st.text(max_size=60))
def test_streamed_pieces_add_up_to_the_decoded_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, ())
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])


@pytest.fixture(scope="session")
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer that works like the one of Llama 2.

    Spaces are part of tokens, unknown characters become bytes, and decoding removes the space before the first word.
    """
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    words = [" the arrow shot Dick , who went the black way ."] * 4
    tokenizer.train_from_iterator(words, BpeTrainer(vocab_size=100, special_tokens=["<unk>", "<s>", "</s>"]))
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    # These are not special tokens, because they have text.
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def metaspace_tokenizer(llama_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(llama_tokenizer.backend_tokenizer.to_str())
    steps = [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizers(
    llama_tokenizer: PreTrainedTokenizerFast,
    metaspace_tokenizer: PreTrainedTokenizerFast,
    tokenizer: PreTrainedTokenizerBase,
) -> list[PreTrainedTokenizerBase]:
    return [llama_tokenizer, metaspace_tokenizer, tokenizer]


@settings(deadline=None)
@given(data=st.data())
def test_prompt_and_streamed_text_add_up_to_the_decoded_text(
    tokenizers: list[PreTrainedTokenizerBase], data: st.DataObject
) -> None:
    used = data.draw(st.sampled_from(tokenizers))
    words = st.sampled_from(["the", "arrow", " ", "é", "\N{SNOWMAN}\N{GRINNING FACE}", "<s>", "</s>", "\n"])
    text = data.draw(st.sampled_from(["", " "])).join(data.draw(st.lists(words, min_size=1, max_size=12)))
    ids = used(text, add_special_tokens=data.draw(st.booleans()))["input_ids"]
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(used, (), prompt=ids[:cut])
    shown = "".join([stream.push(token) for token in ids[cut:]] + [stream.flush()])
    whole, *befores = (used.decode(ids[:end], skip_special_tokens=True) for end in (len(ids), *range(cut, -1, -1)))
    before = next(before for before in befores if whole.startswith(before))  # skips an incomplete character at the end
    assert before + shown == whole


class CountingTokenizer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.decoded: list[int] = []

    def decode(self, tokens: list[int], **options: Any) -> Any:
        self.decoded.append(len(tokens))
        return self._tokenizer.decode(tokens, **options)


@pytest.mark.parametrize("token", ["</s>", "<0x80>", "<0xE2>", "▁"])
@pytest.mark.parametrize("before", [[], ["</s>"] * 500, ["<0x80>"] * 500, ["▁", "t"]])
def test_decoding_a_token_reads_few_earlier_tokens(
    llama_tokenizer: PreTrainedTokenizerFast, before: list[str], token: str
) -> None:
    counting: Any = CountingTokenizer(llama_tokenizer)
    prompt = llama_tokenizer.convert_tokens_to_ids(before)
    stream = TextStream(counting, (), prompt=prompt)
    text = "".join(stream.push(llama_tokenizer.convert_tokens_to_ids(token)) for _ in range(500)) + stream.flush()
    assert max(counting.decoded) < 50 and sum(counting.decoded) < 50 * 1000
    assert len(text) in {"</s>": (0,), "▁": (499, 500)}.get(token, (500,))


def test_texts_of_tokens_add_up_to_the_text(llama_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = llama_tokenizer("the arrow, the", add_special_tokens=False)["input_ids"]
    texts = [token_text(llama_tokenizer, token) for token in ids]
    assert "".join(text or "" for text in texts) == " the arrow, the"
    assert token_text(llama_tokenizer, llama_tokenizer.eos_token_id) == "</s>" and token_text(None, 1) is None


@settings(deadline=None, max_examples=examples(50))
@given(data=st.data())
def test_bytes_of_tokens_add_up_to_the_text(tokenizers: list[PreTrainedTokenizerBase], data: st.DataObject) -> None:
    used = data.draw(st.sampled_from(tokenizers))
    text = data.draw(st.text(max_size=20) | st.text("the é\N{SNOWMAN}\N{GRINNING FACE}\ufffd<0xE4>", max_size=20))
    ids = used(text, add_special_tokens=False)["input_ids"]
    shown, _ = stream_text(used, ids, [], prompt=used("the", add_special_tokens=False)["input_ids"])
    found = [token_bytes(used, token, token_text(used, token) or "") for token in ids]
    assert b"".join(piece or b"" for piece in found) == shown.encode() and None not in found


def test_bytes_of_a_token_are_none_if_they_are_unknown(llama_tokenizer: PreTrainedTokenizerFast) -> None:
    space = llama_tokenizer.convert_tokens_to_ids("▁")
    assert token_bytes(llama_tokenizer, space, "\ufffd") is None is token_bytes(None, 1, "\ufffd")


def test_log_probabilities_show_the_space_of_a_token(llama_tokenizer: PreTrainedTokenizerFast) -> None:
    vocab = llama_tokenizer.get_vocab()
    word, token = next((word, token) for word, token in vocab.items() if word.startswith("▁") and len(word) > 1)
    [found] = logprobs_of(torch.zeros(1, len(llama_tokenizer)), [token], 0, llama_tokenizer)
    assert found[token].decoded_token == word.replace("▁", " ")


def stream_text(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: list[str], late: int = 0, **options: Any
) -> tuple[str, str | None]:
    """Stream tokens until a stop string ends the text. Return the text and the stop string."""
    stream, out = TextStream(tokenizer, stop, **options), ""
    for count, token in enumerate(ids, 1):
        out += stream.push(token, may_stop=count > late)
        if stream.stopped is not None:
            break
    return out + stream.flush(), stream.stopped


def test_stop_strings_may_begin_with_a_space(llama_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, answer = (llama_tokenizer(text)["input_ids"] for text in ("Who shot", "the arrow, the way"))
    assert stream_text(llama_tokenizer, answer, [" the"], prompt=prompt) == ("", " the")
    assert stream_text(llama_tokenizer, answer, [" way"], prompt=prompt) == (" the arrow, the", " way")


def test_stop_strings_are_kept_or_delayed_if_requested(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("It was a dark and stormy night", add_special_tokens=False)["input_ids"]
    stream, whole = functools.partial(stream_text, tokenizer, ids), tokenizer.decode(ids)
    assert stream(["dark", "night"]) == (whole[: whole.index("dark")], "dark")
    assert stream(["dark", "night"], keep_stop=True) == (whole[: whole.index("dark") + 4], "dark")
    assert stream(["dark", "night"], late=len(ids) - 1, keep_stop=True) == (whole, "night")
    assert stream(["dark"], late=len(ids)) == (whole, None)


def test_a_stop_string_may_share_its_last_token_with_a_character() -> None:
    vocab = {letter: i for i, letter in enumerate("ENDx\u0120\u00e2\u0122")}  # the last three are the bytes 20 e2 80
    merges = [("D", "\u00e2")]
    made = Tokenizer(BPE(vocab=vocab | {"D\u00e2": len(vocab)}, merges=merges))
    made.decoder = decoders.ByteLevel()
    used = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = used.convert_tokens_to_ids(["x", "E", "N", "D\u00e2"])
    assert stream_text(used, ids, ["END"]) == ("x", "END")
    assert stream_text(used, ids, ["END"], keep_stop=True) == ("xEND", "END")
    assert stream_text(used, ids, ["END!"]) == ("xEND\ufffd", None)
    assert stream_text(used, ids[:3], ["END"]) == ("xEN", None)
    request = SampledRequest(Prompt(0, (3,)), SamplingParams(max_tokens=3, stop=["END"]), used, frozenset())
    sequence: Any = SimpleNamespace(tokens=[3], position=1, shift=0)
    request.sequence = sequence
    for sequence.position, token in enumerate(ids[1:], 1):
        logits = torch.full((1, len(used)), -torch.inf)
        logits[0, token] = 0.0
        request.accept(sequence, logits, [token])
    assert (request.text, request.finish_reason, request.stop_reason) == ("", "stop", "END")


def test_bad_words_are_never_generated(tokenizer: PreTrainedTokenizerBase) -> None:
    vocab, word = len(tokenizer), "night"
    for spelled in (word, f" {word}"):
        ids = [int(token) for token in tokenizer(spelled, add_special_tokens=False)["input_ids"]]
        logits = torch.zeros(vocab)
        logits[ids[-1]] = 30.0  # the most probable token completes the word
        assert Sampler(SamplingParams(temperature=0), 0, (), tokenizer).pick(logits, [1, *ids[:-1]]) == ids[-1]
        params = SamplingParams(temperature=0, bad_words=[word])
        assert Sampler(params, 0, (), tokenizer).pick(logits, [1, *ids[:-1]]) != ids[-1]


@given(
    text=st.text(alphabet="ab ", max_size=40),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_is_shown(tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str]) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream, shown = TextStream(tokenizer, stop), ""
    for token in ids:
        shown += stream.push(token)
        if stream.stopped is not None:
            break
    shown += stream.flush()
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    ends = [at for at in (whole.find(s) for s in stop) if at >= 0]
    assert (stream.stopped is not None) == bool(ends)
    if ends:
        assert whole.startswith(shown) and not any(s in shown for s in stop)
        assert any(whole.startswith(s, len(shown)) for s in stop), "the text before the stop string is shown"
    else:
        assert shown == whole


def test_each_of_n_completions_has_its_own_seed() -> None:
    params, even = SamplingParams(seed=3, n=3), torch.zeros(500)
    drawn = []
    for sampler in (Sampler(params), *(Sampler(params, sample) for sample in range(3))):
        drawn.append(tuple(sampler.pick(even, [1], shift=place) for place in range(8)))
    # Eight draws from 500 equal logits do not agree by chance.
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3 and len(set(drawn[0])) > 4


@pytest.mark.slow
def test_random_draws_depend_only_on_seed_and_position() -> None:
    even = torch.zeros(500)
    sampler = Sampler(SamplingParams(seed=3))
    assert sampler.pick(even, [1] * 9) == sampler.pick(even, [1] * 9) == sampler.pick(even, [2] * 4, shift=5)
    assert sampler.copy().pick(even, [1] * 9) == sampler.pick(even, [1] * 9)
    llm = LLM(tiny_model("llama", dtype=torch.float64), policy="full", host_memory="8MiB", dtype="float64")
    [whole] = completed(llm.generate([tiny_prompt(9)], SamplingParams(max_tokens=20, seed=7)))
    for done in (1, 11):  # a second request continues the text
        prompt = [*tiny_prompt(9), *whole.token_ids[:done]]
        [rest] = completed(llm.generate([prompt], SamplingParams(max_tokens=20 - done, seed=7)))
        assert whole.token_ids[done:] == rest.token_ids
    two = torch.zeros(2)  # draws of different positions and seeds are independent
    draws = [[Sampler(SamplingParams(seed=s)).pick(two, [], shift=p) for p in range(200)] for s in range(20)]
    means = torch.tensor(draws).float()
    assert (means.mean(1) - 0.5).abs().max() < 5 * 0.5 / 200**0.5
    assert (torch.corrcoef(means) - torch.eye(20)).abs().max() < 5 / 200**0.5


def test_a_stop_string_ends_a_generation(tokenizer: PreTrainedTokenizerBase) -> None:
    llm = LLM("reference", policy="full", host_memory="64MiB")
    params = SamplingParams(max_tokens=24, temperature=0)
    [free] = completed(llm.generate(["It was a dark night, and"], params))
    stop = free.text[20:24]
    [stopped] = completed(
        llm.generate(["It was a dark night, and"], SamplingParams(max_tokens=24, temperature=0, stop=stop))
    )
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == free.text[: free.text.index(stop)]
    events = list(llm.stream("It was a dark night, and", SamplingParams(max_tokens=24, temperature=0, stop=[stop])))
    assert "".join(event.text for event in events) == stopped.text
    assert [event.index for event in events] == list(range(len(events)))
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1].stop_reason == stop

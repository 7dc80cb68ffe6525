"""Test how the reference model is trained: held-out data, passages with their answers, and resumed runs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.sampling import examples
from support.training import SCRIPTS, TINY, VOCABULARY, write_books
from transformers import AutoModelForCausalLM, LlamaConfig

# isort: split
# The training's scripts, which `support.training` puts on the path.
from build import blocked_causal_attention, grow, weighted_loss
from config import PRESETS, ReferenceShape, Stage
from data import (
    KINDS,
    TEST_BOOK,
    Corpus,
    Encoder,
    Mixture,
    copy_passage,
    load_corpus,
    make_batch,
    make_facts,
    make_passage,
    names,
    recall_passage,
    train_tokenizer,
    training_books,
)
from evaluate import bits_per_byte, nats_by_context, scored_bytes, token_bytes
from train import TrainingRun

KILLED_RUN = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from support.training import TINY
from train import TrainingRun
class Killed(TrainingRun):
    def train_step(self):
        if self.step == 5:  # after the checkpoint at 3, with two steps to lose
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step()
from rich.console import Console
Killed(TINY, Path({data!r}), Path({out!r}), None, None).train(Console(quiet=True))
"""


pytestmark = pytest.mark.training


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> Path:
    return write_books(tmp_path_factory.mktemp("books"))


@pytest.fixture(scope="session")
def tokenizer(books):
    return train_tokenizer(training_books(books), VOCABULARY)


@pytest.fixture(scope="session")
def corpus(books, tokenizer) -> Corpus:
    return load_corpus(training_books(books), tokenizer)


# Data


def test_empty_data_folder_is_an_error(tmp_path):
    (tmp_path / TEST_BOOK).write_text("held out", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"no \.txt file to train on"):
        training_books(tmp_path)


def test_names_are_split_once_for_all_kinds():
    training, held_out = set(names(False)), set(names(True))
    assert not training & held_out
    assert len(held_out) > 200
    assert 4 < len(training) / len(held_out) < 6  # one in six


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("held_out", [False, True])
def test_facts_use_only_names_of_their_split(kind, held_out):
    facts = make_facts(np.random.default_rng(1), 5, held_out=held_out, kinds=[kind])
    words = {w.strip(".") for fact in facts for s in fact.statements for w in s.replace("'s", "").split()}
    assert words & set(names(held_out))
    assert not words & set(names(not held_out))
    assert {fact.kind for fact in facts} == {kind}
    assert len({fact.key for fact in facts}) == 5


def test_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="kinds out of"):
        make_facts(np.random.default_rng(0), 2, held_out=False, kinds=["riddle"])


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.sampled_from([256, 512, 1024]), count=st.integers(1, 6), mix=st.booleans())
def test_passages_state_every_answer_before_its_question(seed, length, count, mix, tokenizer, corpus):
    rng = np.random.default_rng(seed)
    facts = make_facts(rng, count, held_out=bool(seed % 2))
    passage = make_passage(rng, length, facts, corpus, Encoder(tokenizer), interleave=mix)
    if passage is None:
        words = "".join("".join(f.statements) + "".join(p + a + "." for p, a in f.question) for f in facts)
        assert len(Encoder(tokenizer).piece(words)) > length
        return
    assert len(passage.ids) == len(passage.answer) == length
    assert sorted(kind for kind, _, _ in passage.questions) == sorted(fact.kind for fact in facts)
    positions = [p for _, at, _ in passage.questions for p in at]
    assert sorted(positions) == np.flatnonzero(passage.answer).tolist()
    for fact in facts:
        question = "".join(prompt + answer + "." for prompt, answer in fact.question)
        text = tokenizer.decode(passage.ids.tolist())
        asked = text.rindex(question)
        assert all(statement in text[:asked] for statement in fact.statements)
    for _, at, distance in passage.questions:
        assert 0 < distance <= at[0]


def test_a_question_has_several_answers():
    """If a question had the same answer in every passage, the model could memorise the answer."""
    answers: dict[str, set[str]] = {}
    rng = np.random.default_rng(2)
    for _ in range(3000):
        for fact in make_facts(rng, 2, held_out=True, kinds=["birthplace"]):
            answers.setdefault(fact.question[0][0], set()).add(fact.question[0][1])
    assert min(len(found) for found in answers.values()) >= 4


def test_chain_questions_follow_the_links():
    for fact in make_facts(np.random.default_rng(3), 4, held_out=False, kinds=["chain"]):
        for (_, answer), (prompt, _) in pairwise(fact.question):
            assert answer in prompt


def test_copy_passage_repeats_its_text(corpus):
    passage = copy_passage(np.random.default_rng(5), 256, corpus)
    second = passage.ids[passage.answer]
    at = [i for i in range(256 - 2 * len(second)) if np.array_equal(passage.ids[i : i + len(second)], second)]
    assert at


def test_batch_is_a_function_of_seed_and_step(tokenizer, corpus):
    arguments = (4, 256, Mixture(), corpus, Encoder(tokenizer))
    first, weights = make_batch(0, 11, *arguments)
    again, _ = make_batch(0, 11, *arguments)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, make_batch(0, 12, *arguments)[0])
    assert not np.array_equal(first, make_batch(1, 11, *arguments)[0])
    assert set(np.unique(weights)) == {np.float32(0.15), np.float32(1.0), np.float32(3.0)}


def test_training_passage_has_the_requested_length(tokenizer, corpus):
    rng = np.random.default_rng(9)
    assert all(
        len(recall_passage(rng, length, corpus, Encoder(tokenizer)).ids) == length for length in (256, 512, 1024)
    )
    with pytest.raises(ValueError, match="do not fit into 32 tokens"):
        recall_passage(rng, 32, corpus, Encoder(tokenizer))


# Configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "rising order"),
        ({"stages": (Stage(0.5, ((256, 1.0),)),)}, "last stage must end at 1.0"),
        ({"tokens_per_step": 64}, "tokens_per_step"),
        ({"total_tokens": 100}, "total_tokens"),
        ({"shape": replace(TINY.shape, max_positions=256)}, "exceed max_positions"),
        ({"peak_lr": 0.0}, "peak_lr > 0"),
    ],
)
def test_impossible_configurations_raise(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_impossible_mixtures_raise():
    with pytest.raises(ValueError, match="head_dim is 64"):
        ReferenceShape(hidden=100, heads=2)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        ReferenceShape(hidden=192, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="architecture must be"):
        ReferenceShape(architecture="mamba")
    with pytest.raises(ValueError, match="at most 1 together"):
        Mixture(recall=0.8, copy=0.4)
    with pytest.raises(ValueError, match="lengths >= 64"):
        Stage(1.0, ((32, 1.0),))


def test_presets_reach_their_final_context():
    assert PRESETS["cuda"].longest() == 16_384
    assert PRESETS["cpu"].longest() == PRESETS["opt"].longest() == 2048
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(PRESETS["cuda"].shape.config())
        hybrid = AutoModelForCausalLM.from_config(PRESETS["hybrid"].shape.config())
    assert 20e6 < sum(p.numel() for p in large.parameters()) < 30e6
    assert large.config.num_hidden_layers >= 8
    assert 2e6 < sum(p.numel() for p in hybrid.parameters()) < 4e6
    kinds = hybrid.config.layer_types
    assert kinds == [*["linear_attention"] * 3, "full_attention"] * 2


# Model


def test_grown_model_computes_the_same_logits():
    torch.manual_seed(0)
    small = ReferenceShape(vocab_size=64, layers=3, hidden=64, mlp=96, heads=1, kv_heads=1)
    model = AutoModelForCausalLM.from_config(small.config(), dtype=torch.float32)
    grown = grow(model, replace(small, layers=5))
    ids = torch.randint(0, 64, (2, 17))
    assert grown.config.num_hidden_layers == 5
    assert torch.equal(grown(ids).logits, model(ids).logits)  # zeros are added: not one bit may change
    with pytest.raises(ValueError, match="hidden_size"):
        grow(model, replace(small, layers=5, hidden=128, heads=2))


@pytest.mark.parametrize("architecture", ["llama", "opt", "qwen3_5"])
def test_model_of_the_target_shape_is_unchanged(architecture):
    shape = ReferenceShape(architecture, 64, layers=2, hidden=64, mlp=96, heads=1, kv_heads=1)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    assert grow(model, shape) is model
    with pytest.raises(ValueError, match="hidden_size"):
        grow(model, replace(shape, hidden=128, heads=2))


def test_opt_does_not_grow():
    shape = ReferenceShape("opt", 64, layers=1, hidden=64, mlp=96, heads=1, kv_heads=1)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    with pytest.raises(ValueError, match="1 layers"):
        grow(model, replace(shape, layers=2))


def test_shifted_sequences_use_their_start_positions():
    torch.manual_seed(0)
    shape = ReferenceShape("opt", 64, layers=1, hidden=64, mlp=96, heads=1, kv_heads=1, max_positions=64)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    ids, weights = torch.randint(0, 64, (2, 10)), torch.ones(2, 10)
    model.train(False)
    moved = torch.nn.functional.cross_entropy(
        model(ids, position_ids=torch.arange(54, 64)[None]).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    torch.testing.assert_close(weighted_loss(model, ids, weights, 54), moved)
    assert weighted_loss(model, ids, weights, 54) != weighted_loss(model, ids, weights)


def test_shifted_steps_start_at_any_valid_position():
    config = replace(TINY, shifted=0.5, total_tokens=1024 * 400)
    begins = [config.first_position(step) for step in range(400)]
    assert 120 < sum(begin == 0 for begin in begins) < 300  # half of the steps, and those of full length
    assert max(begins) > 200
    longest = config.shape.max_positions
    assert all(begin + config.length(step) <= longest for step, begin in enumerate(begins))
    assert {TINY.first_position(step) for step in range(50)} == {0}
    with pytest.raises(ValueError, match="shifted"):
        replace(TINY, shifted=1.5)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_blocked_attention_is_causal_attention(architecture):
    torch.manual_seed(0)
    shape = ReferenceShape(architecture, 64, layers=2, hidden=256, mlp=64, heads=4, kv_heads=2, max_positions=256)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    ids, weights = torch.randint(0, 64, (2, 200)), torch.ones(2, 200)
    found = {}
    from transformers import AttentionInterface

    AttentionInterface.register("blocked_causal", blocked_causal_attention)
    for name in ("sdpa", "blocked_causal"):
        model.set_attn_implementation(name)
        model.zero_grad()
        loss = weighted_loss(model, ids, weights)
        loss.backward()
        found[name] = (loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]))
    # float32 sums are in another order, so only rounding differs
    torch.testing.assert_close(found["sdpa"][0], found["blocked_causal"][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["sdpa"][1], found["blocked_causal"][1], rtol=0, atol=2e-6)


# Running


def _state(folder: Path) -> dict:
    return torch.load(folder / "state.pt", weights_only=True)


def _assert_equal(left, right, path="state"):
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            _assert_equal(left[key], right[key], f"{path}.{key}")
    else:
        assert left == right, path


def test_killed_run_resumes_bit_for_bit(books, tmp_path):
    quiet = Console(quiet=True)
    TrainingRun(TINY, books, tmp_path / "whole", None, None).train(quiet)
    paths = [str(SCRIPTS), str(Path(__file__).parents[2])]
    code = KILLED_RUN.format(paths=paths, data=str(books), out=str(tmp_path / "killed"))
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert _state(tmp_path / "killed")["step"] == 3
    resumed = TrainingRun(TINY, books, tmp_path / "killed", None, None)
    assert resumed.step == 3
    resumed.train(quiet)
    _assert_equal(_state(tmp_path / "whole"), _state(tmp_path / "killed"))
    assert len({len(p) for p in (list((tmp_path / n / "checkpoint").iterdir()) for n in ("whole", "killed"))}) == 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "killed" / "checkpoint", dtype=torch.bfloat16)
    torch.testing.assert_close(exported.state_dict(), {k: v.bfloat16() for k, v in resumed.model.state_dict().items()})


def test_interrupted_run_loses_no_step(books, tmp_path):
    class Interrupted(TrainingRun):
        def train_step(self) -> float:
            if self.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train_step()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    run = Interrupted(TINY, books, tmp_path, None, None)
    run.train(Console(quiet=True))
    assert run.step == 5
    assert _state(tmp_path)["step"] == 5  # between two regular checkpoints
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_other_settings_do_not_resume(books, tmp_path):
    run = TrainingRun(TINY, books, tmp_path, None, None)
    run.train_step()
    run.save()
    with pytest.raises(ValueError, match="other settings or data"):
        TrainingRun(replace(TINY, seed=1), books, tmp_path, None, None)
    longer = TrainingRun(replace(TINY, total_tokens=2 * TINY.total_tokens), books, tmp_path, None, None)
    assert longer.step == 1


# Evaluation


def _uniform_model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def test_uniform_model_scores_log_vocabulary(tokenizer, corpus):
    sample = {"windows": 3, "scored": 32}
    nats = nats_by_context(_uniform_model(), corpus.ids, [64, 128], batch=2, **sample)
    for context in (64, 128):
        np.testing.assert_allclose(nats[context], 32 * math.log(VOCABULARY), rtol=1e-6)
    sizes = scored_bytes(tokenizer, corpus.ids, 128, **sample)
    assert bits_per_byte(nats[64], sizes) == pytest.approx(3 * 32 * math.log2(VOCABULARY) / sizes.sum(), rel=1e-6)
    with pytest.raises(ValueError, match="longest context"):
        nats_by_context(_uniform_model(), corpus.ids[:100], [128], batch=1, **sample)


def test_token_bytes_sum_to_the_text(books, tokenizer, corpus):
    whole = sum(book.stat().st_size for book in training_books(books))
    assert token_bytes(tokenizer)[corpus.ids].sum() == whole

"""Test cases ("cells") that run a sequence of requests (a "scene") on a CPU and on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.model_runner.cuda_graphs import GraphSteps
from offload_rt.models.shape import load_shape
from offload_rt.planning.memory_model import DeviceCosts
from offload_rt.policies.registry import memory_demand
from offload_rt.sessions.request_factory import StoredRequestFactory
from offload_rt.transfer.weights.streamed import BUFFERS

from .architectures import architecture
from .cuda_simulator import Late, Lazy, Schedule, Seeded
from .outputs import completed
from .tiny_models import VOCAB, tiny_checkpoint, tiny_model, tiny_prompt

Answers = list[list[int]]
Scene = Callable[[Callable[..., LLM], Path], Answers]
"""A function that creates runtimes with the given factory, runs requests, and returns the answers."""

WINDOW: dict[str, Any] = {"sinks": 2, "recent": 8}
SPARSE: dict[str, Any] = WINDOW | {"preset": "rows", "alpha": 2.0, "max_fraction": 0.3}


def single(make: Callable[..., LLM], folder: Path) -> Answers:
    return answers(make(), [tiny_prompt(70)], 4)


def ragged(make: Callable[..., LLM], folder: Path) -> Answers:
    return answers(make(), [tiny_prompt(n, seed=n) for n in (30, 70, 63)], 3)


def replayed(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode across a block boundary, with CUDA graphs for 64 and 128 tokens."""
    return answer_joining_prompts(make(), [59, 60, 31], 6, {(4, 64), (4, 128)})


def drafted(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode with draft tokens across a block boundary, with at least two CUDA graphs."""
    llm = make()
    found = answers(llm, [tiny_prompt(59), tiny_prompt(60, seed=1)], 9)
    assert (graphs := captured_graphs(llm)) is None or graphs.total() >= 2
    return found


def joining(make: Callable[..., LLM], folder: Path) -> Answers:
    """Add nine sequences one by one to a batch that uses CUDA graphs for batch sizes 4, 8 and 16."""
    return answer_joining_prompts(make(), range(30, 39), 2, {(4, 64), (8, 64), (16, 64)})


def answer_joining_prompts(llm: LLM, lengths: Sequence[int], steps: int, sizes: set[tuple[int, int]]) -> Answers:
    """Add one prompt in each step, then run `steps` more steps. Return the greedy answers.

    `lengths` are the prompt lengths. `sizes` are the (batch size, capacity in tokens) pairs of the expected CUDA
    graphs.
    """
    prompts = [tiny_prompt(n, seed=i) for i, n in enumerate(lengths)]
    most = [len(prompts) - i + steps for i in range(len(prompts))]
    completions = completed(llm.generate(prompts, [SamplingParams(n, temperature=0) for n in most]))
    llm.runner.check_integrity()
    assert captured_graphs(llm) in (None, Counter(sizes))
    return [[*one.token_ids, one.stats.h2d_bytes] for one in completions]


def captured_graphs(llm: LLM) -> Counter[tuple[int, int]] | None:
    """Return the number of graphs by (batch size, capacity in tokens), or None if graphs are off."""
    steps = llm.runner.steps
    if not isinstance(steps, GraphSteps):
        return None
    return Counter((inputs.size, inputs.capacity) for inputs, one in steps._captured.items() if one is not None)


def shared(make: Callable[..., LLM], folder: Path) -> Answers:
    stem, llm = tiny_prompt(66), make()
    prompts = [stem + tiny_prompt(6, seed=i) for i in (1, 2, 3)]
    return answers(llm, prompts, 3) + answers(llm, prompts[::-1], 2)


def shared_replayed(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode three sequences that share a block, with CUDA graphs for 128 and 192 tokens."""
    llm, stem = make(), tiny_prompt(118)
    found = answers(llm, [stem + tiny_prompt(n, seed=n) for n in (6, 7, 8)], 7)
    if isinstance(llm.runner.steps, GraphSteps):
        shapes = [inputs.shape[:4] for inputs, one in llm.runner.steps._captured.items() if one is not None]
        assert {(4, 128, True, False), (4, 192, True, False)} <= set(shapes), shapes
    return found


def continued(make: Callable[..., LLM], folder: Path) -> Answers:
    """Generate an answer that fills a block, then continue from the prompt and the answer."""
    llm, prompt = make(), tiny_prompt(60)
    [first] = answers(llm, [prompt], 5)
    return [first, *answers(llm, [[*prompt, *first[:-1], 7, 8]], 2)]


def sliding(make: Callable[..., LLM], folder: Path) -> Answers:
    """Generate past a sliding window. The second batch reuses blocks of the first."""
    llm = make()
    found = answers(llm, [tiny_prompt(n, seed=n) for n in (130, 62)], 4)
    return found + answers(llm, [tiny_prompt(n, seed=n) for n in (66, 125)], 4)


def sliding_replayed(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode past a sliding window and across a block boundary, with CUDA graphs."""
    return answer_joining_prompts(make(), [60, 61], 5, {(2, 64), (2, 128)})


def padded_states(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode a hybrid model across a block boundary after the second of four requests has ended.

    Its slot of recurrent state is then used for padding.
    """
    llm, prompts = make(), [tiny_prompt(n, seed=n) for n in (59, 40, 30, 60)]
    params = [SamplingParams(most, temperature=0, ignore_eos=True) for most in (9, 4, 8, 8)]
    completions = completed(llm.generate(prompts, params))
    llm.runner.check_integrity()
    if (graphs := captured_graphs(llm)) is not None:
        assert {(4, 64), (4, 128)} <= graphs.keys(), graphs
    return [[*one.token_ids, one.stats.h2d_bytes] for one in completions]


def evicted(make: Callable[..., LLM], folder: Path) -> Answers:
    return answers(make(host_memory=BLOCK_BYTES * 2), [tiny_prompt(125)], 8)


def forked(make: Callable[..., LLM], folder: Path) -> Answers:
    llm, prompt = make(), tiny_prompt(70)
    samples = completed(llm.generate([prompt], SamplingParams(3, seed=1, n=3)))
    beams = completed(llm.generate([prompt], SamplingParams(3, temperature=0, num_beams=2)))
    return [sample.token_ids for sample in (*samples, *beams)]


def session(make: Callable[..., LLM], folder: Path) -> Answers:
    greedy = SamplingParams(max_tokens=3, temperature=0)
    first = make().session("s", folder)
    turns = [tiny_prompt(66, seed=1), tiny_prompt(9, seed=2), tiny_prompt(5, seed=3)]
    found = [[event.token_id for event in first.send(turns[0], greedy)]]
    first.close()
    second = make().session("s", folder)
    found.append([event.token_id for event in second.send(turns[1], greedy)])
    twin = second.fork("t")
    for one in (second, twin):
        found.append([event.token_id for event in one.send(turns[2], greedy)])
        one.close()
    return found


def stored(make: Callable[..., LLM], folder: Path) -> Answers:
    """Share a store between two runtimes. Prefills have two segments, and the second reuses KV from disk."""
    found = []
    for prompt in (tiny_prompt(150), tiny_prompt(150)[:140] + tiny_prompt(30, seed=1)):
        llm = make(prefill_chunk_size=64)
        prompts, engine = StoredRequestFactory(llm.session_store(folder), [].append), llm.make_engine()
        params = SamplingParams(max_tokens=3, temperature=0)
        request = prompts.prompt(engine.next_id(), prompt, params, None, "")
        engine.submit(request)
        while not engine.idle:
            engine.step()
        found.append([request.cached_tokens, *request.new_tokens])
        prompts.prompt_ended(request)
        prompts.close()
        llm.runner.check_integrity()
    return found


def answers(llm: LLM, prompts: list[list[int]], tokens: int) -> Answers:
    completions = completed(llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0)))
    llm.runner.check_integrity()
    return [[*one.token_ids, one.stats.h2d_bytes] for one in completions]


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
}
"""Options by model type. Sliding windows are in all layers of mistral, and in the second layer of qwen2."""

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""Mixtures of experts. gpt-oss has attention sinks, and a sliding window in the first layer."""

HYBRIDS = ("qwen3_5", "falcon_h1", "lfm2")
"""Models with recurrent state: the gated delta rule, Mamba-2 beside attention, and short convolutions."""

SHORT_QWEN: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""Options for a model of qwen3_5 with one recurrent layer and one attention layer."""

LATENT = "youtu"
"""A model whose keys contain the values, so that only keys are stored."""

USES_EARLIER_KV = "gemma4_e2b"
"""A model with two full-attention and two sliding-window layers that use the KV of an earlier layer."""

LAYERS, STREAMED_LAYERS, CONTEXT = 2, 5, 128
BLOCK_BYTES = 2 * LAYERS * 2 * 32 * 64 * 4


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "lazy": Lazy,
    "eager": Late,
    "late compute": lambda: Late((0,)),
    "late prefetch": lambda: Late((1,)),
    "late write-back": lambda: Late((2,)),
    "late prefetch and write-back": lambda: Late((1, 2)),
    "seed 0": lambda: Seeded(0),
    "seed 1": lambda: Seeded(1),
}
"""Schedules by name. Streams are numbered in order of creation: 0 computes, 1 copies streamed weights."""


@dataclass(frozen=True)
class Cell:
    """A test case.

    Attributes:
        options: Policy options.
        settings: Other options for `LLM`.
        streamed: Number of layers that stay on the device, or None if weights are not streamed. With -1, no layer stays
            on the device, and the scoring keys are on the host.
        daily: Schedule with which `make test` runs this case, if any. `make stress` runs every case with all schedules.
    """

    name: str
    policy: str
    scene: Scene = single
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    streamed: int | None = None
    model: str = "llama"
    daily: str | None = None

    def run(self, device: str, folder: Path) -> Answers:
        def make(**more: Any) -> LLM:
            settings = {"host_memory": "4MiB", "missed_mass_every": 0} | self.settings | more
            options = self.options
            if device == "cpu":
                settings.pop("cuda_graphs", None)
                if self.policy == "infinigen" and options.get("preset") != "paper":
                    options = {"source": "attention_input"} | options  # as on a device
            model: Any = folder / "model"
            if self.streamed is not None:
                if not model.exists():
                    tiny_checkpoint(model, "llama", num_hidden_layers=STREAMED_LAYERS)
                settings |= {"dtype": "float32"} | ({} if device == "cpu" else self._weight_options(model, device))
            elif self.model == USES_EARLIER_KV:  # The embeddings of each layer of a loaded model stay on the device.
                if not model.exists():
                    _model(self.model).save_pretrained(model)
                settings |= {"dtype": "float32"}
            else:
                model = _model(self.model).to(device)
            return LLM(model, policy=self.policy, policy_options=options, device=device, **settings)

        return self.scene(make, folder / device)

    def _weight_options(self, model: Path, device: str) -> dict[str, Any]:
        """Return options that limit the device memory, so that weights are streamed."""
        shape = load_shape(model, device=device, dtype="float32")
        costs = DeviceCosts(shape, memory_demand(self.policy, self.options, shape.geometry, shape.dtype), 512)
        resident, spare = (0, -1) if self.streamed == -1 else (self.streamed or 0, 0)
        weights = shape.sizes.fixed + (resident + BUFFERS) * shape.sizes.layers[0]
        return {"device_memory": weights + costs.total([CONTEXT] * 3) + spare, "max_model_len": CONTEXT}

    def __str__(self) -> str:
        return self.name


def _model(name: str) -> PreTrainedModel:
    if name == USES_EARLIER_KV:
        return architecture(name, vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB)
    if name in (*HYBRIDS, LATENT):
        return architecture(name, vocab_size=VOCAB, **(SHORT_QWEN if name == "qwen3_5" else {}))
    if name in EXPERTS:
        return architecture(name, num_hidden_layers=LAYERS, vocab_size=VOCAB, **EXPERTS[name])
    return tiny_model(name, num_hidden_layers=LAYERS, **WINDOWS.get(name, {}))


POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "infinigen": SPARSE,
    "quest": WINDOW | {"budget": 0.4},
    "h2o": WINDOW | {"budget": 0.4},
    "streaming": WINDOW | {"budget": 0.4},
    "oracle": WINDOW | {"budget": 0.4},
}
SHORT: dict[str, Any] = {"sinks": 1, "recent": 1, "dense_layers": ()}
"""Options with which KV is fetched in the step after its write-back."""

ALL_SPARSE: dict[str, Any] = SPARSE | {"dense_layers": ()}
"""Options for models with one attention layer. A step in which no layer selects tokens is not captured."""

PAPER: dict[str, Any] = {"preset": "paper", "alpha": 2.0}
TAIL: dict[str, Any] = WINDOW | {"approximate_kv": "int4", "budget": 0.4, "dense_layers": (0,)}
"""Options for a budget combined with approximate KV."""

LOW_BITS: dict[str, Any] = WINDOW | {"alpha": 2.0, "max_fraction": 0.1}
"""Options of the default preset, adapted to short contexts. Approximate KV is computed in batches."""
ALL_LOW_BITS: dict[str, Any] = LOW_BITS | {"dense_layers": ()}

DRAFTS: dict[str, Any] = {"tokens": 2, "adaptive": False}
GRAPHS: dict[str, Any] = {"cuda_graphs": True, "enable_prefix_caching": False}

_CELLS = [
    *(Cell(name, name, options=options) for name, options in POLICIES.items()),
    Cell("tail", "infinigen", options=TAIL),
    Cell("default", "infinigen"),
    Cell("paper", "infinigen", options=PAPER),
    *(Cell(f"{name}, batch", name, ragged, options) for name, options in POLICIES.items()),
    Cell("tail, batch", "infinigen", ragged, TAIL),
    Cell("default, batch", "infinigen", ragged, LOW_BITS),
    Cell("default, int2", "infinigen", ragged, LOW_BITS | {"approximate_kv": "int2", "source": "attention_input"}),
    Cell("default, rounded", "infinigen", ragged, LOW_BITS | {"dense_layers": (0,)}, {"kv_cache_dtype": "int4"}),
    Cell("default, working set", "infinigen", ragged, LOW_BITS, {"working_set": 9}),
    Cell("default, eviction", "infinigen", evicted, LOW_BITS, {"eviction": "counter"}),
    Cell("default, shared", "infinigen", shared, LOW_BITS),
    Cell("working set, graphs", "infinigen", replayed, LOW_BITS, GRAPHS | {"working_set": 9}),
    Cell("shared, working set, graphs", "infinigen", shared_replayed, SPARSE, {"cuda_graphs": True, "working_set": 9}),
    Cell("default, shared, graphs", "infinigen", shared_replayed, LOW_BITS, {"cuda_graphs": True}),
    Cell("shared, graphs", "infinigen", shared_replayed, SPARSE, {"cuda_graphs": True}),
    Cell("default, forks", "infinigen", forked, LOW_BITS),
    Cell("default, sessions", "infinigen", session, LOW_BITS),
    Cell("default, graphs", "infinigen", replayed, LOW_BITS, GRAPHS),
    *(Cell(f"{name}, graphs", name, replayed, POLICIES[name], GRAPHS) for name in ("quest", "h2o", "streaming")),
    Cell("tail, graphs", "infinigen", replayed, TAIL, GRAPHS),
    Cell("paper, batch", "infinigen", ragged, PAPER),
    Cell(
        "int4 scorer, batch",
        "infinigen",
        ragged,
        SPARSE | {"scorer": "int4", "source": "attention_input", "dense_layers": ()},
    ),
    Cell("short window", "infinigen", options=SHORT | {"preset": "rows", "alpha": 50.0, "max_fraction": 1.0}),
    Cell("short window, quest", "quest", options=SHORT | {"budget": 0.9}),
    Cell("short window, oracle", "oracle", options=SHORT | {"budget": 0.9}),
    Cell("repair", "infinigen", options=SPARSE | {"max_missed_mass": 0.05}),
    Cell("missed mass", "infinigen", ragged, SPARSE, {"missed_mass_every": 2}),
    Cell("missed mass, paper", "infinigen", options=PAPER, settings={"missed_mass_every": 2}),
    Cell("working set", "infinigen", ragged, SPARSE, {"working_set": 9}),
    Cell("working set, quest", "quest", ragged, POLICIES["quest"], {"working_set": 9}),
    Cell("eviction, full", "full", evicted, settings={"eviction": "lru"}),
    Cell("eviction", "infinigen", evicted, SPARSE, {"eviction": "counter"}),
    Cell("eviction, working set", "infinigen", evicted, SPARSE, {"eviction": "fifo", "working_set": 9}),
    Cell("rounded", "infinigen", ragged, SPARSE, {"kv_cache_dtype": "int4"}),
    Cell("rounded, full", "full", ragged, settings={"kv_cache_dtype": "int8"}),
    Cell("shared, full", "full", shared),
    Cell("shared", "infinigen", shared, SPARSE),
    Cell("shared, working set", "infinigen", shared, SPARSE, {"working_set": 9}),
    Cell("shared, oracle", "oracle", shared, POLICIES["oracle"]),
    Cell("continued, full", "full", continued),
    Cell("forks, full", "full", forked),
    Cell("forks", "infinigen", forked, SPARSE),
    Cell("sessions, full", "full", session),
    Cell("sessions", "infinigen", session, SPARSE),
    Cell("sessions, tail", "infinigen", session, TAIL),
    Cell("prompts", "infinigen", stored, SPARSE),
    Cell("default, windows, graphs", "infinigen", sliding_replayed, LOW_BITS, GRAPHS, model="qwen2"),
    # The only layer without a window must select: a step without selecting layers is not captured.
    Cell(
        "a window, graphs", "quest", sliding_replayed, POLICIES["quest"] | {"dense_layers": ()}, GRAPHS, model="qwen2"
    ),
    Cell("default, gpt-oss, graphs", "infinigen", sliding_replayed, LOW_BITS, GRAPHS, model="gpt_oss"),
    Cell("default, mixtral, graphs", "infinigen", sliding_replayed, LOW_BITS, GRAPHS, model="mixtral"),
    Cell("prompts, a window", "full", stored, model="qwen2"),
    Cell("windows, full", "full", sliding, model="mistral"),
    Cell("a window, full", "full", sliding, model="qwen2"),
    Cell("a window", "quest", sliding, POLICIES["quest"], model="qwen2"),
    Cell("streamed, full", "full", ragged, streamed=1),
    Cell("streamed", "infinigen", single, SPARSE, streamed=0),
    Cell("streamed, keys on the host", "infinigen", single, SPARSE, streamed=-1),
    Cell("exact", "infinigen", single, SPARSE, {"exact": DRAFTS}),
    Cell("exact, batch", "infinigen", ragged, LOW_BITS, {"exact": DRAFTS}),
    Cell("exact, full", "full", ragged, settings={"exact": "lookup"}),
    Cell("exact, working set", "infinigen", ragged, SPARSE, {"exact": DRAFTS, "working_set": 9}),
    Cell("exact, oracle", "oracle", ragged, POLICIES["oracle"], {"exact": DRAFTS}),
    Cell("exact, sessions", "infinigen", session, SPARSE, {"exact": DRAFTS}),
    Cell("exact, forks", "infinigen", forked, SPARSE, {"exact": DRAFTS}),
    Cell("exact, windows", "oracle", sliding, POLICIES["oracle"], {"exact": DRAFTS}, model="qwen2"),
    Cell("exact, streamed", "infinigen", single, SPARSE, {"exact": DRAFTS}, streamed=0),
    Cell("exact, graphs", "infinigen", drafted, SPARSE, GRAPHS | {"exact": DRAFTS}),
    Cell("hybrid, full", "full", ragged, model="falcon_h1"),
    Cell("hybrid", "infinigen", ragged, SPARSE, model="lfm2"),
    Cell("hybrid, default", "infinigen", ragged, ALL_LOW_BITS, model="qwen3_5"),
    Cell("hybrid, shared", "full", shared, model="qwen3_5"),
    Cell("hybrid, forks", "full", forked, model="falcon_h1"),
    Cell("hybrid, sessions", "full", session, model="qwen3_5"),
    Cell("hybrid, sessions, sparse", "infinigen", session, SPARSE, model="falcon_h1"),
    Cell("hybrid, prompts", "full", stored, model="qwen3_5"),
    Cell("hybrid, graphs", "infinigen", padded_states, ALL_SPARSE, GRAPHS, model="qwen3_5"),
    Cell("hybrid, default, graphs", "infinigen", padded_states, ALL_LOW_BITS, GRAPHS, model="qwen3_5"),
    Cell("hybrid, forks, graphs", "infinigen", forked, ALL_SPARSE, {"cuda_graphs": True}, model="falcon_h1"),
    Cell("hybrid, exact, graphs", "infinigen", ragged, ALL_SPARSE, GRAPHS | {"exact": DRAFTS}, model="lfm2"),
    Cell("hybrid, exact", "infinigen", ragged, SPARSE, {"exact": DRAFTS}, model="lfm2"),
    Cell("hybrid, exact, default", "infinigen", ragged, ALL_LOW_BITS, {"exact": DRAFTS}, model="qwen3_5"),
    Cell("hybrid, exact, sessions", "infinigen", session, SPARSE, {"exact": DRAFTS}, model="falcon_h1"),
    Cell("latent, full", "full", shared, model=LATENT),
    Cell("latent, working set", "infinigen", ragged, SPARSE, {"working_set": 9}, model=LATENT),
    Cell("latent, default, graphs", "infinigen", replayed, LOW_BITS, GRAPHS, model=LATENT),
    Cell("latent, shared", "infinigen", shared, SPARSE, model=LATENT),
    Cell("latent, h2o", "h2o", ragged, POLICIES["h2o"], model=LATENT),
    Cell("latent, rounded", "infinigen", ragged, SPARSE, {"kv_cache_dtype": "int4"}, model=LATENT),
    Cell("latent, sessions", "infinigen", session, SPARSE, model=LATENT),
    Cell("latent, exact", "infinigen", ragged, LOW_BITS, {"exact": DRAFTS}, model=LATENT),
    Cell("earlier kv, full", "full", shared, model=USES_EARLIER_KV),
    Cell("earlier kv, working set", "infinigen", ragged, SPARSE, {"working_set": 9}, model=USES_EARLIER_KV),
    Cell("earlier kv, shared", "infinigen", shared, SPARSE, model=USES_EARLIER_KV),
    Cell("earlier kv, graphs", "infinigen", sliding_replayed, SPARSE, GRAPHS, model=USES_EARLIER_KV),
    Cell("earlier kv, default, graphs", "infinigen", sliding_replayed, LOW_BITS, GRAPHS, model=USES_EARLIER_KV),
    Cell("earlier kv, h2o", "h2o", ragged, POLICIES["h2o"], model=USES_EARLIER_KV),
    Cell("earlier kv, repair", "infinigen", ragged, SPARSE | {"max_missed_mass": 0.05}, model=USES_EARLIER_KV),
    Cell("earlier kv, missed mass", "infinigen", ragged, SPARSE, {"missed_mass_every": 2}, model=USES_EARLIER_KV),
    Cell("earlier kv, rounded", "infinigen", ragged, SPARSE, {"kv_cache_dtype": "int4"}, model=USES_EARLIER_KV),
    Cell("earlier kv, sessions", "infinigen", session, SPARSE, model=USES_EARLIER_KV),
    Cell("earlier kv, forks", "infinigen", forked, LOW_BITS, model=USES_EARLIER_KV),
    Cell("earlier kv, exact", "infinigen", ragged, LOW_BITS, {"exact": DRAFTS}, model=USES_EARLIER_KV),
    Cell("graphs", "infinigen", replayed, SPARSE, GRAPHS),
    Cell("graphs, batch sizes", "infinigen", joining, SPARSE, GRAPHS),
]

_DAILY = {
    "full, batch": "seed 1",
    "infinigen": "late prefetch and write-back",
    "streaming": "seed 1",
    "oracle": "eager",
    "default, batch": "late compute",
    "default, gpt-oss, graphs": "seed 0",
    "default, shared, graphs": "late write-back",
    "tail": "late compute",
    "paper": "seed 1",
    "repair": "late prefetch",
    "working set, quest": "late compute",
    "eviction, full": "lazy",
    "rounded, full": "late prefetch",
    "continued, full": "late write-back",
    "a window, full": "seed 1",
    "hybrid, shared": "late compute",
    "hybrid, exact": "seed 1",
    "hybrid, graphs": "late compute",
    "latent, h2o": "seed 0",
    "earlier kv, graphs": "late write-back",
    "prompts": "late prefetch",
    "streamed, full": "late prefetch",
}
"""Schedules for `make test`. With `test_device_copies.py`, each schedule, policy and scene runs at least once."""

CELLS = [replace(cell, daily=_DAILY.get(cell.name)) for cell in _CELLS]
BY_NAME = {cell.name: cell for cell in CELLS}

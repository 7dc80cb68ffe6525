"""Test packed weights on a simulated CUDA device: weights stay packed, and tokens equal those of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_cells import LOW_BITS, Answers, answers, captured_graphs, ragged
from support.cuda_simulator import Late, Lazy, simulated
from support.outputs import completed
from support.packed_rows import random_rows
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_model, tiny_prompt
from torch import nn

from offload_rt import LLM, EngineConfig, SamplingParams
from offload_rt.kernels import triton_packed
from offload_rt.kernels.packed_format import PackedFormat, interleave
from offload_rt.models.linear import packed
from offload_rt.models.linear.packed import use_packed_weights
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import plan_for

pytest.importorskip("triton", reason="triton is not installed")
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 1}
GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tiny.gguf"
    write_tiny_gguf(path, "Q4_1", architecture="llama", output=True, **SHAPE)
    return path


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "TILE_WEIGHTS", 1300)  # 20 rows of 64 inputs


def tokens_of_scene(
    model: Path, device: str, scene: Callable[..., list[list[int]]], **settings: Any
) -> list[list[int]]:
    """Return the tokens that `scene` generates with packed weights."""

    def make() -> LLM:
        common = {"host_memory": "4MiB", "dtype": "float32", "verify": "off", "missed_mass_every": 0}
        llm = LLM(model, device=device, **common | settings)
        weights: Any = llm.runner.model.layers[0]
        assert weights.mlp.up_proj.packed.device.type == device and weights.mlp.up_proj.packed.dtype == torch.uint8
        assert (captured_graphs(llm) is not None) == (device == "cuda")
        return llm

    return [tokens for *tokens, _ in scene(make, model)]


def replayed(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode two short prompts together in three steps: one is eager, one captures a graph, and one replays it."""
    llm = make()
    found = answers(llm, [tiny_prompt(20), tiny_prompt(21, seed=1)], 5)
    assert (graphs := captured_graphs(llm)) is None or graphs[2, 64] == 1
    return found


def test_tokens_with_graphs_equal_the_cpu_path(gguf_file: Path, small_tiles: None) -> None:
    default = {"policy_options": LOW_BITS | {"source": "attention_input"}, "enable_prefix_caching": False}
    expected = tokens_of_scene(gguf_file, "cpu", replayed, **default)
    with simulated(Lazy()):
        # after one eager step of each shape, decode steps replay a graph
        assert tokens_of_scene(gguf_file, "cuda", replayed, **default, cuda_graphs=True) == expected


def test_torch_unpacks_without_triton(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of_scene(gguf_file, "cpu", ragged, policy="full")
    monkeypatch.setattr(packed, "uses_triton", lambda tensor: False)
    monkeypatch.setattr(triton_packed, "linear", lambda *given: pytest.fail("Triton was called"))
    with simulated(Late()):
        assert tokens_of_scene(gguf_file, "cuda", ragged, policy="full") == expected


def test_checkpoint_is_quantised_for_the_device(tmp_path: Path) -> None:
    tiny_model("llama", **SHAPE).save_pretrained(tmp_path)
    expected = tokens_of_scene(tmp_path, "cpu", ragged, policy="full", quantize="int4")
    with simulated(Late()):
        planned = load_shape(tmp_path, device="cuda", dtype="float32", quantize="int4")
        assert planned == replace(
            load_shape(tmp_path, device="cpu", dtype="float32", quantize="int4"), device=planned.device
        )
        assert tokens_of_scene(tmp_path, "cuda", ragged, policy="full", quantize="int4") == expected


def test_streamed_layers_are_planned_and_copied_as_packed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q4_1", architecture="llama", output=True, **SHAPE | {"num_hidden_layers": 5})
    config = EngineConfig(
        "full", max_model_len=128, host_memory="4MiB", dtype="float32", verify="off", prefill_chunk_size=512
    )
    prompt = tiny_prompt(70)
    [expected] = completed(LLM(path, replace(config, device="cpu")).generate([prompt], GREEDY))
    with simulated(Late()):
        shape = load_shape(path, device="cuda", dtype="float32")
        assert shape.sizes == load_shape(path, device="cpu", dtype="float32").sizes
        rest = plan_for(replace(config, device_memory=1 << 30), shape).costs.total([128])
        least = shape.sizes.fixed + 4 * max(shape.sizes.layers) + rest
        llm = LLM(path, replace(config, device="cuda", device_memory=least))
        [found] = completed(llm.generate([prompt], GREEDY))
        stream = llm.runner.weights and llm.runner.weights.stream
        assert stream and stream.bytes > 0 and stream.bytes % max(shape.sizes.layers) == 0
    assert found.token_ids == expected.token_ids


def test_interleaved_weights_can_be_moved_to_a_device() -> None:
    """A model that was loaded for a CPU keeps its interleaved rows."""
    form = PackedFormat(192, 4, 32, True)
    rows, weights = random_rows(form, 37)
    x, ids = torch.randn(3, 192), torch.tensor([36, 3, 17])
    with simulated(Late()), torch.inference_mode():
        layer, table = nn.Linear(192, 37, bias=False), nn.Embedding(37, 192)
        for module in (layer, table):
            use_packed_weights(module, form.for_cpu(), torch.float32, interleave(rows))
        product, embedded = layer.to("cuda")(x.to("cuda")).cpu(), table.to("cuda")(ids.to("cuda")).cpu()
    torch.testing.assert_close(product.double(), x.double() @ weights.T, rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(embedded, weights[ids].float())


def test_matrix_product_does_not_wait_for_the_device() -> None:
    form = PackedFormat(192, 4, 32, True)
    rows, weights = random_rows(form, 9)
    x = torch.randn(3, 192)
    with simulated(Lazy()) as sim, torch.inference_mode():
        layer = nn.Linear(192, 9)
        use_packed_weights(layer, form, torch.float32, rows)
        bias = layer.bias.detach().clone()
        layer, own = layer.to("cuda"), x.to("cuda")
        before = len(sim.syncs)
        out = layer(own)
        assert len(sim.syncs) == before
        found = out.cpu()
    torch.testing.assert_close(found.double(), x.double() @ weights.T + bias, rtol=1e-5, atol=2e-3)

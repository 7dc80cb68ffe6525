"""Test per-layer embeddings (Gemma 4 E2B) in host memory, on a simulated device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import VOCAB, architecture
from support.cuda_simulator import Lazy, simulated
from support.outputs import completed
from support.packed_rows import random_rows

from offload_rt import LLM, EngineConfig, MemoryLimitError, SamplingParams
from offload_rt.cli import main
from offload_rt.kernels import dispatch
from offload_rt.kernels.packed_format import PackedFormat
from offload_rt.models.layer_embeddings import LayerEmbeddings
from offload_rt.models.linear.packed import use_packed_weights
from offload_rt.models.multimodal import text_decoder
from offload_rt.models.shape import load_shape
from offload_rt.models.weights import HostTable, keep_table_on_host, layer_table
from offload_rt.planning.device_plan import plan_for
from offload_rt.transfer.weights.host_table import lock_table
from offload_rt.utils.units import format_size

pytest.importorskip("triton", reason="triton is not installed")
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPT = list(range(1, 20))
WIDTH, LAYERS = 8, 3
SMALL: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": WIDTH,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
TABLE = VOCAB * LAYERS * WIDTH * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("table")
    architecture("gemma4_e2b", **SMALL).save_pretrained(path)
    return path


def make_llm(folder: Path, device: str = "cuda", **settings: Any) -> LLM:
    settings = {"policy": "full", "dtype": "float32", "host_memory": "1MiB", "verify": "off"} | settings
    return LLM(folder, device=device, **settings)


def tokens_of(llm: LLM) -> list[int]:
    return completed(llm.generate([PROMPT], GREEDY))[0].token_ids


def table_of(llm: LLM) -> HostTable:
    table = llm.runner.model.host_table
    assert table is not None and not table.weight.is_cuda
    return table


def test_tokens_equal_a_cpu_and_decode_steps_do_not_wait(folder: Path) -> None:
    expected = tokens_of(make_llm(folder, "cpu"))
    with simulated(Lazy()) as sim:
        llm = make_llm(folder, verify="always", cuda_graphs=False)
        assert table_of(llm).in_place and table_of(llm).weight.is_pinned()
        assert tokens_of(llm) == expected
        sequence = llm.runner.new_sequence([*PROMPT, 1, 2], len(PROMPT) + 2)
        llm.runner.prefill(sequence, len(PROMPT))
        before = len(sim.syncs)
        llm.runner.decode([sequence])
        assert len(sim.syncs) == before
        llm.runner.free(sequence)


@pytest.mark.parametrize("triton", [True, False])
def test_host_looks_up_rows_if_kernels_cannot_read_host_memory(
    folder: Path, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(make_llm(folder, "cpu"))
    if not triton:
        monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: False)
    # kernels of WSL 2 cannot read host memory in place; without Triton, there are no kernels
    warns = pytest.warns(UserWarning, match="WSL 2") if triton else nullcontext()
    with simulated(Lazy(), in_place=not triton), warns:
        llm = make_llm(folder, cuda_graphs=False)
        assert table_of(llm).in_place != triton
        assert tokens_of(llm) == expected


def test_plan_counts_the_table_as_host_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = tokens_of(make_llm(folder, "cpu"))
    plan: dict[str, Any] = {"max_model_len": 64, "prefill_chunk_size": 64}
    config = EngineConfig("full", host_memory="1MiB", dtype="float32", device="cuda", **plan)
    with simulated(Lazy()):
        shape, whole = (load_shape(folder, device=device, dtype="float32") for device in ("cuda", "cpu"))
        assert shape.host_table == shape.host_bytes == TABLE == whole.weight_bytes - shape.weight_bytes
        assert whole.sizes.fixed - shape.sizes.fixed == TABLE and not whole.host_bytes
        least = shape.weight_bytes + plan_for(replace(config, device_memory=1 << 30), shape).costs.total([64])
        # the first limit fits all weights except the table
        for limit, streams in ((least + 1024, False), (least - 1024, True)):
            llm = make_llm(folder, device_memory=limit, **plan)
            [done] = completed(llm.generate([PROMPT], GREEDY))
            assert done.token_ids == expected and table_of(llm).in_place
            assert llm.runner.plan is not None and bool(llm.runner.plan.streamed) == streams
            assert llm.runner.plan.host_bytes == TABLE + llm.runner.plan.streamed_bytes
            streamed = llm.runner.weights.host_bytes - llm.runner.weights.device_bytes if llm.runner.weights else 0
            assert done.stats.weight_bytes - done.stats.weight_bytes_device == TABLE + streamed
        assert main(["info", str(folder), "--context", "64", "--device", "cuda", "--dtype", "float32"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "embeddings of each layer" in line)
    assert f"in host memory, {format_size(TABLE)}" in row


def test_table_of_a_draft_model_is_in_host_memory(folder: Path) -> None:
    with simulated(Lazy()):
        llm = make_llm(folder, exact={"model": str(folder)})
        assert llm.runner.draft is not None and llm.runner.draft.model.host_table is not None
        assert llm.runner.draft.model.host_table.in_place


def test_too_little_lockable_memory_is_an_error(folder: Path) -> None:
    with simulated(Lazy()) as sim:
        sim.memory.lockable = TABLE // 2
        with pytest.raises(MemoryLimitError, match="ulimit -l"):
            make_llm(folder)


@pytest.mark.parametrize("width", [64, 8])
def test_rows_of_a_packed_table_are_unpacked_on_the_device(width: int) -> None:
    """If the width is 64, a kernel unpacks only one layer's part of a row. If it is 8, it unpacks whole rows."""
    model = architecture("gemma4_e2b", **SMALL | {"hidden_size_per_layer_input": width})
    table, tokens = layer_table(model), torch.tensor([3, 96, 0, 3, 7])
    assert table is not None
    form = PackedFormat(192, 5, 32, True)
    use_packed_weights(table, form, torch.float32, random_rows(form, VOCAB)[0])
    embeddings = LayerEmbeddings.find(text_decoder(model), model.get_input_embeddings())
    assert embeddings is not None
    expected = [embeddings(layer, tokens) for layer in range(LAYERS)]
    with simulated(Lazy()) as sim, torch.inference_mode():
        keep_table_on_host(model)
        assert isinstance(table, HostTable)
        lock_table(table)
        model.to("cuda")  # type: ignore[arg-type]
        assert not table.packed.is_cuda
        ids, before = tokens.to("cuda"), len(sim.syncs)
        found = [embeddings(layer, ids) for layer in range(LAYERS)]
        assert len(sim.syncs) == before
        for one, want in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), want, rtol=1e-5, atol=1e-5)

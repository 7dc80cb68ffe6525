"""Test quantised weights that stay packed in memory, and plans that use their packed size.

bitsandbytes nf4 and torchao int8 run on a CPU. Formats that need a GPU are only tested for being refused.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import assert_greedy, edit_config, tiny_checkpoint, tiny_prompt
from transformers import AutoModelForCausalLM

from offload_rt import LLM, EngineConfig, MemoryLimitError, ModelError, SamplingParams
from offload_rt.cli import main
from offload_rt.models.checkpoint import build_skeleton, read_config
from offload_rt.models.fingerprint import fingerprint
from offload_rt.models.linear import BitsAndBytes, backend_of, nbytes_of, tensor_locations, tensors_of
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape
from offload_rt.models.source import find_source
from offload_rt.models.weights import layer_bytes
from offload_rt.planning.device_plan import plan_for

WINDOW = {"sinks": 2, "recent": 8}
PROMPT = tiny_prompt(150)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def nf4(folder: Path) -> Any:
    from transformers import BitsAndBytesConfig

    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, dtype=torch.float32)


def int8(folder: Path) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    packed = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, dtype=torch.float32)


PACKERS: dict[str, tuple[Callable[[Path], Any], float]] = {"bitsandbytes": (nf4, 0.6), "torchao": (int8, 1.1)}
"""How to pack a checkpoint, and the maximum bytes per weight in a layer's matrices, including scales."""


@pytest.fixture(scope="module", params=list(PACKERS))
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    plain = tiny_checkpoint(tmp_path_factory.mktemp("plain"), "llama", intermediate_size=128, head_dim=32)
    folder = tmp_path_factory.mktemp("packed") / str(request.param)
    PACKERS[request.param][0](plain).save_pretrained(folder)
    return folder


def generate_tokens(packed: Path, policy: str, **options: Any) -> list[int]:
    llm = LLM(packed, policy=policy, policy_options=options, host_memory="16MiB", verify="always", dtype="float32")
    return [event.token_id for event in llm.stream(PROMPT, GREEDY)]


def test_tokens_equal_transformers(packed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    given = torch.tensor([PROMPT])
    made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
    assert generate_tokens(packed, "full") == made[0, len(PROMPT) :].tolist()
    assert (
        generate_tokens(packed, "infinigen", budget=1.0, approximate_kv="off", **WINDOW)
        == made[0, len(PROMPT) :].tolist()
    )


def test_memory_is_planned_with_packed_bytes(packed: Path) -> None:
    shape, loaded = load_shape(packed, dtype="float32"), load_model(packed, dtype="float32")
    # the shape is estimated from the header of the file
    assert shape.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert shape.packing == packed.name
    assert shape.sizes.widest == 128
    matrices = [
        w for layer in loaded.layers for m in layer.modules() for w in m.parameters(recurse=False) if w.dim() == 2
    ]
    numbers = sum(
        m.in_features * m.out_features for layer in loaded.layers for m in layer.modules() if hasattr(m, "in_features")
    )
    assert sum(map(nbytes_of, matrices)) <= PACKERS[packed.name][1] * numbers
    config = EngineConfig(policy="full", device_memory="1GiB", max_model_len=128)
    least = shape.weight_bytes + plan_for(config, shape).costs.total([128])
    assert not plan_for(replace(config, device_memory=least), shape).streamed
    if packed.name == "bitsandbytes":
        assert plan_for(replace(config, device_memory=least - 1), shape).streamed
        return
    with pytest.raises(MemoryLimitError, match=r"packed weights \(.*\) cannot be streamed layer by layer"):
        LLM(packed, config, device_memory=least - 1, dtype="float32")


def test_8b_model_in_4_bits_with_128k_tokens_fits_24_gib(tmp_path: Path, capsys: Any) -> None:
    """`info` reads only `config.json` and the header of a bitsandbytes file. The file here has no weights."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256}
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "dtype": "bfloat16"}
    packing = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **heads, **sizes, **packing}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}

    def add_entry(name: str, dtype: str, shape: list[int], size: int) -> None:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}

    place = find_source(tmp_path)
    for name, weight in build_skeleton(place, read_config(place), torch.bfloat16).named_parameters():
        numbers = weight.numel()
        if ".layers." in name and weight.dim() == 2:
            add_entry(name, "U8", [numbers // 2, 1], numbers // 2)
            add_entry(f"{name}.absmax", "F32", [numbers // 64], numbers // 16)
            add_entry(f"{name}.quant_map", "F32", [16], 64)
        else:
            add_entry(name, "BF16", list(weight.shape), 2 * numbers)
    written = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(written).to_bytes(8, "little") + written)
    flags = ["--context", "131072", "--dtype", "bfloat16", "--host-memory", "20GiB"]
    assert main(["info", str(tmp_path), *flags, "--device-memory", "24GiB"]) == 0
    output = capsys.readouterr().out
    for row in (
        "weights +│ 5.61 GiB",
        "scoring keys +│ 4.13 GiB",
        "device: peak +│ 11.9 GiB",
        "streamed layers +│ none",
    ):
        assert re.search(row, output)


def test_streamed_packed_layers_give_the_same_logits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = tiny_checkpoint(tmp_path / "plain", "llama", intermediate_size=128, num_hidden_layers=8)
    packed = tmp_path / "packed"
    nf4(Path(plain)).save_pretrained(packed)
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    # keep the weight layout of bitsandbytes, as streamed layers do
    BitsAndBytes().prepare(model, None, offloaded=True)
    shape = load_shape(packed, dtype="float32")
    config = EngineConfig(policy="full", device_memory="1GiB", max_model_len=192, host_memory="16MiB", dtype="float32")
    limit = shape.sizes.fixed + 4 * max(shape.sizes.layers) + plan_for(config, shape).costs.total([192])
    for verify in ("always", "off"):
        llm = LLM(packed, config, device_memory=limit, verify=verify)
        runner, stream = llm.runner, llm.runner.weights and llm.runner.weights.stream
        assert stream is not None and len(stream.layers) == 6 and runner.plan is not None
        sequence = runner.new_sequence([*PROMPT, 5, 6], 192)
        logits = [runner.prefill(sequence, len(PROMPT), want_logits=True)]
        prefill_bytes = stream.bytes
        logits += [runner.decode([sequence])[0] for _ in range(2)]
        runner.check_integrity()
        runner.free(sequence)
        expected = model(torch.tensor([[*PROMPT, 5, 6]])).logits[0, -3:]
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=1e-4)
        layers = [runner.model.layers[layer] for layer in stream.layers]
        assert stream.bytes - prefill_bytes == 2 * sum(map(layer_bytes, layers)) <= 2 * runner.plan.streamed_bytes
        numbers = sum(m.in_features * m.out_features for layer in layers for m in layer.modules() if is_linear(m))
        assert sum(map(layer_bytes, layers)) < 0.7 * numbers
        scales = [place.tensor for weight in layers[0].parameters() for place in tensor_locations(weight)]
        assert sum(scale.nbytes for scale in scales) > sum(weight.nbytes for weight in layers[0].parameters())


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def test_only_4_bit_bitsandbytes_can_stream() -> None:
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for packing, moves in ((four, True), (four | {"load_in_4bit": False}, False), ({"quant_method": "torchao"}, False)):
        config = SimpleNamespace(quantization_config=packing)
        backend = backend_of(config)
        assert backend is not None and backend.can_stream(config) == moves


def test_unpacked_weights_have_the_requested_dtype(packed: Path) -> None:
    """transformers keeps the dtype in the file, but the plan assumes the requested dtype."""
    shape, model = load_shape(packed, dtype="bfloat16"), load_model(packed, dtype="bfloat16", verify="always")
    assert model.adapter.dtype == shape.dtype == torch.bfloat16
    assert shape.weight_bytes == pytest.approx(model.weight_bytes, rel=0.04)


def test_other_weights_have_another_fingerprint(packed: Path) -> None:
    model = load_model(packed, dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    assert fingerprint(again) == model.fingerprint
    weight = again.model.layers[2].mlp.up_proj.weight
    next(tensors_of(weight)).view(-1)[:40] += 1
    assert fingerprint(again) != model.fingerprint


def test_missing_weight_is_refused(packed: Path, tmp_path: Path) -> None:
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layers.1.mlp.up_proj" in name)
    save_file({n: w for n, w in weights.items() if n != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"cannot load the weights of|lacks .*up_proj"):
        load_model(tmp_path)


def test_gpt2_refuses_packed_weights(tmp_path: Path) -> None:
    from offload_rt.models.learned_positions import GPT2Adapter

    pytest.importorskip("bitsandbytes")
    model = nf4(tiny_checkpoint(tmp_path, "gpt2", n_inner=128))
    with pytest.raises(ModelError, match=r"packed \(bitsandbytes\), and GPT-2's"):
        GPT2Adapter(model)


def test_dequantised_formats_are_not_packed(tmp_path: Path) -> None:
    """transformers has no mxfp4 kernel for CPUs, so it dequantises the weights."""
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    plain = load_shape(folder, device="cpu")
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert load_shape(folder, device="cpu") == plain


def test_int4_weights_of_torchao_run_on_a_cpu(tmp_path: Path) -> None:
    """Weights are packed at load time, because torchao's CPU layout cannot be saved."""
    inference_workflow = pytest.importorskip("torchao.prototype.quantization.int4.inference_workflow")
    from transformers import TorchAoConfig

    plain = tiny_checkpoint(tmp_path, "llama", intermediate_size=128)
    four = TorchAoConfig(inference_workflow.PrototypeInt4WeightOnlyConfig(group_size=32))
    model: Any = AutoModelForCausalLM.from_pretrained(plain, quantization_config=four, dtype=torch.float32)
    numbers = sum(m.in_features * m.out_features for m in model.model.layers.modules() if is_linear(m))
    assert sum(nbytes_of(w) for w in model.model.layers.parameters()) < 0.8 * numbers
    for policy, options in (("full", {}), ("infinigen", {"budget": 1.0, "approximate_kv": "off", **WINDOW})):
        llm = LLM(model, policy=policy, policy_options=options, host_memory="16MiB", verify="always")
        assert_greedy(model, PROMPT, [event.token_id for event in llm.stream(PROMPT, GREEDY)])


def test_error_of_a_failed_conversion_names_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reports the cause only in its own log."""
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    edit_config(folder, quantization_config={"quant_method": "torchao"})

    def fail(*given: Any, **named: Any) -> None:
        # without a device map, transformers would use a GPU
        assert named["device_map"] == {"": "cpu"}
        raise RuntimeError("look at the `CONVERSION` entries of the above report!")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(
        ModelError, match=r"\(packed by torchao; call transformers' from_pretrained to see which kernel or package"
    ):
        load_model(folder, verify="off")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_error_of_a_missing_library_names_what_to_install(method: str, tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 64})
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(8, 8, dtype=torch.int32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"(?i)install|requires"):
        load_model(folder, quantize="none")


def test_damaged_header_is_refused(tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for damage in (
        b"\xff" * 64,
        b"",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + json.dumps({"a": 1}).encode(),
    ):
        (folder / "model.safetensors").write_bytes(damage)
        with pytest.raises(ModelError, match="cannot read the sizes of the weights"):
            load_shape(folder)

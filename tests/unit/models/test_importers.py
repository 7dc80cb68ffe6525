"""Test importers of packed checkpoints: all bits of the weights equal the dequantisation that each format defines.

The tests write tensors as each layout's description says. A manual comparison with compressed-tensors 0.20 agreed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cuda_simulator import Late, simulated
from support.outputs import completed
from support.tiny_models import edit_config, tiny_checkpoint, tiny_prompt
from torch import nn

from offload_rt import LLM, ModelError, SamplingParams
from offload_rt.models import folder_import
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 4}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
GROUP = 32
Tensors = dict[str, torch.Tensor]
Layer = tuple[Tensors, torch.Tensor]
"""A layer's tensors in the checkpoint, and its weight `[out, in]`."""


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[n, m]` into int32 words along the last axis, with the first code in the lowest bits."""
    each, numbers = 32 // bits, codes.numpy().astype(np.uint32)
    packed = np.zeros((len(numbers), numbers.shape[1] // each), np.uint32)
    for place in range(each):
        packed |= numbers[:, place::each] << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def random_codes(outs: int, ins: int, bits: int, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return random codes `[out, in]`, and random zeros and scales, both `[out, groups]`."""
    codes = torch.randint(1 << bits, (outs, ins))
    zeros = torch.randint((1 << bits - 1) - 2, (1 << bits - 1) + 3, (outs, groups))
    return codes, zeros, ((torch.rand(outs, groups) + 0.5) * 0.3 / (1 << bits)).to(dtype)


def gptq(bits: int, layout: str = "gptq", desc_act: bool = False) -> Callable[[int, int], Layer]:
    """Return a writer of GPTQ layers: `scales * (weight - zeros)` in float16.

    See AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py.
    """

    def write(outs: int, ins: int) -> Layer:
        codes, zeros, scales = random_codes(outs, ins, bits, ins // GROUP, torch.float16)
        groups = torch.arange(ins) // GROUP
        if desc_act:
            groups = groups[torch.randperm(ins)]
        weight = scales[:, groups] * (codes - zeros[:, groups])
        stored = zeros - 1 if layout == "gptq" else zeros
        tensors = {"qweight": pack_words(codes, bits).T, "qzeros": pack_words(stored.T, bits), "scales": scales.T}
        return {**tensors, "g_idx": groups.int()}, weight

    return write


def awq(outs: int, ins: int) -> Layer:
    """Write an AWQ layer: `(weight - zeros) * scales` in float16. The outputs within a word are in AWQ's order.

    See AutoAWQ, awq/utils/packing_utils.py.
    """
    codes, zeros, scales = random_codes(outs, ins, 4, ins // GROUP, torch.float16)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    place = (torch.arange(outs).view(-1, 8)[:, order]).flatten()
    weight = (codes.view(outs, -1, GROUP) - zeros[..., None]) * scales[..., None]
    tensors = {
        "qweight": pack_words(codes.T[:, place], 4),
        "qzeros": pack_words(zeros.T[:, place], 4),
        "scales": scales.T,
    }
    return tensors, weight.flatten(1)


def compressed(bits: int, layout: str, strategy: str, symmetric: bool = True) -> Callable[[int, int], Layer]:
    """Return a writer of compressed-tensors layers: `(weight - zero_point) * scale` in bfloat16.

    See compressed-tensors, compressors/pack_quantized/helpers.py.
    """

    def write(outs: int, ins: int) -> Layer:
        groups, half = ins // GROUP if strategy == "group" else 1, 1 << bits - 1
        codes, zeros, scales = random_codes(outs, ins, bits, groups, torch.bfloat16)
        if strategy == "channel":
            scales *= 2.0**-14  # float16 holds these only with an exponent
        zeros = torch.full_like(zeros, half) if symmetric else zeros
        weight = (codes.view(outs, groups, -1) - zeros[..., None]).bfloat16() * scales[..., None]
        tensors = {"weight_scale": scales}
        if layout == "pack-quantized":
            tensors |= {"weight_packed": pack_words(codes, bits), "weight_shape": torch.tensor([outs, ins])}
            packed_zeros = pack_words(zeros.T, bits).T
        else:
            tensors["weight"] = (codes - half).to(torch.int8)
            packed_zeros = (zeros - half).to(torch.int8)
        return tensors | ({} if symmetric else {"weight_zero_point": packed_zeros}), weight.flatten(1)

    return write


def compressed_config(bits: int, layout: str, strategy: str, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **others}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


PACKED, INT = "pack-quantized", "int-quantized"
VARIANTS: dict[str, tuple[Callable[[int, int], Layer], dict[str, Any]]] = {
    "gptq-4": (gptq(4), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq-8-v2": (gptq(8, "gptq_v2"), {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}),
    "gptq-4-desc-act": (gptq(4, desc_act=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "w4a16": (compressed(4, PACKED, "group"), compressed_config(4, PACKED, "group")),
    "w4a16-asymmetric": (compressed(4, PACKED, "group", False), compressed_config(4, PACKED, "group", symmetric=False)),
    "w8a16": (compressed(8, PACKED, "channel"), compressed_config(8, PACKED, "channel")),
    "w8a16-int": (compressed(8, INT, "channel", False), compressed_config(8, INT, "channel", symmetric=False)),
}


def write_folders(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the same weights in unpacked and in packed form. Return both folders."""
    write, options = VARIANTS[name]
    dense, packed = (Path(tiny_checkpoint(folder / each, "llama", **SHAPE)) for each in ("dense", "packed"))
    state = load_file(dense / "model.safetensors")
    plain, stored = dict(state), dict(state)
    for key, weight in state.items():
        if ".layers." in key and weight.dim() == 2:
            tensors, plain[key] = write(*weight.shape)
            del stored[key]
            stored |= {f"{key.removesuffix('weight')}{part}": each.contiguous() for part, each in tensors.items()}
    save_file(
        {key: each.float().contiguous() for key, each in plain.items()}, dense / "model.safetensors", {"format": "pt"}
    )
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config=options)
    return dense, packed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_weights_and_tokens_equal_unpacked_ones(name: str, tmp_path: Path) -> None:
    dense, packed = write_folders(tmp_path, name)
    planned = load_shape(packed, device="cpu", dtype="float32")
    options = {"dtype": "float32", "policy": "full", "host_memory": "4MiB"}
    llm, reference = LLM(packed, verify="always", **options), LLM(dense, **options)
    loaded, other = llm.runner.model, reference.runner.model
    assert planned == load_shape(packed, device="cpu", dtype="float32")
    assert planned.packing == "offload-rt" and planned.weight_bytes == loaded.weight_bytes < 0.8 * other.weight_bytes
    for own, theirs in zip(loaded.layers, other.layers, strict=True):
        for part, module in theirs.named_modules():
            if isinstance(module, nn.Linear):
                layer: Any = own.get_submodule(part)
                weight = layer.form.unpack(layer.packed, torch.float32)
                if layer.form.permuted:
                    weight = weight[:, torch.argsort(layer.order)]
                # The format rounds weights to 16 bits, and packed weights are not rounded. The reference gets the
                # unrounded weights, because rounding may change its tokens.
                assert weight.to(torch.bfloat16 if name[0] == "w" else torch.float16).float().equal(module.weight)
                module.weight.data.copy_(weight)
    assert layer.form.permuted == ("desc-act" in name)
    prompt = tiny_prompt(150)
    assert (
        completed(llm.generate(prompt, GREEDY))[0].token_ids
        == completed(reference.generate(prompt, GREEDY))[0].token_ids
    )


def test_tokens_on_a_simulated_device_equal_the_cpu_path(tmp_path: Path) -> None:
    packed = write_folders(tmp_path, "gptq-4-desc-act")[1]
    options: dict[str, Any] = {"dtype": "float32", "policy": "full", "host_memory": "4MiB", "verify": "off"}
    prompt, few = tiny_prompt(40), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    [expected] = completed(LLM(packed, device="cpu", **options).generate(prompt, few))
    with simulated(Late()):
        llm = LLM(packed, device="cuda", **options)
        [found] = completed(llm.generate(prompt, few))
    layer: Any = llm.runner.model.layers[0].get_submodule("mlp.down_proj")
    assert layer.packed.is_cuda and layer.form.permuted
    assert found.token_ids == expected.token_ids


def test_folder_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = write_folders(tmp_path, "awq")
    first = load_model(packed, device="cpu")
    monkeypatch.setattr(folder_import.FolderImport, "write", lambda *_: pytest.fail("converted again"))
    assert load_model(packed, device="cpu").fingerprint == first.fingerprint


MARLIN = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
W8A8 = compressed_config(8, INT, "channel")
W8A8["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MARLIN, "the layout marlin; supported are gptq and gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the layout gemv; supported is gemm"),
        (W8A8, "quantised activations; supported are quantised weights alone"),
        (
            compressed_config(8, "float-quantized", "channel"),
            "the format float-quantized; supported are pack-quantized and",
        ),
        (compressed_config(3, PACKED, "group"), "weights of the type int with 3 bits"),
        (compressed_config(4, PACKED, "group") | {"transform_config": {"a": 1}}, "a transform_config"),
    ],
)
def test_unsupported_variants_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    packed = Path(tiny_checkpoint(tmp_path, "llama", **SHAPE))
    edit_config(packed, quantization_config=options)
    for load in (load_shape, load_model):
        with pytest.raises(ModelError, match=rf"has packed weights \(.*\) of a kind that is not supported: {message}"):
            load(packed, device="cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path, data: path.write_bytes(data[:-100]), r"model\.safetensors' is truncated: 100 bytes are missing"),
        (
            lambda path, data: path.write_bytes(b"GGUF" + data),
            r"cannot read the packed weights .* bytes of header",
        ),
        (
            lambda path, data: path.write_bytes(data[:30]),
            "cannot read the packed weights .* bytes of header",
        ),
        (lambda path, data: drop_tensor(path, "scales"), "a kind that is not supported: .* lacks 'scales'"),
        (
            lambda path, data: drop_tensor(path, "embed_tokens.weight"),
            r"are damaged; .* \(it lacks model.embed_tokens.weight",
        ),
        (
            lambda path, data: replace_tensor(path, "model.other", torch.zeros(2)),
            "the model in transformers has no model.other",
        ),
        (lambda path, data: replace_tensor(path, GATE, torch.full((1, 1), torch.nan)), "scales that are not finite"),
        (lambda path, data: replace_tensor(path, GATE, torch.zeros(3, 128)), "3 groups for 64 inputs"),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    damage: Callable[[Path, bytes], None], message: str, tmp_path: Path
) -> None:
    _, packed = write_folders(tmp_path, "gptq-4")
    path = packed / "model.safetensors"
    damage(path, path.read_bytes())
    with pytest.raises(ModelError, match=message):
        load_model(packed, device="cpu")


GATE = "model.layers.1.mlp.gate_proj.scales"


def drop_tensor(path: Path, name: str) -> None:
    save_file({key: each for key, each in load_file(path).items() if not key.endswith(name)}, path, {"format": "pt"})


def replace_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    state = load_file(path)
    save_file(state | {name: tensor.expand_as(state[name]).contiguous() if tensor.numel() == 1 else tensor}, path)

"""Test that damaged and unsupported models are refused, without access to the network."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import edit_config, tiny_model
from transformers import MambaConfig, MambaForCausalLM

from offload_rt.errors import ModelError
from offload_rt.models import source
from offload_rt.models.loading import load_model
from offload_rt.models.registry import architectures
from offload_rt.models.shape import load_shape


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every connection attempt fail, and return the list of attempted hosts."""
    attempts: list[str] = []

    def refuse(host: str, *_: Any, **__: Any) -> None:
        attempts.append(host)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rename_config_to_adapter_config(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def remove_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(folder, max_shard_size="200kB")
    next(folder.glob("model-00002*.safetensors")).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "adapter": (rename_config_to_adapter_config, r"is a PEFT adapter.*merge_and_unload\(\)"),
    "contradiction": (
        lambda folder: edit_config(folder, model_type="mixtral"),
        "is inconsistent: architecture LlamaForCausalLM, model type 'mixtral'",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "only pickled weights"),
    "lost weight": (
        lambda folder: edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight")),
        "lacks model.layers.2.mlp.up_proj.weight; it is not a complete model",
    ),
    "lost head": (
        lambda folder: edit_weights(folder, lambda weights: weights.pop("lm_head.weight")),
        "lacks lm_head.weight",
    ),
    "another shape": (
        lambda folder: edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(32)})),
        "has another shape for model.norm.weight",
    ),
    "cut off": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000]),
        r"model.safetensors' is truncated: [\d,]+ bytes are missing; download or copy it again",
    ),
    "lost shard": (remove_shard, "model-00002-of-00004.safetensors' does not exist, but the index"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot load the tokenizer of"),
}
"""Damage to a checkpoint folder, and the error that must name it."""


class TestRefusals:
    def assert_refused(self, model: Any, message: str) -> None:
        with pytest.raises(ModelError, match=message) as caught:
            load_model(model, device="cpu" if isinstance(model, (str, Path)) else "auto")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "path", ["./nowhere", "/nowhere/at all", "~/nowhere", "models/", "a/b/c", "..", "", "C:\\models\\llama", "x y"]
    )
    def test_a_path_never_reaches_the_network(
        self, path: str, no_network: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")  # ".." must not find files beside this repository
        self.assert_refused(path, "does not exist|no config.json")
        assert no_network == []

    def test_a_hub_id_without_network(self, no_network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # avoid 20 s of retries
        self.assert_refused("offload-rt-tests/no-such-model", "not a local folder, so looked up on the hub")

    def test_model_that_is_not_in_this_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(source.SHIPPED, "reference-opt", "no-such-folder")
        self.assert_refused("reference-opt", "does not ship with this version")

    def test_unsupported_architecture(self, folder: Path, no_network: list[str]) -> None:
        edit_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")
        self.assert_refused(
            folder, r"^MambaForCausalLM is not supported: none of the \d+ layers of .* has an attention module"
        )
        edit_config(folder, architectures=None)
        self.assert_refused(folder, "^model type 'mamba' is not supported; supported are " + ", ".join(architectures()))
        config = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
        self.assert_refused(MambaForCausalLM(config), "^MambaForCausalLM is not supported")

    def test_remote_code(self, folder: Path) -> None:
        code = folder / "modeling_custom.py"
        code.write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
        edit_config(folder, model_type="custom", auto_map={"AutoConfig": "modeling_custom.Custom"})
        self.assert_refused(folder, "the configuration of .* is not valid")
        assert not (folder / "ran").exists()

    @pytest.mark.parametrize("change", DAMAGES)
    def test_damaged_folder(self, change: str, folder: Path) -> None:
        damage, message = DAMAGES[change]
        damage(folder)
        self.assert_refused(folder, message)

    @pytest.mark.parametrize("text", ["{", "", "[1]", '{"architectures": ["LlamaForCausalLM"]}', "\0\1\2"])
    def test_damaged_config(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        self.assert_refused(folder, "configuration of")

    @pytest.mark.parametrize("key", ["num_attention_heads", "hidden_act"])
    def test_invalid_config(self, folder: Path, key: str) -> None:
        edit_config(folder, **{key: "many"})
        self.assert_refused(folder, "cannot load the weights|configuration of .* is not valid: .*many")
        with pytest.raises(ModelError, match=r"configuration of .* is not valid: .*many"):
            load_shape(folder)

    def test_weight_file_instead_of_a_folder(self, folder: Path) -> None:
        self.assert_refused(folder / "model.safetensors", "is a file")

    def test_surplus_weights_are_named(self, folder: Path) -> None:
        edit_weights(folder, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
        with pytest.warns(UserWarning, match=r"unused weights model.layers.0.self_attn.q_proj.bias"):
            load_model(folder, device="cpu")

    def test_peft_adapters(self) -> None:
        marked, wrapped = tiny_model("llama"), tiny_model("llama")
        # as transformers' `load_adapter` does
        marked._hf_peft_config_loaded = True
        wrapped.__class__ = type("PeftModelForCausalLM", (type(wrapped),), {"__module__": "peft.peft_model"})
        for model, load in itertools.product((marked, wrapped), (load_model, load_shape)):
            with pytest.raises(ModelError, match=r"has PEFT adapters.*merge_and_unload\(\)") as refused:
                load(model)
            assert refused.value.reason == "peft"

    def test_unsupported_loaded_models(self) -> None:
        self.assert_refused(tiny_model("llama", num_key_value_heads=3), "4 query heads cannot share 3 KV heads")
        self.assert_refused(tiny_model("gpt2", add_cross_attention=True), "cross-attention")
        scattered = tiny_model("llama")
        scattered.lm_head.to("meta")
        self.assert_refused(scattered, "the weights are on cpu, meta")

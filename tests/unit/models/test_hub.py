"""Test downloads from the hub, the local hub cache, and checkpoints with custom code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.tiny_models import edit_config, tiny_checkpoint, tiny_prompt

from offload_rt import LLM, ConfigError, EngineConfig, ModelError, SamplingParams
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape
from offload_rt.models.source import find_source, hub_of

GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    repository = tmp_path / "cache" / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    for revision, commit, layers in (("main", "a" * 40, 2), ("older", "b" * 40, 1)):
        tiny_checkpoint(repository / "snapshots" / commit, "llama", num_hidden_layers=layers)
        (repository / "refs" / revision).write_text(commit)
    return tmp_path / "cache"


@pytest.mark.usefixtures("offline")
def test_revision_is_loaded_from_download_dir(hub_cache: Path) -> None:
    for revision, layers in ((None, 2), ("main", 2), ("older", 1), ("b" * 40, 1)):
        config = EngineConfig(revision=revision, download_dir=str(hub_cache), policy="full", host_memory="4MiB")
        llm = LLM("somebody/tiny", config)
        assert llm.geometry.layers == layers
        assert llm.tokenizer is not None
        assert load_shape("somebody/tiny", hub=hub_of(config)).geometry.layers == layers
    with pytest.raises(ModelError, match="somebody/tiny"):
        LLM("somebody/tiny", revision="none", download_dir=str(hub_cache))
    with pytest.raises(ModelError, match="somebody/tiny"):
        LLM("somebody/tiny")


def test_download_dir_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_of(EngineConfig(download_dir="~/models")).options["cache_dir"] == str(tmp_path / "models")


def test_hf_token_is_never_shown() -> None:
    config = EngineConfig(hf_token="hf_secret")
    assert hub_of(config).options["token"] == "hf_secret"
    assert "secret" not in repr(config) + repr(hub_of(config)) + repr(find_source("somebody/tiny", hub_of(config)))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        EngineConfig(trust_remote_code="yes")  # type: ignore[arg-type]


REMOTE_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()

class CustomConfig(LlamaConfig):
    model_type = "custom"

class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
    def forward(self, *args, **named):
        out = super().forward(*args, **named)
        out.logits = out.logits * {factor}
        return out
"""


def save_with_remote_code(folder: Path, factor: float) -> Path:
    """Save a Llama as a custom class whose code scales its logits by `factor`."""
    tiny_checkpoint(folder, "llama")
    (folder / "modeling_custom.py").write_text(REMOTE_CODE.format(ran=str(folder / "ran"), factor=factor))
    names = {"AutoConfig": "modeling_custom.CustomConfig", "AutoModelForCausalLM": "modeling_custom.CustomForCausalLM"}
    edit_config(folder, model_type="custom", architectures=["CustomForCausalLM"], auto_map=names)
    return folder


def test_remote_code_runs_only_if_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub", "transformers.utils"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    folder = save_with_remote_code(tmp_path / "same", 1)
    with pytest.raises(ModelError, match="CustomForCausalLM is not supported"):
        load_model(folder)
    assert not (folder / "ran").exists()
    shape = load_shape(folder, hub=hub_of(EngineConfig(trust_remote_code=True)))
    ours = LLM(folder, trust_remote_code=True, policy="full", host_memory="4MiB")
    assert (folder / "ran").exists() and shape.geometry == ours.geometry
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    edit_config(plain, model_type="llama", architectures=["LlamaForCausalLM"], auto_map={})
    theirs = LLM(plain, policy="full", host_memory="4MiB")
    prompt = tiny_prompt(40)
    assert [e.token_id for e in ours.stream(prompt, GREEDY)] == [e.token_id for e in theirs.stream(prompt, GREEDY)]
    # load-time verification refuses code that computes more than its modules
    with pytest.raises(ModelError, match="the head differs") as refused:
        load_model(save_with_remote_code(tmp_path / "other", 0.5), hub=hub_of(EngineConfig(trust_remote_code=True)))
    assert refused.value.reason == "verification"

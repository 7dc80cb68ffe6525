"""Test the language models of multimodal checkpoints: tokens, loaded weights, and fingerprints.

`test_architectures.py` covers multimodal models that are already loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import RUNS, VOCAB, WINDOW, architecture, build
from support.outputs import completed
from support.tiny_models import assert_greedy, edit_config
from transformers import AutoModelForImageTextToText

from offload_rt import LLM, EngineConfig, ModelError, SamplingParams
from offload_rt.models import checkpoint, loading
from offload_rt.models.fingerprint import fingerprint
from offload_rt.models.loading import load_model
from offload_rt.models.multimodal import unused_modules
from offload_rt.models.shape import load_shape
from offload_rt.models.weights import layer_bytes
from offload_rt.planning.device_plan import plan_for

MULTIMODAL = [name for name, kind in RUNS.items() if "text_config" in kind.options]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = torch.randint(1, VOCAB, (3 * WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()
NOTICE = r"ignore:.*images and audio are not supported"
pytestmark = pytest.mark.filterwarnings(NOTICE)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def save(name: str) -> tuple[Path, Any]:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name), architecture(name)
            made[name][1].save_pretrained(made[name][0])
        return made[name]

    return save


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MULTIMODAL)
def test_folder_loads_only_the_language_model(name: str, saved_model: Any) -> None:
    folder, whole = saved_model(name)
    with pytest.warns(
        UserWarning, match=r"only the language model is loaded; images and audio are not supported"
    ) as caught:
        llm = LLM(folder, policy="full", host_memory="4MiB", verify="always", dtype="float32", device="cpu")
    assert len(caught) == 1, "no warning about weights of other parts"
    assert_greedy(whole, PROMPT, completed(llm.generate([PROMPT], GREEDY))[0].token_ids)
    loaded, shape = load_model(folder, dtype="float32", verify="off"), load_shape(folder, dtype="float32")
    others = sum(w.nbytes for part in unused_modules(whole) for w in whole.get_submodule(part).parameters())
    assert others > 0
    assert loaded.weight_bytes == shape.weight_bytes
    held = sum(w.nbytes for w in whole.parameters())
    buffers = sum(buffer.nbytes for buffer in whole.get_decoder().buffers())
    assert loaded.weight_bytes == held - others + buffers
    assert shape.geometry == loaded.adapter.geometry == load_model(whole).adapter.geometry
    assert loaded.fingerprint == fingerprint(whole)
    changed = copy.deepcopy(whole)
    next(changed.get_submodule(unused_modules(whole)[0]).parameters()).view(-1)[0] += 1
    assert loaded.fingerprint == fingerprint(changed), "the fingerprint does not depend on the vision tower"


def test_loaded_dtype_and_size_equal_the_planned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "computes_bfloat16", lambda: True)
    architecture("gemma3_multimodal", dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded, shape = load_model(tmp_path, device="cpu"), load_shape(tmp_path, device="cpu")
    assert loaded.adapter.dtype == shape.dtype == torch.bfloat16 and loaded.weight_bytes == shape.weight_bytes


@pytest.mark.parametrize("name", ["gemma3_multimodal", "qwen2_vl"])
def test_layers_are_streamed(name: str, saved_model: Any) -> None:
    folder, whole = saved_model(name)
    config = EngineConfig(policy="full", device_memory="1GiB", max_model_len=64, host_memory="4MiB", dtype="float32")
    shape = load_shape(folder, dtype="float32")
    limit = shape.weight_bytes + plan_for(config, shape).costs.total([64]) - 1
    llm = LLM(folder, config, device_memory=limit)
    weights = llm.runner.weights
    assert weights is not None and weights.stream is not None and len(weights.stream.layers)
    assert_greedy(whole, PROMPT, completed(llm.generate([PROMPT], GREEDY))[0].token_ids)
    assert weights.stream.bytes > 0


def test_session_continues_with_the_loaded_multimodal_model(saved_model: Any, tmp_path: Path) -> None:
    folder, whole = saved_model("mistral3")
    first = LLM(folder, policy="full", host_memory="4MiB", dtype="float32").session("s", tmp_path)
    list(first.send(PROMPT * 3, GREEDY))
    first.close()
    again = LLM(whole, policy="full", host_memory="4MiB").session("s", tmp_path)
    before = [*again.tokens, *PROMPT]
    assert_greedy(whole, before, [event.token_id for event in again.send(PROMPT, GREEDY)])
    assert again.loaded_tokens > 3 * len(PROMPT)
    again.close()


def test_packed_language_models_run(tmp_path: Path) -> None:
    """bitsandbytes does not pack the vision tower, so in plans, only the language model counts as packed."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    wide = RUNS["llava"].options["text_config"] | {"hidden_size": 64, "intermediate_size": 128}
    build("Llava", **(RUNS["llava"].options | {"text_config": wide})).save_pretrained(tmp_path / "plain")
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    whole: Any = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "plain", quantization_config=packed, dtype=torch.float32
    )
    whole.save_pretrained(tmp_path / "packed")
    llm = LLM(tmp_path / "packed", policy="full", host_memory="4MiB", verify="always", dtype="float32")
    assert_greedy(whole, PROMPT, completed(llm.generate([PROMPT], GREEDY))[0].token_ids)
    shape, loaded = load_shape(tmp_path / "packed", dtype="bfloat16"), load_model(tmp_path / "packed", dtype="bfloat16")
    assert shape.packing == "bitsandbytes"
    assert shape.sizes.fixed == loaded.weight_bytes - sum(map(layer_bytes, loaded.layers))
    assert len(set(shape.sizes.layers)) == 1, "layer 0 of the vision tower is not counted"


class TestRefusals:
    def test_unsupported_language_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = RUNS["llava"].options["text_config"] | {"model_type": "falcon", "alibi": True}
        build("Llava", **(RUNS["llava"].options | {"text_config": text})).save_pretrained(tmp_path)
        monkeypatch.setattr(loading, "read_weights", lambda *_, **__: pytest.fail("read"))
        for read in (load_model, load_shape):
            with pytest.raises(ModelError, match="ALiBi") as refused:
                read(tmp_path)
            assert refused.value.reason == "alibi"

    def test_forward_pass_that_needs_unused_modules(self, saved_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(self: Any, input_ids: torch.Tensor, **named: Any) -> None:
            raise AttributeError(self.model.vision_tower.device)

        folder, model = saved_model("llava")
        monkeypatch.setattr(type(model), "forward", forward)
        with pytest.raises(ModelError, match=r"Llava.* cannot be verified"):
            load_model(folder, verify="always")

    def test_class_that_transformers_does_not_have(self, saved_model: Any, tmp_path: Path) -> None:
        saved_model("llava")[1].config.save_pretrained(tmp_path)
        edit_config(tmp_path, architectures=["StrangeForConditionalGeneration"])
        with pytest.raises(
            ModelError, match="it is multimodal, and this version of transformers has no class"
        ) as refused:
            load_model(tmp_path)
        assert refused.value.reason == "multimodal"

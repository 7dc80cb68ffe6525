"""Test skewed checkpoints, artifacts of calibrations, and their cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_model, tiny_prompt
from transformers import AutoTokenizer
from transformers.models.auto import AutoModelForCausalLM

from offload_rt import LLM
from offload_rt.errors import ArtifactError, ConfigError, InputError, ModelError
from offload_rt.models.loading import load_model
from offload_rt.models.registry import adapter_for
from offload_rt.models.source import find_source
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.skewing import artifact as artifact_module
from offload_rt.skewing import calibrate as calibrate_module
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.skewing.calibrate import cache_path, cached_artifact, calibrate, measure
from offload_rt.skewing.fold import fold, skew_model
from offload_rt.skewing.prediction import Correction
from offload_rt.skewing.rotation import BASES

METHODS = tuple(BASES)
ABSOLUTE_POSITIONS = [
    ("opt", {}),
    ("opt_postnorm", {}),
    ("gpt2", {}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
]


# --- folding ---------------------------------------------------------------------------------------------------------


def artifact_for(model: Any, method: str, tokens: int = 300) -> SkewArtifact:
    loaded = load_model(model)
    return calibrate(
        loaded.adapter, tiny_prompt(tokens), method=method, fingerprint=loaded.fingerprint, calibration="tiny prompt"
    )


@pytest.mark.sampled
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "overrides"), ABSOLUTE_POSITIONS)
def test_folded_checkpoint_gives_equal_logits(
    name: str, overrides: dict[str, Any], method: str, tmp_path: Path
) -> None:
    model = tiny_model(name, **overrides)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fold(model, artifact_for(model, method)).save_pretrained(tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the original changed"
    folded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([tiny_prompt(400, seed=7)])
    with torch.no_grad():
        expected, actual = model(ids).logits, folded(ids).logits
    assert (actual - expected).abs().max() <= 5e-5 * expected.abs().max()
    # The model is skewed: queries are uncorrelated on the calibration text.
    moment = measure(adapter_for(folded), tiny_prompt(300))[0].query
    correlated = moment - moment.diagonal(dim1=-2, dim2=-1).diag_embed()
    assert correlated.abs().max() < 1e-4 * moment.abs().max()


def test_fold_without_biases_and_from_few_tokens(tmp_path: Path) -> None:
    model = tiny_model("opt", enable_bias=False)
    folded = fold(model, artifact_for(model, "balanced", tokens=7))  # fewer tokens than d = 16
    ids = torch.tensor([tiny_prompt(200)])
    expected = model(ids).logits
    assert (folded(ids).logits - expected).abs().max() <= 5e-5 * expected.abs().max()


def test_fold_shares_unchanged_parameters() -> None:
    model = tiny_model("gpt2", dtype=torch.bfloat16)
    folded = fold(model, artifact_for(model, "svd"))
    original = {id(p) for p in model.parameters()}
    new = [name for name, p in folded.named_parameters() if id(p) not in original]
    assert all("c_attn" in name for name in new)
    assert len(new) == 2 * 3
    assert folded.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_folding_a_model_with_rope_is_an_error(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(ModelError, match="RoPE"):
        fold(model, artifact_for(model, "svd", tokens=20))


def test_folding_an_artifact_of_other_shapes_is_an_error() -> None:
    artifact = artifact_for(tiny_model("opt", num_attention_heads=2), "svd")
    with pytest.raises(ArtifactError, match=artifact.fingerprint):
        fold(tiny_model("opt"), artifact)


# --- the command -----------------------------------------------------------------------------------------------------


def test_skew_model_with_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
    tiny_model("gpt2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    report = skew_model(
        str(tmp_path / "model"), tmp_path / "out", method="balanced", calibration="It was a dark night. " * 50,
        calibration_tokens=200,
    )  # fmt: skip
    assert report.calibration.startswith("first 200 tokens of a given text at positions below ")
    assert report.folded == tmp_path / "out" / "folded"
    assert report.logit_difference is not None
    assert 0 < report.logit_difference <= 5e-5
    assert report.energy_kept_skewed > 0
    assert AutoTokenizer.from_pretrained(report.folded)("night") == tokenizer("night")
    loaded = load_model(str(report.folded))
    assert loaded.fingerprint != report.fingerprint
    SkewArtifact.load(report.artifact, report.fingerprint)
    with pytest.raises(ArtifactError, match=loaded.fingerprint):
        SkewArtifact.load(report.artifact, loaded.fingerprint)


def test_skew_model_without_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    report = skew_model(str(tmp_path / "model"), tmp_path / "out", calibration_tokens=100)
    assert report.method == InfiniGenOptions().skew
    assert report.folded is None
    assert report.logit_difference is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["skew.safetensors"]
    assert load_model(str(tmp_path / "model")).fingerprint == report.fingerprint
    with pytest.raises(InputError, match="no tokenizer"):
        skew_model(str(tmp_path / "model"), tmp_path / "out", calibration="text")
    with pytest.raises(ConfigError, match="calibration_tokens=0"):
        skew_model(str(tmp_path / "model"), tmp_path / "out", calibration_tokens=0)
    with pytest.raises(InputError, match="cannot write"):
        skew_model(str(tmp_path / "model"), report.artifact)


def test_artifacts_of_different_texts_have_different_identities(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
    tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = ("It was a dark night. " * 20, "Nobody had seen the river so high. " * 20)
    reports = [
        skew_model(str(tmp_path / "model"), tmp_path / str(i), calibration=text, calibration_tokens=20)
        for i, text in enumerate(texts)
    ]
    first, second = (SkewArtifact.load(report.artifact, report.fingerprint) for report in reports)
    assert not torch.equal(first.query, second.query)
    assert first.identity != second.identity


def test_skew_model_of_a_gguf_file_fits_its_packed_weights(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", "Q4_0", intermediate_size=64, num_hidden_layers=1)
    report = skew_model(str(tmp_path / "model.gguf"), tmp_path / "out", calibration_tokens=20)
    assert load_model(tmp_path / "model.gguf").fingerprint == report.fingerprint


def test_skew_model_with_rope_scaling_for_long_texts(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    tiny_model("llama", rope_parameters=rope, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    report = skew_model(str(tmp_path / "model"), tmp_path / "out", calibration_tokens=20)
    assert load_model(str(tmp_path / "model")).fingerprint == report.fingerprint


# --- the artifact ----------------------------------------------------------------------------------------------------


@pytest.fixture
def llama_artifact() -> SkewArtifact:
    return artifact_for(tiny_model("llama"), "balanced", tokens=50)


def test_artifact_round_trip(llama_artifact: SkewArtifact, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "skew.safetensors"
    llama_artifact.save(path)
    first = path.read_bytes()
    llama_artifact.save(path)
    assert path.read_bytes() == first, "not deterministic"
    assert list(path.parent.iterdir()) == [path], "temporary files left"
    loaded = SkewArtifact.load(path, llama_artifact.fingerprint).to("cpu")
    assert (loaded.method, loaded.fingerprint, loaded.calibration) == (
        llama_artifact.method,
        llama_artifact.fingerprint,
        llama_artifact.calibration,
    )
    for name in ("query", "key", "key_mean", "key_std", "slope", "offset"):
        assert torch.equal(getattr(loaded, name), getattr(llama_artifact, name))
    assert SkewArtifact.load(path, None).fingerprint == llama_artifact.fingerprint


def test_svd_artifact_with_a_shared_tensor_can_be_saved(tmp_path: Path) -> None:
    identity = torch.eye(4).expand(2, 3, 4, 4).contiguous()
    mean, std, correction = torch.zeros(2, 3, 4), torch.ones(2, 3, 4), Correction.none(2)
    SkewArtifact("svd", identity, identity, mean, std, correction.slope, correction.offset, "f", "c").save(
        tmp_path / "a"
    )
    assert torch.equal(SkewArtifact.load(tmp_path / "a", "f").key, identity)


def test_artifact_of_another_model_is_an_error(llama_artifact: SkewArtifact, tmp_path: Path) -> None:
    llama_artifact.save(tmp_path / "a")
    other = load_model(tiny_model("llama", seed=1)).fingerprint
    with pytest.raises(ArtifactError, match=rf"{llama_artifact.fingerprint}.*{other}"):
        SkewArtifact.load(tmp_path / "a", other)


def test_artifact_of_another_version_is_an_error(
    llama_artifact: SkewArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(artifact_module, "VERSION", 99)
        llama_artifact.save(tmp_path / "a")
    with pytest.raises(ArtifactError, match=rf"version 99.*version {artifact_module.VERSION}"):
        SkewArtifact.load(tmp_path / "a", None)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_artifact_is_an_error(llama_artifact: SkewArtifact, tmp_path: Path, keep: int) -> None:
    llama_artifact.save(tmp_path / "a")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:keep])
    with pytest.raises(ArtifactError, match="damaged"):
        SkewArtifact.load(tmp_path / "a", llama_artifact.fingerprint)


def test_changed_artifact_is_an_error(llama_artifact: SkewArtifact, tmp_path: Path) -> None:
    llama_artifact.save(tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    data[-1000] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"damaged.*digest"):
        SkewArtifact.load(tmp_path / "a", llama_artifact.fingerprint)


def test_file_that_is_not_an_artifact_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        SkewArtifact.load(tmp_path / "nothing", None)
    with pytest.raises(ArtifactError, match="no such file"):
        SkewArtifact.load(tmp_path, None)
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ArtifactError, match="no skew artifact"):
        SkewArtifact.load(tmp_path / "other", None)
    (tmp_path / "text").write_text("x" * 500)
    with pytest.raises(ArtifactError, match="damaged"):
        SkewArtifact.load(tmp_path / "text", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 2, 4, 3)}, r"key is .*expected float32 \(2, 2, 4, 4\)"),
        ({"query": torch.zeros(2, 2, 4)}, r"query has shape"),
        ({"key_std": torch.zeros(2, 2, 4, dtype=torch.float64)}, "key_std is torch.float64"),
        ({"key_mean": torch.full((2, 2, 4), torch.inf)}, "not finite"),
        ({"slope": torch.ones(2, 2, 8)}, r"slope is .*expected float32 \(3, 2, 8\)"),
        ({"offset": torch.zeros(3, 2, 1)}, r"offset is .*expected float32 \(3, 2, 8\)"),
        ({"key_mean": None}, "damaged"),
    ],
)
def test_inconsistent_artifact_is_an_error(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    """The file's digest is valid, but its tensors are inconsistent."""
    valid = {
        "query": torch.zeros(2, 2, 4, 4),
        "key": torch.zeros(2, 2, 4, 4),
        "key_mean": torch.zeros(2, 2, 4),
        "key_std": torch.zeros(2, 2, 4),
        "slope": torch.ones(3, 2, 8),
        "offset": torch.zeros(3, 2, 8),
    }
    tensors = {name: tensor for name, tensor in (valid | change).items() if tensor is not None}
    version = artifact_module.VERSION
    header = {"format": "offload-rt skew", "version": version, "method": "svd", "fingerprint": "f", "calibration": "c"}
    header["sha256"] = artifact_module._digest(tensors)
    save_file(tensors, tmp_path / "a", metadata={"skew": json.dumps(header)})
    with pytest.raises(ArtifactError, match=message):
        SkewArtifact.load(tmp_path / "a", "f")


# --- the cache -------------------------------------------------------------------------------------------------------


def test_cached_artifact_is_reused_and_replaced_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate_module, "TOKENS", 100)
    loaded = load_model(tiny_model("llama"))
    path = cache_path(loaded, "svd")
    assert path.parent == tmp_path / "skew"
    first = cached_artifact(loaded, "svd")
    content = path.read_bytes()

    cached_artifact(loaded, "balanced")  # must not affect the svd entry
    assert len(list(path.parent.iterdir())) == 2
    path.write_bytes(content[:-7])
    restored = cached_artifact(loaded, "svd")
    assert path.read_bytes() == content, "a damaged file is replaced by an identical one"
    assert torch.equal(restored.query, first.query)

    with monkeypatch.context() as patch:
        patch.delattr(calibrate_module, "measure")
        assert torch.equal(cached_artifact(loaded, "svd").query, first.query)
        patch.setattr(calibrate_module, "TOKENS", 99)
        with pytest.raises(NameError):
            cached_artifact(loaded, "svd")


def test_unwritable_cache_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "file"))
    assert cached_artifact(load_model(tiny_model("opt")), "svd").method == "svd"
    assert "not cached" in caplog.text


def test_cache_path_depends_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(tiny_model("opt"))
    monkeypatch.delenv("OFFLOAD_RT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    path = cache_path(loaded, "svd")
    assert path.parent == Path("/somewhere/offload-rt/skew")
    assert path.name == f"{loaded.fingerprint}-svd-random2048-1024-v2.safetensors"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path(loaded, "svd").parent == Path.home() / ".cache" / "offload-rt" / "skew"


def test_first_load_reports_calibration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("offload_rt.utils.progress.PATIENCE_SECONDS", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    model = tiny_model("llama", seed=11)
    LLM(model, host_memory="8MiB")
    assert "calibrating LlamaForCausalLM (once)" in capsys.readouterr().err
    LLM(model, host_memory="8MiB")
    assert "calibrating" not in capsys.readouterr().err

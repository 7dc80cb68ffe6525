"""`offload-rt eval experts`: what it counts, by hand and on a tiny mixture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.architectures import architecture, build

from offload_rt.cli import main
from offload_rt.errors import ConfigError
from offload_rt.eval.simulate.expert_choices import Choices, choices_of, replayed, rows_of
from offload_rt.models.loading import load_model
from offload_rt.models.source import find_source


def test_fetches_are_counted_by_hand() -> None:
    """Two of four experts stay; the second token finds one of two, the third none; guesses are right for the last."""
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0]])
    guessed = torch.tensor([[2, 3], [1, 2], [3, 0]])
    one = Choices(chosen, guessed, 1_000_000, 4)
    assert replayed(one, 2, ahead=False) == (1, 5, 5)
    assert replayed(one, 2, ahead=True) == (4, 2, 7)
    [row] = rows_of([one], [0.5])
    assert row["found"] == pytest.approx(1 / 6) and row["recall"] == pytest.approx(4 / 6) and row["chance"] == 0.5
    assert (row["fetched"], row["waited"], row["fetched_ahead"]) == pytest.approx((5 / 3, 2 / 3, 7 / 3))


def test_choices_are_those_of_transformers(tmp_path: Path) -> None:
    """And a layer's guess is its own router's, from the residual stream behind the attention of the one before."""
    model = architecture("mixtral")
    found = choices_of(load_model(model), tokens := [5, 9, 60, 3, 17])
    residuals: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: residuals.append(args[0]))
    logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    assert len(found) == len(logits) == 3 and found[0].guessed is None
    for layer, (one, scores) in enumerate(zip(found, logits, strict=True)):
        assert torch.equal(one.chosen.sort()[0], scores.topk(2)[1].sort()[0])
        if one.guessed is not None:
            own = model.model.layers[layer]
            guess = own.mlp.gate(own.post_attention_layernorm(residuals[layer - 1]))[2]
            assert torch.equal(one.guessed.sort()[0], guess.sort()[0])


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    build("Mixtral", vocab_size=2048, num_local_experts=4).save_pretrained(folder)
    for file in Path(find_source("reference").place).glob("tokenizer*"):
        shutil.copy(file, folder)
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4, encoding="utf-8")
    assert main(["eval", "experts", str(folder), "--text", str(text), "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "experts.json").read_text())["rows"]
    assert [row["slots"] for row in rows] == [2] and "| 2 | 4 | 2 |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no mixture"):
        choices_of(load_model(architecture("llama3")), [1, 2])

"""Compare preset "paper" with a plain implementation of the published method that uses dense matrices and loops."""

from __future__ import annotations

import math

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM
from offload_rt.engine.runner import Runner
from offload_rt.models.adapter import ModelAdapter
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.skewing.calibrate import cached_artifact

RATIO, CAP = 0.3, 0.2


class PlainInfiniGen:
    """InfiniGen with dense matrices. It keeps the K and V of every token, and selections are masks."""

    def __init__(self, adapter: ModelAdapter, artifact: SkewArtifact, prompt: list[int]) -> None:
        self.adapter, self.geometry = adapter, adapter.geometry
        self.artifact = artifact
        self.alpha = self.geometry.default_alpha
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.columns: list[torch.Tensor] = []
        self.attended: list[list[int]] = []
        self._prefill(torch.tensor(prompt))

    def _prefill(self, tokens: torch.Tensor) -> None:
        adapter, at = self.adapter, torch.arange(len(tokens))
        x = adapter.embed(tokens, at)
        for layer in range(self.geometry.layers):
            q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), at)
            seen = at[:, None] >= at
            self.k.append(k)
            self.v.append(v)
            self.columns.append(self._choose_columns(layer, q, k))
            x = self._finish_layer(layer, x, self._attention(layer, q, seen.expand(self.geometry.heads, -1, -1)))
        self.last = adapter.logits(x[-1:])[0]

    def _choose_columns(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the columns `[Hkv, r]` for which the sum of |Q~| + |K~| over the prompt is largest."""
        count = max(1, int(RATIO * self.geometry.head_dim))
        chosen = []
        for head in range(self.geometry.kv_heads):
            skew = self.artifact.query[layer, head].to(k.dtype)
            group = q[head * self.geometry.group : (head + 1) * self.geometry.group].flatten(0, 1)
            sums = (group @ skew).abs().sum(0) + (k[head] @ skew).abs().sum(0)
            chosen.append(sums.topk(count).indices)
        return torch.stack(chosen)

    def _attention(self, layer: int, q: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the attention `[H, T, d]` of `q` `[H, T, d]` to the tokens in `seen` (bool `[H, T, N]`)."""
        k, v = (x.repeat_interleave(self.geometry.group, 0) for x in (self.k[layer], self.v[layer]))
        scores = (q @ k.transpose(1, 2) * self.geometry.scales[layer]).masked_fill(~seen, -math.inf)
        return torch.softmax(scores, -1) @ v

    def _finish_layer(self, layer: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        residual = self.adapter.after_attention(layer, x, out.transpose(0, 1).flatten(1))
        return self.adapter.mlp(layer, residual, torch.empty(0))  # this model's MLPs ignore the tokens

    def decode(self, token: int) -> torch.Tensor:
        adapter, length = self.adapter, self.k[0].shape[1] + 1
        at = torch.tensor([length - 1])
        x = adapter.embed(torch.tensor([token]), at)
        before = None
        self.attended.append([])
        for layer in range(self.geometry.layers):
            attention_input = adapter.attention_input(layer, x)
            q, k, v = adapter.qkv(layer, attention_input, at)
            self.k[layer] = torch.cat((self.k[layer], k), 1)
            self.v[layer] = torch.cat((self.v[layer], v), 1)
            seen = torch.zeros(self.geometry.heads, 1, length, dtype=torch.bool)
            seen[:, :, -1] = True
            if layer == 0:
                seen[:] = True
            else:
                assert before is not None
                speculated = adapter.query(layer, before, at)[:, 0]
                for head, tokens in enumerate(self._select(layer, speculated, range(length - 1))):
                    seen[head * self.geometry.group : (head + 1) * self.geometry.group, 0, tokens] = True
            self.attended[-1].append(int(seen[0].sum()))
            x = self._finish_layer(layer, x, self._attention(layer, q, seen))
            before = attention_input
        return adapter.logits(x)[0]

    def _select(self, layer: int, q: torch.Tensor, candidates: range) -> list[torch.Tensor]:
        """Return the tokens that each KV head selects with the predicted query `q` `[H, d]`."""
        group, scores = self.geometry.group, []
        for head in range(self.geometry.heads):
            kv = head // group
            skew = self.artifact.query[layer, kv][:, :].to(q.dtype)[:, self.columns[layer][kv]]
            keys = self.k[layer][kv, candidates.start : candidates.stop] @ skew
            scores.append(q[head] @ skew @ keys.T * self.geometry.scales[layer])
        passing = [s >= s.max() - self.alpha for s in scores]
        count = math.ceil(sum(int(p.sum()) for p in passing) / len(passing))
        count = max(1, min(count, int(CAP * len(candidates))))
        any_head = torch.stack(passing).any(0)
        chosen = []
        for kv in range(self.geometry.kv_heads):
            weights = torch.stack([torch.softmax(s, 0) for s in scores[kv * group : (kv + 1) * group]]).amax(0)
            chosen.append(candidates.start + weights.masked_fill(~any_head, -1).topk(count).indices)
        return chosen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_preset_paper_equals_the_published_method(name: str) -> None:
    """Everything is computed in float64, except RMSNorm, whose float32 computation causes errors of up to 1e-6."""
    tokens = tiny_prompt(160)
    model = tiny_model(name, dtype=torch.float64)
    llm = LLM(model, policy_options={"preset": "paper"}, dtype="float64", host_memory="16MiB")
    runner: Runner = llm.runner
    plain = PlainInfiniGen(runner.adapter, cached_artifact(runner.model, "svd"), tokens[:120])
    sequence = runner.new_sequence(tokens, len(tokens))
    ours = [runner.prefill(sequence, 120, want_logits=True)] + [runner.decode([sequence])[0] for _ in tokens[120:]]
    theirs = [plain.last, *(plain.decode(token) for token in tokens[120:])]
    for row, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
    for step, (fractions, counts) in enumerate(zip(sequence.trace.attended, plain.attended, strict=True)):
        assert [round(f * (121 + step)) for f in fractions] == counts
    assert any(count < 30 for counts in plain.attended for count in counts[1:]), "nothing was left out"

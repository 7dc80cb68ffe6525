"""Linear layers of a few bfloat16 rows in C: what float64 says, however many rows come together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_checkpoint, tiny_model
from torch import nn

from offload_rt.kernels import row_products
from offload_rt.models.registry import load_model
from offload_rt.models.row_linear import RowLinear, read_by_rows

pytestmark = pytest.mark.skipif(
    row_products.takes(torch.zeros(1, 32, dtype=torch.bfloat16)) is None,
    reason="this processor multiplies no bfloat16 in vectors, or torch has better (AMX), or there is no C compiler",
)


@pytest.mark.parametrize(("outs", "ins"), [(3, 32), (70, 128), (5, 416), (200, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_float64(outs: int, ins: int, bias: bool) -> None:
    """Rounded to 8 bits once; and a row is the same among fewer."""
    layer = nn.Linear(ins, outs, bias=bias).bfloat16()
    x = torch.randn(2, row_products.MOST_ROWS, ins * 2, dtype=torch.bfloat16)[..., ::2]
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    read_by_rows(layer)
    assert type(layer) is RowLinear
    with torch.inference_mode():
        few, many = layer(x[:1]), layer(x)
        fewer = [layer(x[0, :rows]) for rows in range(1, row_products.MOST_ROWS)]
    assert few.dtype == torch.bfloat16 and few.shape == expected[:1].shape
    torch.testing.assert_close(few.double(), expected[:1], rtol=2**-8, atol=1e-4)
    assert many.equal(nn.functional.linear(x, layer.weight, layer.bias)), "more rows are torch's"
    assert all(few[0, : len(rows)].equal(rows) for rows in fewer), "no sum depends on how many rows there are"


@pytest.mark.parametrize("outs", [2, 70])
def test_threads_share_the_weight(outs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as torch has, and no sum is another."""
    monkeypatch.setattr(row_products, "WORTH_A_THREAD", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight, x, found = torch.randn(outs, 96).bfloat16(), torch.randn(9, 96).bfloat16(), []
    library = row_products.takes(weight)
    assert library is not None
    for threads in (1, 3, 300):  # noqa: B007
        found.append(row_products.linear(library, x, weight, None))
        torch.testing.assert_close(found[-1], x @ weight.T, rtol=2**-7, atol=1e-2)
    assert all(found[0].equal(other) for other in found)


def test_what_is_no_number_stays_none() -> None:
    layer = nn.Linear(32, 2, bias=False).bfloat16()
    layer.weight.data.copy_(torch.tensor([[torch.inf], [1.0]]).expand(2, 32))
    read_by_rows(layer)
    with torch.inference_mode():
        out = layer(torch.tensor([1.0, -1.0] * 16).bfloat16())
    assert out[0].isnan() and out[1] == 0


def test_who_trains_gets_gradients() -> None:
    layer = nn.Linear(32, 2).bfloat16()
    read_by_rows(layer)
    layer(torch.randn(1, 32).bfloat16()).sum().backward()
    assert layer.weight.grad is not None


def test_a_checkpoint_reads_so_and_a_loaded_model_is_left_alone(tmp_path: Path) -> None:
    mine = tiny_model("qwen2", dtype=torch.bfloat16)
    folder = tiny_checkpoint(tmp_path / "tiny", "qwen2")
    loaded = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert any(isinstance(module, RowLinear) for layer in loaded.layers for module in layer.modules())
    load_model(mine)
    assert not any(isinstance(module, RowLinear) for module in mine.modules())
    exact = load_model(str(folder), device="cpu", dtype="float32")
    assert not any(isinstance(module, RowLinear) for layer in exact.layers for module in layer.modules())

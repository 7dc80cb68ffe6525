"""Compare the C code for linear layers with few rows with float64, at every instruction set level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_checkpoint, tiny_model
from torch import nn

from offload_rt.kernels import team
from offload_rt.models.linear import dense, use_backends
from offload_rt.models.linear.backend import BackendLinear
from offload_rt.models.loading import load_model

pytestmark = pytest.mark.skipif(dense.library(torch.bfloat16) is None, reason="there is no compiled code")

CPU = torch.device("cpu")
ERRORS = {torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}
"""bfloat16 outputs are rounded once, to 8 bits."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outs", "ins"), [(3, 32), (70, 128), (5, 416), (200, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(outs: int, ins: int, bias: bool, dtype: torch.dtype, level: str) -> None:
    layer = nn.Linear(ins, outs, bias=bias).to(dtype)
    x = torch.randn(dense.MAX_ROWS, ins * 2, dtype=dtype)[..., ::2]
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    use_backends(layer, CPU)
    assert type(layer) is dense.DenseLinear
    with torch.inference_mode():
        few = layer(x)
        fewer = [layer(x[:rows]) for rows in range(1, dense.MAX_ROWS)]
    assert few.dtype == dtype and few.shape == expected.shape
    torch.testing.assert_close(few.double(), expected, **ERRORS[dtype])
    # a row's result does not depend on the number of rows
    assert all(few[: len(rows)].equal(rows) for rows in fewer)


@pytest.mark.parametrize("bias", [False, True])
def test_many_bfloat16_rows_are_multiplied_in_float32(bias: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch cannot use bfloat16 instructions, the weight is converted and multiplied tile by tile."""
    monkeypatch.setattr(dense, "TILE_BYTES", 4 * 96 * 3)
    monkeypatch.setattr(dense, "torch_multiplies_bfloat16", lambda: False)
    layer = nn.Linear(96, 7, bias=bias).bfloat16()
    x = torch.randn(2, dense.MAX_ROWS, 96, dtype=torch.bfloat16)
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    use_backends(layer, CPU)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x).double(), expected, **ERRORS[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outs", [2, 70])
def test_threads_share_the_weight(outs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MIN_THREADED_WORK", 0)
    monkeypatch.setattr(dense, "PART_BYTES", 1000)
    monkeypatch.setattr(team, "threads", lambda: threads)
    layer, x, found = nn.Linear(96, outs, bias=False).to(dtype), torch.randn(9, 96).to(dtype), []
    use_backends(layer, CPU)
    for threads in (1, 3, 300):  # noqa: B007
        with torch.inference_mode():
            found.append(layer(x))
        expected = x.double() @ layer.weight.double().T
        torch.testing.assert_close(found[-1].double(), expected, rtol=2**-7, atol=1e-2)
    assert all(found[0].equal(other) for other in found)


def test_nan_and_infinity_propagate(level: str) -> None:
    layer = nn.Linear(32, 2, bias=False).bfloat16()
    layer.weight.data.copy_(torch.tensor([[torch.inf], [1.0]]).expand(2, 32))
    use_backends(layer, CPU)
    with torch.inference_mode():
        out = layer(torch.tensor([1.0, -1.0] * 16).bfloat16())
    assert out[0].isnan() and out[1] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_that_is_not_contiguous_is_multiplied_by_torch(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(64, 32, bias=False).to(dtype), torch.randn(3, 64, dtype=dtype)
    use_backends(layer, CPU)
    layer.weight.data = torch.randn(64, 32, dtype=dtype).T
    with torch.inference_mode():
        out = layer(x)
    torch.testing.assert_close(out.double(), x.double() @ layer.weight.double().T, rtol=2**-7, atol=1e-3)


def test_training_gives_gradients() -> None:
    layer = nn.Linear(32, 2).bfloat16()
    use_backends(layer, CPU)
    layer(torch.randn(1, 32).bfloat16()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checkpoints_use_the_c_code_and_loaded_models_do_not(dtype: str, tmp_path: Path) -> None:
    given_model = tiny_model("qwen2", dtype=torch.bfloat16)
    folder = tiny_checkpoint(tmp_path / "tiny", "qwen2")
    loaded = load_model(str(folder), device="cpu", dtype=dtype)
    assert any(isinstance(module, BackendLinear) for layer in loaded.layers for module in layer.modules())
    load_model(given_model)
    assert not any(isinstance(module, BackendLinear) for module in given_model.modules())

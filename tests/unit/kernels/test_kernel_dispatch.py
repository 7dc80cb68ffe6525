"""Test which tensors Triton kernels process and which ones torch processes, with and without CUDA."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType

import pytest
import torch

from offload_rt.kernels import dispatch, kv_runs, lists, low_bit, low_bit_lists, pool_rows, reference

OPERATIONS = {
    reference: {"triton_embedding": ["embedding_part"]},
    pool_rows: {"triton_gather": ["gather_rows", "gather_tokens", "write_rows"]},
    lists: {
        "triton_gather": ["scatter_slots", "gather_slots"],
        "triton_append": ["store_resident", "append_partial", "append_quantised"],
        "triton_entries": ["read_lists", "write_lists", "append_entries", "mask_scores"],
        "triton_scores": ["partial_scores", "quantised_scores"],
        "triton_select": ["select_tokens"],
        "triton_attention": ["attend_counted"],
        "triton_resident": ["attend_resident", "attend_copies"],
        "triton_skew": ["skew_queries"],
    },
    kv_runs: {"triton_kv_runs": ["attend_runs"]},
    low_bit: {"triton_low_bit_rows": ["store_rows"]},
    low_bit_lists: {
        "triton_low_bit_rows": ["append_rows"],
        "triton_low_bit_scores": ["scores"],
        "triton_low_bit": ["merge_approximate"],
    },
}
CASES = [(a, b, name) for a, modules in OPERATIONS.items() for b, names in modules.items() for name in names]


@pytest.mark.parametrize(("definition", "module", "name"), CASES, ids=[name for _, _, name in CASES])
def test_kernel_has_the_signature_of_its_torch_definition(definition: ModuleType, module: str, name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    kernel = inspect.signature(getattr(import_module(f"offload_rt.kernels.{module}"), name))
    defined = inspect.signature(getattr(definition, name))
    parameters = list(kernel.parameters.values())
    additional = parameters[len(defined.parameters) :]
    assert parameters[: len(defined.parameters)] == list(defined.parameters.values())
    assert kernel.return_annotation == defined.return_annotation
    assert all(parameter.default is not inspect.Parameter.empty for parameter in additional)


def test_cpu_tensors_use_the_torch_definition() -> None:
    # The Triton kernels do not support float64.
    q, k = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    counts = torch.tensor([5, 2])
    out, lse = dispatch.attend_counted(q, k, k, counts, 1.0)
    expected, expected_lse = lists.attend_counted(q, k, k, counts, 1.0)
    assert out.dtype == torch.float64 and torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_tensors_stay_on_the_device(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, n, 64, dtype=dtype, device="cuda") for n in (3, 300))
    counts = torch.tensor([300, 20], dtype=torch.int32, device="cuda")
    out, lse = dispatch.attend_counted(q, k, k, counts, 0.125)
    expected, expected_lse = lists.attend_counted(q.double(), k.double(), k.double(), counts, 0.125)
    assert out.is_cuda and out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)

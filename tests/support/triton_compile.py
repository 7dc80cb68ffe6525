"""Compiles every Triton kernel for a GPU, without one: run by test_triton_compile.py in a process of its own, since the
interpreter cannot be switched off again. Prints a line for each kernel: name, bytes of shared memory."""

from __future__ import annotations

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload_rt.kernels import (
    triton_append,
    triton_attention,
    triton_gather,
    triton_low_bit,
    triton_resident,
    triton_scores,
    triton_segments,
    triton_select,
)


def compiled(capability: int, kernel: Any, types: str, **constants: Any) -> None:
    """`types` of the arguments that are not constants, in order; pointers are 16-byte aligned, numbers with a type in
    capitals are multiples of 16."""
    names = [name for name in kernel.arg_names if name not in constants]
    given = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(kernel.arg_names) if given[name].startswith("*") or given[name].isupper()]
    signature = {name: kind.lower() for name, kind in given.items()}
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}", binary.metadata.shared, flush=True)


def main(capability: int) -> None:
    def build(kernel: Any, types: str, **constants: Any) -> None:
        compiled(capability, kernel, types, **constants)

    build(triton_gather._gather, "*i32 *i64 *i32 *i32 i32", WORDS=64, COLS=64, BLOCK=8)
    build(triton_gather._scatter, "*i32 *i64 *i32 i32", WORDS=64, COLS=64, BLOCK=8)
    build(triton_append._partial, "*bf16 *fp32 *i64 *i64 i32 i32 i32", KEYS=tl.bfloat16, d=256, D=256, COLUMNS=16)
    build(triton_append._keep, "*bf16 *bf16 *i64 *i64 i32", d=128, D=128)
    packed = "*bf16 *fp32 *fp32 *fp32 *i64 *i64 i32 i32"
    build(triton_append._quantised, packed, d=128, D=128, COLUMNS=16, BITS=4)
    build(triton_attention._merge, "*fp32 *fp32 *fp32 *fp32 i32 i32", d=80, D=128, PARTS=16, ALL=32)
    for kind, size, d in (("bf16", 2, 128), ("bf16", 2, 256), ("fp32", 4, 256)):
        shape = {"d": d, "D": d, "G": 4, "BLOCK": triton_attention.block_rows(d, size), "WIDEN": size == 4}
        types = f"*{kind} *{kind} *{kind} *i32 *fp32 *fp32 fp32 i32 I32 I32 I32 I32"
        build(triton_attention._attend, types, **shape, GROUP=16, PIECE=256)
        types = f"*{kind} *i64 *i32 *i32 *fp32 *fp32 fp32 i32 i32"
        build(triton_resident._attend, types, **shape, GROUP=16, PIECE=256)
        types = f"*{kind} *i64 *fp32 *fp32 fp32 i32 i32 i32"
        for queries in sorted({16, triton_segments.most_queries(d, size)}):
            build(triton_segments._attend, types, **shape, ALIGN=8, QUERIES=queries)
    for bits, d in ((2, 64), (4, 128)):
        types = "*i8 *fp32 *fp32 *fp32 *u8 *u8 *fp32 *fp32 I32 i32 i32"
        sizes = {"KEYS": d // 2, "K": d // 2, "VALUES": d * bits // 8, "V": d * bits // 8, "BITS": bits}
        build(triton_low_bit._attend, types, d=d, **sizes, G=4, GROUP=16, PIECE=8, WIDEN=False)
    partial = "*fp32 *i64 *i32 *i32 *fp32 *fp32 *fp32 i32 i32 i32 i32"
    wide = {"KEYS": tl.float16, "BYTES": 16, "ALIGN": 8}
    build(triton_scores._partial, partial, **wide, G=4, GROUP=16, BLOCK=256, COLUMNS=16)
    for bits, d, D in ((8, 38, 64), (4, 128, 128), (2, 256, 256)):
        types = "*fp32 *i64 *fp32 *fp32 *i32 *i32 *fp32 *fp32 *fp32 i32 i32 i32"
        build(triton_scores._packed, types, ALIGN=1 if d == 38 else 16, d=d, D=D, G=4, GROUP=16, BLOCK=256, BITS=bits)
    for group in (1, 4):
        types = "*fp32 *fp32 *fp32 *i32 *i32 *i32 *i32 i32 i32 fp32"
        build(triton_select._mark, types, G=group, GROUP=group, BLOCK=1024)
    for digit in (0, 3):
        build(triton_select._histogram, "*i32 *i32 *i32 *i32 i32 i32 i32 i32 i32", DIGIT=digit, BLOCK=1024)
    build(triton_select._tally, "*i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32 i32", BLOCK=1024)
    build(triton_select._write, "*i32 " * 6 + "*i64 i32 i32 i32 i32 i32 i32", BLOCKS=128, BLOCK=1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))

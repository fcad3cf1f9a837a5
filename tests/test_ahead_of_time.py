"""Every kernel compiles without a GPU, at the shapes it is launched with, and spills nothing."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", minversion="3.3")

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpage.kernels import triton_move_slots, triton_score_tokens

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted here", allow_module_level=True)

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
SCORE = {
    "direction": "*fp32",
    "norm_weight": "*fp32",
    "scores": "*fp32",
    "row_stride": "i64",
    "head_stride": "i64",
    "token_stride": "i32",
    "dim_stride": 1,
    "kv_heads": "i32",
    "live": "i32",
}
MOVE = {
    "source": "*i64",
    "target": "*i64",
    "heads": "i32",
    "slots": "i32",
    "into_slots": "i32",
    "moved": "i32",
}
HEADS = [  # query heads per KV head, head_dim, bands, interleaved
    (1, 64, 32, False),
    (3, 64, 32, False),
    (4, 80, 40, False),
    (4, 96, 48, False),
    (4, 128, 64, False),
    (8, 128, 64, False),
    (16, 128, 64, False),
    (16, 256, 128, False),
    (4, 96, 24, False),
    (4, 128, 32, False),
    (4, 128, 64, True),
    (4, 128, 32, True),
    (4, 128, 0, False),
]


@pytest.fixture(params=TARGETS, autouse=True)
def target(request, tmp_path, monkeypatch) -> GPUTarget:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = TARGETS[request.param]
    if {"cuda": "nvidia", "hip": "amd"}[target.backend] not in backends:
        pytest.skip(f"this Triton has no {target.backend}")
    return target


def compiled(kernel, types: dict[str, str | int], shape: dict[str, int], target: GPUTarget):
    """`kernel` as a launch on aligned contiguous tensors compiles it."""
    options = {name: shape[name] for name in OPTIONS if name in shape}
    known = {name: value for name, value in shape.items() if name not in OPTIONS}
    known |= {name: value for name, value in types.items() if value == 1}
    types = types | dict.fromkeys(known, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    aligned = [
        i for i, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or (name.endswith("_stride") and kind != "constexpr")
    ]  # fmt: skip
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=known, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def spills(binary, target: GPUTarget, folder: Path) -> int:
    """What the compiler's report says of local memory (bytes) and spilled registers."""
    if target.backend == "hip":
        report, pattern = (
            binary.asm["amdgcn"],
            r"(?:spill_count|private_segment_fixed_size):\s+(\d+)",
        )
    else:
        (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [tool, "-res-usage", folder / "kernel.cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        pattern = r"(?:STACK|LOCAL):(\d+)"
    found = re.findall(pattern, report)
    assert len(found) >= 2, report
    return sum(map(int, found))


def test_a_spill_shows_in_the_report(target, tmp_path):
    if target.backend == "hip":
        pytest.skip("its registers can't be withheld")
    shape = triton_score_tokens.launch_shape(*HEADS[4]) | {"maxnreg": 40}
    kernel = triton_score_tokens.score_tokens_kernel
    binary = compiled(kernel, SCORE | {"keys": "*bf16"}, shape, target)
    assert spills(binary, target, tmp_path) > 0


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [("bf16", heads) for heads in HEADS]
    + [(dtype, (8, 128, 64, interleaved)) for dtype in ("fp16", "fp32") for interleaved in (0, 1)],
    ids=str,
)
def test_score_tokens_spills_nothing(target, tmp_path, dtype, heads):
    shape = triton_score_tokens.launch_shape(*heads)
    kernel = triton_score_tokens.score_tokens_kernel
    binary = compiled(kernel, SCORE | {"keys": f"*{dtype}"}, shape, target)
    assert spills(binary, target, tmp_path) == 0


@pytest.mark.parametrize(
    ("dim", "size", "in_place"),
    [(64, 1, True), (80, 2, True), (128, 2, True), (256, 4, True), (128, 2, False)],
)
def test_move_slots_spills_nothing_and_meets_before_it_writes(
    target, tmp_path, dim, size, in_place
):
    shape = triton_move_slots.launch_shape(dim, size, in_place)
    tensors = dict.fromkeys(("blocks", "into"), f"*i{8 * size}")
    binary = compiled(triton_move_slots.move_slots_kernel, MOVE | tensors, shape, target)
    assert spills(binary, target, tmp_path) == 0
    order = re.findall(r"= tt\.load|(?:ttg|gpu)\.barrier|tt\.store", binary.asm["ttgir"])
    assert [name.split(".")[1] for name in order] == ["load", "load", "load", "barrier", "store"]

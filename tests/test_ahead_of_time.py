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

from kvpage.kernels import (
    triton_attention_mass,
    triton_move_slots,
    triton_paged_attention,
    triton_score_tokens,
    triton_write_kv,
)

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
    "candidates": "*u8",
    "scores": "*fp32",
    "parts": "*fp32",
    "row_stride": "i64",
    "head_stride": "i64",
    "token_stride": "i32",
    "dim_stride": 1,
    "kv_heads": "i32",
    "live": "i32",
}
MASS = {
    "weights": "*fp32",
    "totals": "*fp32",
    "mass": "*fp32",
    "row_stride": "i64",
    "head_stride": "i64",
    "token_stride": "i32",
    "dim_stride": 1,
    "kv_heads": "i32",
    "live": "i32",
    "places": "i32",
    "splits": "i32",
    "scale": "fp32",
}
MOVE = {
    "source": "*i64",
    "target": "*i64",
    "heads": "i32",
    "slots": "i32",
    "into_slots": "i32",
    "moved": "i32",
}
WRITE = {
    "tables": "*i32",
    "start": "*i32",
    "k_row_stride": "i32",
    "k_head_stride": "i32",
    "k_token_stride": "i32",
    "k_dim_stride": 1,
    "v_row_stride": "i32",
    "v_head_stride": "i32",
    "v_token_stride": "i32",
    "v_dim_stride": 1,
    "table_stride": "i32",
    "kv_heads": "i32",
    "slots": "i32",
    "new_tokens": "i32",
}
ATTEND = {
    "tables": "*i32",
    "stop": "*i32",
    "q_row_stride": "i32",
    "q_head_stride": "i32",
    "q_dim_stride": 1,
    "table_stride": "i32",
    "seen_row_stride": "i32",
    "seen_slot_stride": 1,
    "kv_heads": "i32",
    "slots": "i32",
    "splits": "i32",
    "window": "i32",
    "scale": "fp32",
    "cap": "fp32",
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


def compiled(kernel, types: dict[str, str | int | None], shape: dict[str, int], target: GPUTarget):
    """`kernel` as a launch on aligned contiguous tensors compiles it."""
    options = {name: shape[name] for name in OPTIONS if name in shape}
    known = {name: value for name, value in shape.items() if name not in OPTIONS}
    known |= {name: value for name, value in types.items() if value in (1, None)}
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
    """What the compiler's report says of local memory (bytes) and spilled registers: of vector
    registers, since scalar ones go to those, and to memory only where the report says so."""
    if target.backend == "hip":
        report = binary.asm["amdgcn"]
        pattern = r"(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
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


@pytest.mark.parametrize("kernel", ["total", "mass"])
@pytest.mark.parametrize(
    ("dtype", "groups", "dim", "places", "hidden"),
    [
        ("bf16", 3, 64, 64, True),
        ("bf16", 1, 64, 16, False),
        ("bf16", 4, 80, 64, True),
        ("bf16", 8, 96, 32, False),
        ("bf16", 8, 128, 128, True),
        ("fp16", 4, 128, 64, False),
        ("bf16", 4, 256, 64, True),
        ("fp32", 3, 64, 64, True),
        ("fp32", 4, 128, 64, True),
        ("fp32", 4, 256, 128, True),
    ],
    ids=str,
)
def test_attention_mass_spills_nothing_and_loads_ahead(
    target, tmp_path, dtype, groups, dim, places, hidden, kernel
):
    shape = triton_attention_mass.launch_shape(groups, dim, places, int(dtype[-2:]) // 8)
    types = MASS | {"visible": "*u8" if hidden else None}
    types |= dict.fromkeys(("keys", "queries"), f"*{dtype}")
    if kernel == "mass":
        shape["SPLITS"] = triton_attention_mass.MOST_SPLITS
    binary = compiled(getattr(triton_attention_mass, f"{kernel}_kernel"), types, shape, target)
    assert spills(binary, target, tmp_path) == 0
    assert binary.metadata.shared <= 64 * 1024  # what gfx942 has
    if target.backend == "cuda":
        assert binary.asm["ttgir"].count("async_copy_global_to_local") > 1


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


@pytest.mark.parametrize(
    ("dtype", "groups", "dim", "value_dim", "size", "options"),
    [
        ("bf16", 1, 64, 64, 16, False),
        ("bf16", 3, 64, 64, 128, True),
        ("bf16", 16, 64, 64, 16, True),
        ("bf16", 2, 80, 80, 16, False),
        ("bf16", 8, 80, 80, 32, True),
        ("bf16", 8, 96, 96, 32, False),
        ("bf16", 3, 96, 96, 16, True),
        ("bf16", 4, 128, 128, 16, False),
        ("bf16", 1, 128, 128, 16, True),
        ("bf16", 40, 128, 128, 64, True),
        ("fp16", 8, 128, 128, 16, False),
        ("bf16", 4, 192, 128, 16, True),
        ("bf16", 4, 256, 256, 16, False),
        ("bf16", 16, 256, 256, 16, True),
        ("bf16", 2, 512, 512, 16, True),
        ("fp32", 3, 64, 64, 16, False),
        ("fp32", 16, 80, 80, 16, True),
        ("fp32", 4, 128, 128, 16, True),
        ("fp32", 8, 256, 256, 16, False),
    ],
    ids=str,
)
def test_paged_attention_spills_nothing_and_fits_shared_memory(
    target, tmp_path, dtype, groups, dim, value_dim, size, options
):
    """One split, or several with all options. sm_89 has 99 KiB, gfx942 64 KiB; on the former and
    its like they hold two tiles, one on its way while the other is used."""
    element = int(dtype[-2:]) // 8
    shape = triton_paged_attention.launch_shape(
        groups, dim, value_dim, size, element, options, target.backend == "hip"
    )
    types = ATTEND | dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
    types |= {"sinks": None, "visible": None, "stats": None}
    if options:
        types |= {"sinks": f"*{dtype}", "visible": "*u8", "stats": "*fp32", "out": "*fp32"}
    binary = compiled(triton_paged_attention.paged_attention_kernel, types, shape, target)
    assert spills(binary, target, tmp_path) == 0
    tile = shape["TILE"] * (shape["PADDED"] + shape["VALUE_PADDED"]) * element
    assert binary.metadata.shared <= (64 if target.backend == "hip" else 99) * 1024
    if target.backend == "cuda":
        assert binary.metadata.shared >= 2 * tile
        assert binary.asm["ttgir"].count("async_copy_global_to_local") > 2


@pytest.mark.parametrize(
    ("dtype", "dim", "splits"),
    [("bf16", 80, 2), ("bf16", 128, 16), ("fp32", 256, 32), ("bf16", 256, 128)],
)
def test_combining_splits_spills_nothing(target, tmp_path, dtype, dim, splits):
    shape = triton_paged_attention.combine_shape(dim, splits)
    types = {"part": "*fp32", "stats": "*fp32", "out": f"*{dtype}"}
    binary = compiled(triton_paged_attention.combine_kernel, types, shape, target)
    assert spills(binary, target, tmp_path) == 0


@pytest.mark.parametrize(
    ("new", "dim", "value_dim", "size"),
    [(1, 80, 80, 2), (1, 256, 256, 4), (64, 192, 128, 2), (64, 256, 256, 4)],
)
def test_write_kv_spills_nothing(target, tmp_path, new, dim, value_dim, size):
    shape = triton_write_kv.launch_shape(new, dim, value_dim, 16)
    blocks = dict.fromkeys(("keys", "values", "new_keys", "new_values"), f"*i{8 * size}")
    binary = compiled(triton_write_kv.write_kv_kernel, WRITE | blocks, shape, target)
    assert spills(binary, target, tmp_path) == 0

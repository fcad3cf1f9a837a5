"""Runs the Triton kernels on CPU tensors, in a process of its own.

Triton decides when it is imported whether kernels are compiled or interpreted, and other tests of
the same process may have imported it, so that `TRITON_INTERPRET` is set in the other process only.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Interpreter:
    """`interpreter(op, *args)` is what the Triton version of `op` returns, else what became of its
    tensors.

    Tensors arrive as they lie: the whole of their memory, with shape, strides and offset.
    """

    def __enter__(self) -> Interpreter:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_interpret)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def __call__(self, op: str, *args: Any, **options: Any) -> Any:
        same = [next(j for j, other in enumerate(args) if other is arg) for arg in args]
        named = {name: _pack(value) for name, value in options.items()}
        return _unpack(self.call(_run, op, [_pack(arg) for arg in args], same, named))

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._pool.submit(function, *args, **options).result()


def triton_version(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"kvpage.kernels.triton_{op}"), op)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    _mend_bfloat16()


def _mend_bfloat16() -> None:
    """Triton's interpreter keeps bfloat16 as integers: `tl.dot` multiplies those, and a cast from
    float32 cuts bits off where the hardware rounds."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast_impl, create_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast(self, x, dtype):
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, x, dtype)
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), tl.bfloat16)

    def dot(self, a, b, *args):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast_impl(self, x, tl.float32) for x in (a, b))
        return create_dot(self, a, b, *args)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot


class _Packed(NamedTuple):
    memory: bytes
    dtype: torch.dtype
    place: tuple


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return _like(value, map(_pack, value))
    if not isinstance(value, Tensor):
        return value
    memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    place = value.shape, value.stride(), value.storage_offset()
    return _Packed(memory.numpy().tobytes(), value.dtype, place)


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, _Packed):
        return _like(value, map(_unpack, value))
    if not isinstance(value, _Packed):
        return value
    if not value.memory:
        return torch.empty(value.place[0], dtype=value.dtype)
    return torch.frombuffer(bytearray(value.memory), dtype=value.dtype).as_strided(*value.place)


def _like(value: tuple, parts: Iterable[Any]) -> tuple:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _run(op: str, sent: list, same: list[int], named: dict[str, Any]) -> Any:
    args: list = []
    for first, arg in zip(same, sent, strict=True):
        args.append(args[first] if first < len(args) else _unpack(arg))
    result = triton_version(op)(*args, **{name: _unpack(value) for name, value in named.items()})
    return [_pack(arg) for arg in args] if result is None else _pack(result)

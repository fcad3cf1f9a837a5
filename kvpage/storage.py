"""The tensors behind the blocks of one layer.

Head-major: `[kv_heads, num_blocks, block_size, head_dim]` for K and for V, so that the consecutive
blocks of a head are one contiguous run and a row that is consecutive is read without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kvpage import kernels
from kvpage.blocks import Layout
from kvpage.device import to_device
from kvpage.ledger import Step

P = ParamSpec("P")
R = TypeVar("R")


def without_autograd(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` on plain tensors whatever mode the model is called in.

    Storage outlives the forward that made it: it may be written under `no_grad` after a prompt
    under `inference_mode`, or the other way round, and never belongs to a graph.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_inference_mode_enabled() or torch.is_grad_enabled()):
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


class LayerStorage:
    """K and V of one layer, for every row. `D` and `Dv` may differ between K and V."""

    def __init__(self, block_size: int, keys: Tensor, values: Tensor) -> None:
        """Take heads, head_dim, dtype and device from `keys` and `values` `[B, Hkv, q, D]`."""
        self.block_size = block_size
        self.keys = keys.new_empty(keys.shape[1], 0, block_size, keys.shape[3])
        self.values = values.new_empty(values.shape[1], 0, block_size, values.shape[3])
        self.signature = (
            keys.shape[1::2], keys.dtype, keys.device, values.shape[1::2], values.dtype
        )  # fmt: skip
        """What every appended K and V has: `[heads, head_dim]`, dtype and device."""
        self._layout: Layout | None = None
        self._rows: tuple[_Rows, _Rows] | None = None
        self._tables: Tensor | None = None

    @property
    def bytes_reserved(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def relocate(self, num_blocks: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Replace the storage by one of `num_blocks` blocks, copying block `old` to `new`."""
        runs = _runs(pairs)
        keys = _relocated(self.keys, num_blocks, runs)
        self.replace(keys, _relocated(self.values, num_blocks, runs))

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Take `keys` and `values` `[Hkv, num_blocks, block_size, D]` as the storage."""
        self.keys, self.values = keys, values
        self._layout = None

    def ensure(self, num_blocks: int) -> None:
        """Have at least `num_blocks` blocks; those there keep their ids and content."""
        held = self.keys.shape[1]
        if held < num_blocks:
            self.relocate(num_blocks, [(block, block) for block in range(held)])

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy block `source` to block `target` within the storage (copy-on-write)."""
        for source, target in pairs:
            self.keys[:, target].copy_(self.keys[:, source])
            self.values[:, target].copy_(self.values[:, source])

    def append(
        self, step: Step, keys: Tensor, values: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Write `keys` and `values` `[B, Hkv, q, D]` behind the kept tokens; return the live ones
        from slot `first` on.

        Views of the storage where the rows lie at equal strides, else a gathered copy.
        """
        start, stop = step.kept, step.kept + step.num_new
        self._use(step.layout)
        if self._rows is not None:
            key_rows, value_rows = self._rows
            key_rows.view(start, stop).copy_(keys)
            value_rows.view(start, stop).copy_(values)
            return key_rows.view(first, stop), value_rows.view(first, stop)
        slots = self._slots(start, stop)
        _scatter(self.keys, slots, keys)
        _scatter(self.values, slots, values)
        return self.read(step.layout, stop, first)

    def write(
        self, layout: Layout, keys: Tensor, values: Tensor, tables: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write `keys` and `values` `[B, Hkv, q, D]` through block `tables` int32 `[B, width]`,
        from slots `start` int32 `[B]` on.

        Returns placeholders of one token each: NaN, so that who takes them for the live keys and
        values is found out.
        """
        self._use(layout)
        kernels.write_kv(self.keys, self.values, keys, values, tables, start)
        nan = keys.new_full((), torch.nan)
        return nan.expand(*keys.shape[:2], 1, keys.shape[3]), nan.expand(values.shape)

    def holds(self, layout: Layout) -> bool:
        """Whether `layout` is the one last used, with all it asks for in place."""
        return layout is self._layout

    def read(self, layout: Layout, live: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """The keys and values `[B, Hkv, live - first, D]` of live slots `[first, live)` under
        `layout`: views where rows allow."""
        self._use(layout)
        if self._rows is not None:
            return self._rows[0].view(first, live), self._rows[1].view(first, live)
        return self._gather(self.keys, first, live), self._gather(self.values, first, live)

    def _slots(self, start: int, stop: int) -> Tensor:
        """Physical slots `[B, stop - start]` int64 of live tokens `[start, stop)`."""
        assert self._tables is not None
        token = torch.arange(start, stop, device=self.keys.device)
        return self._tables[:, token // self.block_size] * self.block_size + token % self.block_size

    def tables_of(self, layout: Layout) -> Tensor:
        """The block tables of `layout` as an int64 tensor `[B, blocks]` on this layer's device."""
        return to_device(layout.tables, torch.int64, self.keys.device)

    def _use(self, layout: Layout) -> None:
        if layout is self._layout:
            return
        self._layout = layout
        self._rows, self._tables = None, None
        if layout.strides is None:
            self._tables = self.tables_of(layout)
        else:
            rows = len(layout.tables)
            self._rows = (
                _Rows(self.keys, layout.strides, rows),
                _Rows(self.values, layout.strides, rows),
            )

    def _gather(self, blocks: Tensor, first: int, live: int) -> Tensor:
        """Copy of live slots `[first, live)` `[B, Hkv, live - first, D]` through the tables."""
        assert self._tables is not None
        batch, count = self._tables.shape
        heads, _, size, dim = blocks.shape
        picked = blocks.index_select(1, self._tables.reshape(-1))
        return picked.view(heads, batch, count * size, dim).transpose(0, 1)[:, :, first:live]


class _Rows:
    """Equally spaced rows of consecutive blocks: their tokens are views, made with one call."""

    def __init__(self, blocks: Tensor, strides: tuple[int, int], rows: int) -> None:
        first, step = strides
        self.blocks, self.rows = blocks, rows
        self.heads, num_blocks, size, self.dim = blocks.shape
        self.strides = (step * size * self.dim, num_blocks * size * self.dim, self.dim, 1)
        self.offset = first * size * self.dim

    def view(self, start: int, stop: int) -> Tensor:
        """Tokens `[start, stop)` of every row, `[rows, Hkv, stop - start, D]`."""
        shape = (self.rows, self.heads, stop - start, self.dim)
        return self.blocks.as_strided(shape, self.strides, self.offset + start * self.dim)


def _scatter(blocks: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Write `tokens` `[B, Hkv, q, D]` to physical `slots` `[B, q]`."""
    heads, num_blocks, size, dim = blocks.shape
    flat = blocks.view(heads, num_blocks * size, dim)
    flat.index_copy_(1, slots.reshape(-1), tokens.transpose(0, 1).reshape(heads, -1, dim))


def _runs(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Merge `(old, new)` block pairs into runs `(old, new, length)`."""
    runs: list[tuple[int, int, int]] = []
    for old, new in pairs:
        if runs:
            start, target, length = runs[-1]
            if (old, new) == (start + length, target + length):
                runs[-1] = (start, target, length + 1)
                continue
        runs.append((old, new, 1))
    return runs


def _relocated(blocks: Tensor, num_blocks: int, runs: list[tuple[int, int, int]]) -> Tensor:
    heads, _, size, dim = blocks.shape
    new = blocks.new_empty(heads, num_blocks, size, dim)
    for old, target, length in runs:
        new[:, target : target + length].copy_(blocks[:, old : old + length])
    return new


def check_states(key_states: Tensor, value_states: Tensor) -> None:
    """Raise `ValueError` unless they are tensors `[B, Hkv, q, D]` that go together."""
    if isinstance(key_states, Tensor) and isinstance(value_states, Tensor):
        shape, other = key_states.shape, value_states.shape
        if len(shape) == 4 == len(other) and shape[:3] == other[:3] and 0 not in (*shape, other[3]):
            return
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        if not isinstance(states, Tensor) or states.ndim != 4:
            got = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise ValueError(f"{name}: a tensor [B, Hkv, q, D] expected, got {got}")
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ValueError(
            f"value_states: [B, Hkv, q] = {list(key_states.shape[:3])} expected as in key_states, "
            f"got {list(value_states.shape[:3])}"
        )
    raise ValueError(
        f"key_states: at least one row and one new token expected, got {list(key_states.shape)}"
    )

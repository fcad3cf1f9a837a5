"""What the kernel benchmark gives the ops: tokens in blocks, and what is right for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from kvpage import kernels
from kvpage.blocks import Layout
from kvpage.kernels import reference
from kvpage.storage import LayerStorage


@dataclass(frozen=True)
class Heads:
    """The attention of one layer, as every case of a run has it."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """One call to be timed, and the bytes it can't do without (`None`: not counted)."""

    op: str
    detail: str
    run: Callable[[], object]
    bytes_moved: int | None


@dataclass(frozen=True)
class PagedCase:
    """Rows of live tokens in blocks, and one query per row.

    query `[B, H, D]`; keys, values `[Hkv, num_blocks, block_size, D]`; tables int32 `[B, width]`;
    stop int32 `[B]`, also on the host as `stops`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    stop: Tensor
    stops: tuple[int, ...]
    scale: float

    def attend(self, implementation: Callable[..., Tensor] = kernels.paged_attention) -> Tensor:
        return implementation(
            self.query, self.keys, self.values, self.tables, self.stop, self.scale
        )

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[Hkv, stop, D]` of one row, copied out of the blocks."""
        table, stop = self.tables[row].long(), self.stops[row]
        keys, values = (
            blocks.index_select(1, table).flatten(1, 2)[:, :stop]
            for blocks in (self.keys, self.values)
        )
        return keys, values

    def dense_rows(self) -> tuple[Tensor, Tensor]:
        """The same `[B, Hkv, stop, D]` of all rows, which are equally long."""
        rows = [self.dense(row) for row in range(len(self.stops))]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    def exact(self) -> Tensor:
        """The attention `[B, H, D]` in float64, by other means than the reference."""
        results = []
        for row, query in enumerate(self.query):
            keys, values = (tensor.double() for tensor in self.dense(row))
            grouped = query.double().view(keys.shape[0], -1, keys.shape[2])  # [Hkv, G, D]
            weights = (grouped @ keys.transpose(1, 2) * self.scale).softmax(dim=-1)
            results.append((weights @ values).flatten(0, 1))
        return torch.stack(results)

    def keys_of(self, live: int) -> Tensor:
        """The live keys `[B, Hkv, live, D]` as a cache reads them: a view where rows allow."""
        storage = LayerStorage(self.keys.shape[2], self.keys[None, :, 0], self.values[None, :, 0])
        storage.replace(self.keys, self.values)
        return storage.read(Layout(tuple(map(tuple, self.tables.tolist()))), live)[0]


def paged_case(
    heads: Heads,
    stops: Sequence[int],
    scattered: bool,
    device: torch.device,
    poison: bool = False,
) -> PagedCase:
    """Random tokens in blocks: in any order, or row after row.

    poison: whatever no row sees is NaN, free slots and two free blocks.
    """
    batch, size = len(stops), heads.block_size
    width = -(-max(stops) // size)
    num_blocks = batch * width + 2
    shape = (heads.kv_heads, num_blocks, size, heads.dim)
    keys, values = (torch.randn(shape, device=device, dtype=heads.dtype) for _ in range(2))
    order = torch.randperm(num_blocks) if scattered else torch.arange(num_blocks)
    tables = order[: batch * width].view(batch, width)
    if poison:
        free = torch.ones(num_blocks, size, dtype=torch.bool)
        for row, stop in enumerate(stops):
            token = torch.arange(stop)
            free[tables[row, token // size], token % size] = False
        for blocks in (keys, values):
            blocks.masked_fill_(free[None, :, :, None].to(device), torch.nan)
    return PagedCase(
        torch.randn(batch, heads.heads, heads.dim, device=device, dtype=heads.dtype),
        keys,
        values,
        tables.to(device, torch.int32),
        torch.tensor(stops, dtype=torch.int32, device=device),
        tuple(stops),
        heads.dim**-0.5,
    )


def scorer_inputs(case: PagedCase) -> tuple[Tensor, Tensor]:
    """A direction `[B, H, D]` and norm weights `[B, H, D / 2]`, float32."""
    batch, heads, dim = case.query.shape
    device = case.query.device
    return torch.randn(batch, heads, dim, device=device), torch.rand(
        batch, heads, dim // 2, device=device
    )


def sampled_queries(case: PagedCase, heads: Heads, count: int = 64) -> Tensor:
    """Queries `[B, count, H, D]` that pay attention."""
    shape = (len(case.stops), count, heads.heads, heads.dim)
    return torch.randn(shape, device=case.query.device, dtype=case.query.dtype)


def compaction_of(case: PagedCase, live: int, kept: int) -> tuple[Tensor, Tensor]:
    """Physical slots `[B, Hkv, kept]` of random survivors and `[B, kept]` they move to, int64."""
    kv_heads, _, size, _ = case.keys.shape
    batch, device = len(case.stops), case.keys.device
    noise = torch.rand(batch, kv_heads, live, device=device)
    survivors = noise.topk(kept, dim=-1).indices.sort(dim=-1).values
    tables, slot = case.tables.long(), torch.arange(kept, device=device)
    blocks = tables.gather(1, (survivors // size).view(batch, -1)).view_as(survivors)
    return blocks * size + survivors % size, tables[:, slot // size] * size + slot % size


def bytes_of(op: str, *args: object) -> int | None:
    """`bytes_to_move` of a kernel; `None` where Triton is not installed."""
    try:
        module = import_module(f"kvpage.kernels.triton_{op}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        return None
    return int(module.bytes_to_move(*args))


# The gate.


def wrong_kernels(device: torch.device, heads: Heads) -> list[str]:
    """What of the ops is not as its reference and float64 have it, at small odd shapes."""
    wrong = []
    for scattered in (False, True):
        for stops in ((1,), (17, 300, 64), (1029, 3)):
            case = paged_case(heads, stops, scattered, device, poison=True)
            where = f"stops {stops}, {'scattered' if scattered else 'consecutive'} tables"
            if not _close(case.attend(), case.attend(reference.paged_attention), case.exact()):
                wrong.append(f"paged_attention: {where}")
            if not _writes_equal(case, heads):
                wrong.append(f"write_kv: {where}")
        live = 700
        case = paged_case(heads, (live,) * 3, scattered, device, poison=True)
        keys, (u, w) = case.keys_of(live), scorer_inputs(case)
        plain = reference.score_tokens(keys, u, w)[0]
        if not _close(
            kernels.score_tokens(keys, u, w)[0],
            plain,
            reference.score_tokens(keys, u.double(), w.double())[0],
        ):
            wrong.append(f"score_tokens: {live} tokens, scattered {scattered}")
        sampled = sampled_queries(case, heads)
        plain = reference.attention_mass(keys, sampled, case.scale)
        exact = reference.attention_mass(keys, sampled.double(), case.scale)
        if not _close(kernels.attention_mass(keys, sampled, case.scale), plain, exact):
            wrong.append(f"attention_mass: {live} tokens, scattered {scattered}")
        source, target = compaction_of(case, live, live - 100)
        moved, expected = case.keys.clone(), case.keys.clone()
        kernels.move_slots(moved, source, target, moved)
        reference.move_slots(expected, source, target, expected)
        if not _same_bits(moved, expected):
            wrong.append(f"move_slots: {live} tokens, scattered {scattered}")
    return wrong


def _writes_equal(case: PagedCase, heads: Heads) -> bool:
    new = torch.randn(2, len(case.stops), 1, heads.kv_heads, heads.dim, device=case.keys.device).to(
        heads.dtype
    )
    new_keys, new_values = new.transpose(2, 3)  # as a model lays them out
    results = []
    for implementation in (kernels.write_kv, reference.write_kv):
        keys, values = case.keys.clone(), case.values.clone()
        implementation(keys, values, new_keys, new_values, case.tables, case.stop - 1)
        results.append((keys, values))
    return all(_same_bits(one, other) for one, other in zip(*results, strict=True))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.view(integer), other.view(integer))


def _close(got: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Within a few times the error of the reference, or a few units in the last place of the
    largest: a kernel's exp2 and sqrt are approximations, which float32 shows."""
    if got.shape != exact.shape or not bool(got.isfinite().all()):
        return False
    error, allowed = (float((x.double() - exact).abs().max()) for x in (got, plain))
    few = 4 if got.dtype == torch.float32 else 2
    return error <= few * max(allowed, torch.finfo(got.dtype).eps * float(exact.abs().max()))


# What is timed.


def works(heads: Heads, batch: int, tokens: int, device: torch.device) -> list[Work]:
    """The ops at `tokens` live tokens per row; attention and writing with tables of both kinds."""
    found = []
    for scattered in (True, False):
        case = paged_case(heads, (tokens,) * batch, scattered, device)
        kind = "scattered" if scattered else "consecutive"
        args = (case.query, case.keys, case.values, case.tables, batch * tokens)
        moved = bytes_of("paged_attention", *args)
        found.append(Work("paged_attention", kind, case.attend, moved))
        found.append(_writing(case, heads, 1, kind))
    found.append(_writing(case, heads, min(tokens, 512), f"prompt of {min(tokens, 512)}"))
    keys, (u, w) = case.keys_of(tokens), scorer_inputs(case)
    moved = bytes_of("score_tokens", keys, u, w)
    found.append(Work("score_tokens", "", lambda: kernels.score_tokens(keys, u, w), moved))
    sampled = sampled_queries(case, heads)
    moved = bytes_of("attention_mass", keys, sampled)
    run = lambda: kernels.attention_mass(keys, sampled, case.scale)  # noqa: E731
    found.append(Work("attention_mass", f"{sampled.shape[1]} queries", run, moved))
    kept = tokens - tokens // 16
    source, target = compaction_of(case, tokens, kept)
    moved = bytes_of("move_slots", case.keys, source, target)
    move = lambda: kernels.move_slots(case.keys, source, target, case.keys)  # noqa: E731
    found.append(Work("move_slots", f"keys, {kept:,} stay", move, moved))
    return found


def _writing(case: PagedCase, heads: Heads, count: int, kind: str) -> Work:
    shape = (2, len(case.stops), heads.kv_heads, count, heads.dim)
    new_keys, new_values = torch.randn(shape, device=case.keys.device, dtype=heads.dtype)
    args = (case.keys, case.values, new_keys, new_values, case.tables, case.stop - count)
    moved = bytes_of("write_kv", new_keys, new_values, args[5])
    return Work("write_kv", kind, lambda: kernels.write_kv(*args), moved)

"""Fidelity: how far decoding under a budget is from decoding with the full cache.

Teacher-forced and in lock-step: the full cache and every contender get the same tokens, a prompt
and then `step` tokens a forward, so one pass of the full cache serves all contenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from transformers import DynamicCache

from kvpage.architectures import AttentionSite, describe
from kvpage.cache import PagedCompactCache
from kvpage.compat import NEWEST
from kvpage.evaluation.attention_mass import (
    AttentionMass,
    Oracle,
    eager_attention,
    mass_by_key,
    mass_kept,
)
from kvpage.evaluation.contenders import Contender
from kvpage.evaluation.intervals import Interval, bootstrap_interval

ORACLE = "oracle"
"""A scorer of fidelity alone: it knows the attention to come, see `Oracle`."""

ORACLE_TOKENS = 32
"""How finely it knows when."""


@dataclass(frozen=True)
class Fidelity:
    """A contender beside the full cache, over the positions since its first compaction.

    (Over all positions after the prompt, where it never compacted.) Lists are per layer of full
    attention; shares of mass are `None` where the model's attention gives no probabilities.
    """

    name: str
    budget: int | None
    scorer: str
    positions: int
    kl_blocks: list[tuple[float, int]]
    """Sum over positions of KL(full || contender) of the next token, in nats, and their number, of
    each block of `interval` positions."""
    nll: float
    """Mean negative log-likelihood of the text, in nats per token."""
    nll_full: float
    top1: float
    """Share of positions at which both find the same token likeliest."""
    attention_error: list[float]
    """`|o - o_full| / |o_full|` of the attention modules' outputs, norms over all positions. The
    inputs of later layers differ, too: errors add up over the layers."""
    mass: list[float] | None
    """Share of the full cache's attention that goes to tokens the contender still has."""
    mass_oracle: list[float] | None
    """The same of an oracle that sees the attention to come, see `mass_kept`."""
    compactions: int
    kv_bytes: int
    """The most that keys and values of live tokens took, see `Contender.costs`."""
    statistics_bytes: int
    """What the scorer keeps of queries and keys."""

    @property
    def kl(self) -> float:
        """Mean KL(full || contender) per position, in nats."""
        sums, counts = zip(*self.kl_blocks, strict=True)
        return sum(sums) / sum(counts)

    @property
    def kl_interval(self) -> Interval | None:
        """95 % interval of `kl`, by blocks."""
        return bootstrap_interval(self.kl_blocks)

    @property
    def delta_perplexity(self) -> float:
        """Perplexity of the contender less that of the full cache."""
        return math.exp(self.nll) - math.exp(self.nll_full)

    @property
    def mass_share(self) -> float | None:
        """`mass`, mean over the layers."""
        return None if self.mass is None else sum(self.mass) / len(self.mass)

    @property
    def mass_to_oracle(self) -> float | None:
        """`mass` over the oracle's, each the mean over the layers."""
        if self.mass is None or self.mass_oracle is None:
            return None
        return sum(self.mass) / sum(self.mass_oracle)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON; `Fidelity(**...)` reads them back."""
        return asdict(self)


def pooled(parts: Sequence[Fidelity]) -> Fidelity:
    """One contender on several texts as one: means are weighted by positions."""
    weights = [part.positions for part in parts]
    first = parts[0]

    def mean(field: str) -> Any:
        values = [getattr(part, field) for part in parts]
        if any(value is None for value in values):
            return None
        if isinstance(values[0], list):
            return [weighted(layer) for layer in zip(*values, strict=True)]
        return weighted(values)

    def weighted(values: Sequence[float]) -> float:
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

    means = ("nll", "nll_full", "top1", "attention_error", "mass", "mass_oracle")
    return Fidelity(
        name=first.name,
        budget=first.budget,
        scorer=first.scorer,
        positions=sum(weights),
        kl_blocks=[(s, n) for part in parts for s, n in part.kl_blocks],
        compactions=sum(part.compactions for part in parts),
        kv_bytes=max(part.kv_bytes for part in parts),
        statistics_bytes=max(part.statistics_bytes for part in parts),
        **{field: mean(field) for field in means},
    )


@torch.inference_mode()
def fidelity(
    model: nn.Module,
    ids: Tensor,
    contenders: Sequence[Contender],
    *,
    prompt: int = 128,
    step: int = 16,
    attention_mass: bool = True,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[Fidelity]:
    """Decode the text `ids` `[T]` int64 with the full cache and with every contender.

    prompt: tokens of the first forward, which no contender pins; step: tokens of every other one
    (exact attention, but compactions come up to `step - 1` tokens early; 1 is plain decoding);
    attention_mass: run in eager attention for the time being and measure what was kept, which needs
    a float per layer, KV head, token and compaction; progress: is called with the tokens done. A
    contender may have `scorer="oracle"`, which a pass of the full cache ahead of the others serves.

    Raises `ValueError` for a text that is not longer than the prompt, a step that is longer than an
    interval, or than 1 where layers have states; `TypeError` for `ids` of another kind.
    """
    sites = [site for site in describe(model).sites if site.window is None]
    foresees = [contender.scorer == ORACLE for contender in contenders]
    if any(foresees) and not attention_mass:
        raise ValueError("attention_mass: True expected with scorer='oracle', got False")
    named = [replace(c, scorer="random") if c.scorer == ORACLE else c for c in contenders]
    _check(model, ids, named, prompt, step)
    ids = ids.to(next(model.parameters()).device)
    with eager_attention(model) if attention_mass else nullcontext(), _watch(sites) as seen:
        if any(foresees):
            oracle = _oracle(model, ids, prompt, step, sites, seen)
            contenders = [
                replace(contender, scorer=oracle) if foresaw else contender
                for contender, foresaw in zip(contenders, foresees, strict=True)
            ]
        return _lock_step(
            model, ids, contenders, prompt, step, sites, seen, attention_mass, progress
        )


def _check(
    model: nn.Module, ids: Tensor, contenders: Sequence[Contender], prompt: int, step: int
) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.is_floating_point():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids: int64 [T] expected, got {got}")
    if not 1 <= prompt < len(ids):
        raise ValueError(f"prompt: 1 to {len(ids) - 1} of the text's tokens expected, got {prompt}")
    if not contenders:
        raise ValueError("contenders: at least one expected, got none")
    if model.training:
        raise ValueError("model: in evaluation mode expected, call model.eval()")
    for contender in contenders:
        if "pin_prompt" in contender.options or "trace" in contender.options:
            raise ValueError("contenders: options without pin_prompt and trace expected")
        interval = contender.cache(model).settings.interval
        if not 1 <= step <= interval:
            raise ValueError(f"step: 1 to the interval, {interval}, expected, got {step}")
    decoder = describe(model)
    if step > 1 and len(decoder.sites) < decoder.config.num_hidden_layers:
        raise ValueError(f"step: 1 expected for a model whose layers have states, got {step}")


Seen = list[tuple[Tensor, Tensor | None]]
"""Of each attention module in a forward: outputs `[q, hidden]`, and mass `[Hkv, K]` if any."""


@contextmanager
def _watch(sites: Sequence[AttentionSite]) -> Iterator[Seen]:
    """Within it, every forward adds what `sites` yielded to the list."""
    seen: Seen = []

    def hook_of(site: AttentionSite) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            states = output[0] if isinstance(output, tuple) else output
            mass = None if weights is None else mass_by_key(weights, site)
            seen.append((states[0].float().cpu(), mass))

        return hook

    handles = [site.attention.register_forward_hook(hook_of(site)) for site in sites]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _Running:
    """Sums of one contender, over the positions of the forwards so far; from its first compaction
    on they start anew."""

    def __init__(self, contender: Contender, cache: PagedCompactCache) -> None:
        self.contender, self.cache = contender, cache
        self.compactions = 0
        self.clear()

    def clear(self) -> None:
        self.kl: list[Tensor] = []
        self.nll: list[Tensor] = []
        self.nll_full: list[Tensor] = []
        self.same: list[Tensor] = []
        self.error: Tensor | float = 0.0
        self.norm: Tensor | float = 0.0

    @property
    def trace(self) -> list[Any]:
        assert self.cache.trace is not None
        return self.cache.trace

    def compacted(self) -> bool:
        """Whether the forward that was just run compacted first."""
        before, self.compactions = self.compactions, len(self.trace)
        if before == 0 and self.compactions:
            self.clear()
        return self.compactions > before

    def add(self, full: Tensor, own: Tensor, targets: Tensor) -> None:
        """Log-probabilities `[n, V]` of both, and the tokens `[n]` that came."""
        divergence = (full.exp() * (full - own)).nan_to_num(nan=0.0, posinf=torch.inf)
        self.kl.append(divergence.sum(dim=-1).cpu())
        self.nll.append(nll_loss(own, targets, reduction="none").cpu())
        self.nll_full.append(nll_loss(full, targets, reduction="none").cpu())
        self.same.append((full.argmax(-1) == own.argmax(-1)).double().cpu())

    def add_outputs(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.error = self.error + torch.stack([(a - b).double().square().sum() for a, b in pairs])
        self.norm = self.norm + torch.stack([a.double().square().sum() for a, _ in pairs])

    def result(self, model: nn.Module, mass: AttentionMass | None, layers: int) -> Fidelity:
        kl, interval = torch.cat(self.kl), self.cache.settings.interval
        shares = None
        if mass is not None and self.trace:
            shares = [
                mass_kept(mass.layer(i), mass.starts, self.trace, i, self.cache)
                for i in range(layers)
            ]
        every = [1.0] * layers if mass is not None else None
        error = torch.as_tensor(self.error / self.norm).sqrt()
        return Fidelity(
            name=self.contender.name,
            budget=self.contender.budget,
            scorer=self.contender.scorer_name,
            positions=len(kl),
            kl_blocks=[(block.sum().item(), len(block)) for block in kl.split(interval)],
            nll=torch.cat(self.nll).mean().item(),
            nll_full=torch.cat(self.nll_full).mean().item(),
            top1=torch.cat(self.same).mean().item(),
            attention_error=error.tolist(),
            mass=every if shares is None else [share.kept for share in shares],
            mass_oracle=every if shares is None else [share.oracle for share in shares],
            **self.contender.costs(model, self.cache, self.cache.report()),
        )


def _stretches(tokens: int, prompt: int, step: int) -> Iterator[tuple[int, int]]:
    """Where each forward starts and stops."""
    return pairwise([0, *range(prompt, tokens, step), tokens])


def _oracle(
    model: nn.Module,
    ids: Tensor,
    prompt: int,
    step: int,
    sites: Sequence[AttentionSite],
    seen: Seen,
) -> Oracle:
    """The attention to come, from a pass of the full cache ahead of the others."""
    full: Any = DynamicCache(config=describe(model).config)
    mass, last = AttentionMass(len(sites), len(ids)), -1
    for start, stop in _stretches(len(ids) - 1, prompt, step):
        seen.clear()
        model(ids[None, start:stop], **{NEWEST: full, "logits_to_keep": 1})
        known = [layer for _, layer in seen if layer is not None]
        if len(known) < len(sites):
            raise ValueError("scorer: 'oracle' needs a model whose attention gives probabilities")
        mass.add(start, known, start // ORACLE_TOKENS > last)
        last = start // ORACLE_TOKENS
    seen.clear()
    return Oracle(mass, sites)


def _lock_step(
    model: nn.Module,
    ids: Tensor,
    contenders: Sequence[Contender],
    prompt: int,
    step: int,
    sites: Sequence[AttentionSite],
    seen: Seen,
    attention_mass: bool,
    progress: Callable[[int], object],
) -> list[Fidelity]:
    full: Any = DynamicCache(config=describe(model).config)
    running = [_Running(c, c.cache(model, trace=True, pin_prompt=False)) for c in contenders]
    mass = AttentionMass(len(sites), len(ids)) if attention_mass else None
    for start, stop in _stretches(len(ids) - 1, prompt, step):
        new, targets = ids[None, start:stop], ids[start + 1 : stop + 1]
        expected = _log_probabilities(model, new, full)
        whole, compacted = seen.copy(), False
        for one in running:
            seen.clear()
            got = _log_probabilities(model, new, one.cache)
            compacted |= one.compacted()
            if start > 0:
                one.add(expected, got, targets)
                one.add_outputs([(a, b) for (a, _), (b, _) in zip(whole, seen, strict=True)])
        seen.clear()
        known = [layer for _, layer in whole if layer is not None]
        mass = mass if len(known) == len(sites) else None
        if mass is not None and start > 0:
            mass.add(start, known, compacted)
        progress(stop - start)
    return [one.result(model, mass, len(sites)) for one in running]


def _log_probabilities(model: nn.Module, ids: Tensor, cache: Any) -> Tensor:
    """`[n, V]` of the tokens after `ids` `[1, n]`, float64 (float32 where there is none)."""
    logits = model(ids, **{NEWEST: cache}).logits[0]
    dtype = torch.float32 if logits.device.type == "mps" else torch.float64
    return logits.to(dtype).log_softmax(dim=-1)

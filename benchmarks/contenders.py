"""The caches that decode.py compares: how each is made, filled and stepped."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from synthetic import Geometry, cache_argument, fill, kv_bytes, steady_chunks
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers import cache_utils as transformers_caches

import kvpage
from kvpage import PagedCompactCache

BUDGET = 1024
"""The budget that the project's targets are about."""
INTERVAL = 128
OVER_BLOCKS = (1024, 2048)
"""Budgets that are measured with attention over blocks too, beside none."""
FLOOR, DYNAMIC, STATIC = "weights only", "DynamicCache", "StaticCache"
QUANTIZED, PAGED = "QuantizedCache", "budget=None"
YOUNG = f"budget={BUDGET} at {BUDGET:,} seen"


@dataclass(frozen=True)
class Models:
    """One model three times, over the same weights: kvpage does not hook `plain`.

    transformers' own caches run on it, so that they do not pay for our hooks. `over_blocks` has
    attn_implementation "kvpage", the others SDPA.
    """

    plain: PreTrainedModel
    hooked: PreTrainedModel
    over_blocks: PreTrainedModel


def load(source: str, dtype: torch.dtype) -> Models:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    weights: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    hooked, over_blocks = (copy.deepcopy(model, dict(weights)) for _ in range(2))
    kvpage.register()
    over_blocks.set_attn_implementation("kvpage")
    return Models(model, hooked, over_blocks)


@dataclass
class Contender:
    """A cache that is being stepped, and the seconds of its steps by turn."""

    name: str
    seen: int
    budget: int | None = None
    """`None`: never evicts."""
    over_blocks: bool = False
    """Whether on a model with attn_implementation "kvpage"."""
    cache: Cache | None = None
    kv_bytes: int = 0
    seconds: dict[int, float] = field(default_factory=dict)

    def model(self, models: Models) -> PreTrainedModel:
        if self.over_blocks:
            return models.over_blocks
        return models.hooked if self.is_ours else models.plain

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("budget=")

    @property
    def is_steady(self) -> bool:
        """Whether it compacts every `INTERVAL` tokens by now: its lengths repeat from here on."""
        return self.budget is not None and self.seen >= self.budget

    @property
    def holds_all(self) -> bool:
        """Whether it has the keys and values of every token seen, as they were."""
        bounds = self.budget is not None and self.seen > self.budget + INTERVAL
        return self.name not in (FLOOR, QUANTIZED, YOUNG) and not bounds

    def tokens_held(self, extra: int) -> int:
        """An upper bound per row, with `extra` tokens to come."""
        if self.name == FLOOR:
            return 1
        if self.budget is not None:
            return min(self.seen + extra, self.budget + INTERVAL + 16)
        return self.seen * 5 // 4 + 16 if self.is_ours else self.seen + extra

    def refill(self, models: Models, geometry: Geometry, room: int) -> None:
        """Make the cache anew with `seen` tokens in it, and place for `room` more."""
        self.cache = None  # or two would be held at once
        if self.name == FLOOR:
            return
        self.cache = self.new_cache(models.plain, self.seen + room)
        bounded = self.budget is not None
        chunks = steady_chunks(self.seen, self.budget, INTERVAL) if bounded else [self.seen]
        fill(self.cache, geometry, chunks, seed=self.seen)
        self.kv_bytes = kv_bytes(self.cache)

    def new_cache(self, model: PreTrainedModel, capacity: int) -> Cache:
        """An empty cache that has yet to meet a model, so that it can be filled without one."""
        if self.name == STATIC:
            return StaticCache(config=model.config, max_cache_len=capacity)
        if self.name == QUANTIZED:
            backend = quantizer()
            assert backend is not None
            return transformers_caches.QuantizedCache(backend=backend, config=model.config)
        if self.is_ours:
            return PagedCompactCache(budget=self.budget, interval=INTERVAL)
        return DynamicCache(config=model.config)

    def step(self, models: Models, batch: int) -> tuple[float, Tensor]:
        """Seconds of a forward of one token in each row, and its logits `[B, 1, vocabulary]`."""
        model = self.model(models)
        cache = DynamicCache(config=model.config) if self.cache is None else self.cache
        arguments = {cache_argument(model): cache}
        token = torch.full((batch, 1), 5)
        started = perf_counter()
        output = model(token, **arguments, logits_to_keep=1)
        return perf_counter() - started, output.logits


def bounded_name(budget: int) -> str:
    return f"budget={budget}"


def over_blocks(name: str) -> str:
    """The name of the same cache on a model with attn_implementation "kvpage"."""
    return f"{name} kvpage"


def contenders(seen: int, budgets: Sequence[int], quantized: bool, young: bool) -> list[Contender]:
    """Those compared at `seen` tokens, DynamicCache ahead of whoever is compared with it."""
    names = [FLOOR, DYNAMIC, STATIC, *([QUANTIZED] if quantized else []), PAGED]
    bounded = [Contender(bounded_name(budget), seen, budget) for budget in budgets]
    elder = seen > BUDGET and BUDGET in budgets
    extra = [Contender(YOUNG, BUDGET, BUDGET)] if young and elder else []
    some = [budget for budget in OVER_BLOCKS if budget in budgets]
    blocks = [Contender(over_blocks(bounded_name(b)), seen, b, over_blocks=True) for b in some]
    blocks.insert(0, Contender(over_blocks(PAGED), seen, over_blocks=True))
    return [*(Contender(name, seen) for name in names), *bounded, *blocks, *extra]


def quantizer() -> str | None:
    """The backend of transformers' QuantizedCache to compare with: the first there is."""
    if find_spec("optimum") is not None and find_spec("optimum.quanto") is not None:
        return "quanto"
    if find_spec("hqq") is not None:
        return "hqq"
    return "fp8" if hasattr(transformers_caches, "Fp8QuantizedLayer") else None


# Whether they compute the same.


def agreement(
    models: Models, prompt: Tensor, budgets: Sequence[int], tokens: int
) -> dict[str, float]:
    """By cache, the share of `tokens` greedy tokens that are what they are with DynamicCache.

    prompt: `[B, n]` token ids without pads.
    """
    compared = contenders(0, budgets, quantizer() is not None, young=False)[1:]
    texts = {c.name: _greedy(models, c, prompt, tokens) for c in compared}
    return {name: _share_equal(text, texts[DYNAMIC]) for name, text in texts.items()}


def _greedy(models: Models, contender: Contender, prompt: Tensor, tokens: int) -> Tensor:
    cache = contender.new_cache(models.plain, prompt.shape[1] + tokens)
    model = contender.model(models)
    text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{cache_argument(model): cache},
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return text[:, prompt.shape[1] :]


def _share_equal(text: Tensor, reference: Tensor) -> float:
    """The share of tokens before the first that differs, over all rows."""
    return float((text == reference).cumprod(dim=1).float().mean())


def logit_errors(first_logits: Sequence[tuple[Contender, Tensor]]) -> Iterator[tuple[str, float]]:
    """How far the logits of each cache that holds all tokens are from DynamicCache's, relatively.

    The caches were filled with the same tokens and stepped with the same one.
    """
    (reference,) = (x.double() for c, x in first_logits if c.name == DYNAMIC)
    for contender, logits in first_logits:
        if contender.holds_all:
            yield contender.name, float((logits.double() - reference).norm() / reference.norm())

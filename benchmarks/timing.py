"""Times of caches that step in turn, one token each, so that a slow moment hits all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from contenders import BUDGET, INTERVAL, YOUNG, Contender, Models, bounded_name, logit_errors
from synthetic import Geometry
from torch import Tensor

WARMUP_STEPS = 2
LEAST_STEPS = 4


@dataclass(frozen=True)
class Cell:
    """One place in the grid."""

    dtype: str
    batch: int
    seen: int

    @property
    def is_main(self) -> bool:
        """Whether it is in the part of the grid that most targets are about."""
        return (self.dtype, self.batch) == ("float32", 1)

    def __str__(self) -> str:
        return f"{self.dtype}, batch {self.batch}, {self.seen:,} seen"


@dataclass(frozen=True)
class Plan:
    """How long to measure a cell."""

    steps: int
    """Timed steps of a cache in each round, at most."""
    rounds: int
    seconds: float
    """For the caches that grow, in all rounds of a cell; beyond it they make fewer steps."""
    whole_interval: bool
    """Whether the bounded caches, once they evict, step through a whole interval."""

    @property
    def room(self) -> int:
        """Tokens that come to a cache between two fills."""
        return WARMUP_STEPS + self.steps

    def turns(self, steady: bool) -> int:
        """Of a round; in each a bounded cache makes a step."""
        whole = steady and self.whole_interval
        return max(self.steps, -(-INTERVAL // self.rounds) if whole else 0)


@dataclass(frozen=True)
class Measurement:
    """Everything in one cell; dictionaries by contender."""

    dtype: str
    batch: int
    seen: int
    median_ms: dict[str, float]
    mean_ms: dict[str, float]
    steps: dict[str, int]
    kv_bytes: dict[str, int]
    ratios: dict[str, dict[str, float]]
    """The time of one over that of another: the median over the turns in which both step."""
    compaction_share: dict[str, float]
    """Of the time of a bounded cache, where it went through a whole interval."""
    logit_error: dict[str, float]

    @property
    def cell(self) -> Cell:
        return Cell(self.dtype, self.batch, self.seen)

    def ratio(self, name: str, other: str) -> float | None:
        """The time of `name` over that of `other`, if both were measured."""
        return self.ratios.get(name, {}).get(other)

    @property
    def growth(self) -> float | None:
        """The bounded cache's time over what it takes at `BUDGET` seen tokens."""
        return self.ratio(bounded_name(BUDGET), YOUNG)


def measure(
    models: Models,
    geometry: Geometry,
    cell: Cell,
    contenders: Sequence[Contender],
    plan: Plan,
) -> Measurement:
    """Fill and step all contenders in `plan.rounds` rounds.

    Every round starts again at `cell.seen` tokens, except that a bounded cache, once it evicts,
    goes on where it stands: its lengths repeat every `INTERVAL` steps whatever it has seen. It
    steps on every turn of a round, the others on as many, evenly spread, as there is time for.
    """
    first_logits: list[tuple[Contender, Tensor]] = []
    before: dict[str, float] = {}
    for index in range(plan.rounds):
        warm_seconds = 0.0
        for contender in contenders:
            if index > 0 and contender.is_steady:
                continue
            contender.refill(models, geometry, plan.room)
            for step in range(WARMUP_STEPS):
                seconds, logits = contender.step(models, cell.batch)
                if index == step == 0:
                    first_logits.append((contender, logits))
            warm_seconds += 0.0 if contender.is_steady else seconds
            if index == 0 and contender.is_steady:
                before[contender.name] = contender.cache.report().compaction_seconds
        step_in_turn(models, cell, contenders, plan, index, warm_seconds)
    return Measurement(
        dtype=cell.dtype,
        batch=cell.batch,
        seen=cell.seen,
        median_ms={c.name: 1e3 * median(c.seconds.values()) for c in contenders},
        mean_ms={c.name: 1e3 * mean(c.seconds.values()) for c in contenders},
        steps={c.name: len(c.seconds) for c in contenders},
        kv_bytes={c.name: c.kv_bytes for c in contenders if c.kv_bytes},
        ratios={a.name: {b.name: paired_ratio(a, b) for b in contenders} for a in contenders},
        compaction_share={
            c.name: (c.cache.report().compaction_seconds - before[c.name]) / sum(c.seconds.values())
            for c in contenders
            if c.is_steady and len(c.seconds) >= INTERVAL
        },
        logit_error=dict(logit_errors(first_logits)),
    )


def step_in_turn(
    models: Models,
    cell: Cell,
    contenders: Sequence[Contender],
    plan: Plan,
    index: int,
    warm_seconds: float,
) -> None:
    """Round `index`. warm_seconds: what a step of all the caches that grow took."""
    turns = plan.turns(any(c.is_steady for c in contenders))
    affordable = int(plan.seconds / plan.rounds / warm_seconds)
    steps = min(plan.steps, max(LEAST_STEPS, affordable))
    for turn in range(turns):
        everyone = turn * steps // turns != (turn + 1) * steps // turns
        for contender in contenders:
            if everyone or contender.is_steady:
                seconds, _ = contender.step(models, cell.batch)
                contender.seconds[index * turns + turn] = seconds


def paired_ratio(one: Contender, other: Contender) -> float:
    """What changes the speed of the machine for a while does not change this."""
    both = one.seconds.keys() & other.seconds.keys()
    return median(one.seconds[turn] / other.seconds[turn] for turn in both)


def gibibytes(geometry: Geometry, contenders: Sequence[Contender], plan: Plan) -> float:
    """GiB of keys and values that all contenders hold at once, at most."""
    tokens = sum(contender.tokens_held(plan.room) for contender in contenders)
    return tokens * geometry.bytes_per_token / 2**30

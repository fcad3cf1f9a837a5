"""Real models over 4,096 tokens: exact under budget, exactly what lives over it.

OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/real_traces.py
OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/real_traces.py --model gemma3 --step 1

Feeds a text (this repository's own) to SmolLM2-135M-Instruct and Gemma 3 270M in float32, a prompt
and then `--step` tokens a forward, and compares the logits after every forward: with room for all
tokens with `DynamicCache`'s, and under a budget that binds with the oracle's, which is one forward
over the whole text without a cache, under an explicit mask per layer and head of what each
compaction left. Prints one line of JSON per model.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache

from kvpage import PagedCompactCache

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests")]
from oracle import masked
from small_models import MODELS, fetch
from tiny import cache_name


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    for name in args.model:
        print(json.dumps(compare(name, args)), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the first forward")
    parser.add_argument("--step", type=int, default=8, help="tokens of every other forward")
    parser.add_argument("--budget", type=int, default=512)
    return parser.parse_args()


@torch.inference_mode()
def compare(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Largest differences between logits, and what the budget did."""
    folder = fetch(MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = text_ids(folder, args.tokens)
    stops = [*range(args.prompt, args.tokens, args.step), args.tokens]
    started = perf_counter()
    expected = feed(model, ids, stops, DynamicCache(config=model.config))
    room = feed(model, ids, stops, PagedCompactCache(model, budget=args.tokens))
    cache = PagedCompactCache(model, budget=args.budget, trace=True)
    got = feed(model, ids, stops, cache)
    cache.check()
    last = torch.tensor(stops) - 1
    with masked(model, cache.trace, torch.ones_like(ids, dtype=torch.bool)):
        oracle = model(ids, use_cache=False, logits_to_keep=last).logits[0]
    report = cache.report()
    return {
        "model": name,
        "tokens": args.tokens,
        "forwards": len(stops),
        "under budget, logits - DynamicCache": largest(room - expected),
        "under budget, same next tokens": bool((room.argmax(-1) == expected.argmax(-1)).all()),
        "budget": args.budget,
        "compactions": report.compactions,
        "live tokens": report.live_tokens,
        "over budget, logits - oracle": largest(got - oracle),
        "over budget, same next tokens as the oracle": share(got, oracle),
        "over budget, logits - DynamicCache": largest(got - expected),
        "over budget, same next tokens as DynamicCache": share(got, expected),
        "largest logit": largest(expected),
        "blocks freed": report.blocks_freed,
        "blocks freed without compaction": report.blocks_freed_without_compaction,
        "sliding blocks freed": report.sliding_blocks_freed,
        "seconds": round(perf_counter() - started),
    }


def text_ids(folder: Path, tokens: int) -> Tensor:
    """Token ids `[1, tokens]` of the README and the library's source."""
    files = [ROOT / "README.md", *sorted((ROOT / "kvpage").glob("*.py"))]
    text = "\n".join(file.read_text() for file in files)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise SystemExit(f"--tokens: at most {ids.shape[1]} expected, got {tokens}")
    return ids[:, :tokens]


def feed(model, ids: Tensor, stops: list[int], cache: Cache) -> Tensor:
    """Logits `[forwards, V]` after each forward."""
    logits = []
    for start, stop in pairwise([0, *stops]):
        inputs = {cache_name(model): cache, "logits_to_keep": 1}
        inputs["attention_mask"] = torch.ones(1, stop, dtype=torch.long)
        logits.append(model(ids[:, start:stop], **inputs).logits[0, -1])
    return torch.stack(logits)


def largest(values: Tensor) -> float:
    return float(f"{values.abs().max().item():.3g}")


def share(got: Tensor, expected: Tensor) -> float:
    return round((got.argmax(-1) == expected.argmax(-1)).double().mean().item(), 4)


if __name__ == "__main__":
    main()

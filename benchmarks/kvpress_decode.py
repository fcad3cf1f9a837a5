"""Times of kvpress's DecodingPress beside DynamicCache; runs in an environment with kvpress.

python benchmarks/kvpress_decode.py --model PATH --seen 1024 8192

kvpress needs an older transformers than kvpage's newest, so decode.py runs this file with the
interpreter given to it. Only ratios to DynamicCache, measured here too, compare with ours. Imports
nothing of kvpage. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

WARMUP_STEPS = 2
GREEDY_TOKENS = 32
DYNAMIC_STEPS = 16


@dataclass(frozen=True)
class KvpressCell:
    """Medians at one number of seen tokens, in float32 at batch 1."""

    seen: int
    press_ms: float
    press_mean_ms: float
    """With the step that compacts, as often as it occurs."""
    dynamic_ms: float
    ratio: float
    """The press over DynamicCache: the median over the turns in which both step."""
    press_tokens_held: int


@dataclass(frozen=True)
class KvpressRun:
    kvpress: str
    transformers: str
    press: str
    budget: int
    interval: int
    same_text: bool
    """Whether greedy text under the budget is that of DynamicCache."""
    cells: list[KvpressCell]


def run_kvpress(
    python: Path, source: str, seen: Sequence[int], budget: int, interval: int, quick: bool
) -> KvpressRun:
    """Run this file with `python`; `RuntimeError` says what is missing there."""
    try:
        found = subprocess.run([python, "-c", "import kvpress"], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"--kvpress-python {python}: {error.strerror}") from None
    if found.returncode != 0:
        last = (found.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(
            f"--kvpress-python {python}: can't import kvpress ({last}); make it an environment of "
            "its own: python3 -m venv DIR && DIR/bin/pip install torch kvpress"
        )
    options = ["--model", source, "--seen", *map(str, seen)]
    options += ["--budget", str(budget), "--interval", str(interval)] + ["--quick"] * quick
    command = [str(python), str(Path(__file__).resolve()), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    values = json.loads(done.stdout.splitlines()[-1])
    return KvpressRun(**values | {"cells": [KvpressCell(**cell) for cell in values["cells"]]})


def main() -> None:
    args = parse()
    import kvpress
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    weights: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    pressed = copy.deepcopy(model, weights)  # so that DynamicCache does not pay for its hooks
    with torch.inference_mode():
        press = new_press(args)
        with press(pressed):
            same_text = greedy(model) == greedy(pressed)
        cells = [measure(model, pressed, seen, args) for seen in args.seen]
    run = KvpressRun(
        kvpress=getattr(kvpress, "__version__", None) or version("kvpress"),
        transformers=transformers.__version__,
        press="DecodingPress(KnormPress())",
        budget=args.budget,
        interval=args.interval,
        same_text=same_text,
        cells=cells,
    )
    print(json.dumps(asdict(run)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--seen", type=int, nargs="+", required=True)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="no whole interval")
    return parser.parse_args()


def version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def new_press(args: argparse.Namespace) -> Any:
    """As in kvpress's README; key norms need no buffer of hidden states."""
    from kvpress import DecodingPress, KnormPress

    return DecodingPress(
        base_press=KnormPress(),
        compression_interval=args.interval,
        target_size=args.budget,
        hidden_states_buffer_size=0,
    )


def measure(model: Any, pressed: Any, seen: int, args: argparse.Namespace) -> KvpressCell:
    """Step both in turn: the press through an interval from just after a compaction."""
    turns = 16 if args.quick else args.interval
    dynamic = filled_cache(model, seen)
    held = filled_cache(model, min(seen, args.budget))
    seconds, dynamic_seconds = [], {}
    press, most = new_press(args), 0
    with press(pressed) if seen >= args.budget else contextlib.nullcontext():
        for turn in range(turns):
            seconds.append(step(pressed, held, seen + turn))
            most = max(most, held.get_seq_length())
            if turn % max(1, turns // DYNAMIC_STEPS) == 0:
                dynamic_seconds[turn] = step(model, dynamic, seen + len(dynamic_seconds))
    paired = list(dynamic_seconds)[WARMUP_STEPS:]
    timed = seconds[WARMUP_STEPS:]
    return KvpressCell(
        seen=seen,
        press_ms=1e3 * median(timed),
        press_mean_ms=1e3 * mean(timed),
        dynamic_ms=1e3 * median(dynamic_seconds[turn] for turn in paired),
        ratio=median(seconds[turn] / dynamic_seconds[turn] for turn in paired),
        press_tokens_held=most,
    )


def filled_cache(model: Any, tokens: int) -> Any:
    """A DynamicCache of random keys and values."""
    import torch
    from transformers import DynamicCache

    config, cache = model.config, DynamicCache(config=model.config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = torch.randn(1, config.num_key_value_heads, tokens, dim)
    values = torch.randn_like(keys)
    for index in range(config.num_hidden_layers):
        cache.update(keys.roll(index, dims=2), values.roll(index, dims=2), index)
    return cache


def step(model: Any, cache: Any, position: int) -> float:
    """Seconds of a forward of the token at `position` of the text."""
    import torch

    arguments = {
        "input_ids": torch.full((1, 1), 5),
        "position_ids": torch.tensor([[position]]),
        "past_key_values": cache,
    }
    started = perf_counter()
    model(**arguments, logits_to_keep=1)
    return perf_counter() - started


def greedy(model: Any) -> list[int]:
    """Greedy token ids after a fixed prompt, with a cache of its own."""
    import torch
    from transformers import DynamicCache

    ids, cache, text = torch.arange(1000, 1020)[None], DynamicCache(config=model.config), []
    for _ in range(GREEDY_TOKENS):
        output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        ids = output.logits[:, -1:].argmax(-1)
        text.append(int(ids))
    return text


if __name__ == "__main__":
    sys.exit(main())

"""What the answers lose under a budget: kvpress's presses while decoding and kvpage's scorers.

kvpress pins an older transformers, so it gets an environment of its own, once:

    python3 -m venv DIR
    DIR/bin/pip install torch==2.13.0 kvpress==0.5.5 'transformers<5.3'

then, in kvpage's environment (`pip install -e '.[bench]'`),

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/peers/compare.py \\
        --kvpress-python DIR/bin/python --text FILE --calibration OTHER_FILE --out peers

feeds one text to the same model in float32, a prompt in one forward and the rest teacher-forced,
with every contender at every budget and the same interval, and compares the predictions with those
of the full cache in the same environment: the KL divergence of each next-token distribution, the
change of the text's negative log-likelihood (NLL), how often the likeliest token is the same. Means
are over the positions after the first compaction, intervals from a bootstrap of blocks of 64
positions; "over the least" is the difference of KL from the best contender at the same positions.
"keys attended" tells that the budgets are equal: mean, least and most over those positions.

kvpress compresses after each interval of forwards and kvpage before the first token that would be
too many; with a prompt and budgets in whole intervals both hold budget + 1 to budget + interval
keys at the same positions. So long forwards of `--step` tokens between compactions change nothing,
but for the presses that run_kvpress.py names, which get one token a forward, as when generating.
`--step 1` does so for all, to see it; then the seconds compare too.

Each contender leaves a JSON file in `--out`, so an interrupted run goes on where it was. Last come
peers.json, peers.md and the table. Without `--kvpress-python` it has kvpage's side only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent), str(ROOT / "examples")]
import torch
from fidelity_metrics import bootstrap_interval
from peer_runs import digest
from reporting import at_least, markdown, write
from rich.console import Console
from rich.table import Table
from small_models import fetch_smollm2
from transformers import AutoTokenizer

HEAD = (
    "budget",
    "contender",
    "KL to the full cache (95 %)",
    "over the least (95 %)",
    "NLL change (95 %)",
    "same top-1",
    "keys attended",
    "tokens a forward",
    "seconds",
)
SAME_NLL = 1e-3
"""Nats between the full caches of the two environments, which are one model on one text."""


def main() -> None:
    args = parse()
    source = args.model or str(fetch_smollm2())
    args.out.mkdir(parents=True, exist_ok=True)
    options = ["--model", source, "--out", str(args.out.resolve())]
    options += ["--ids", str(write_ids(args, source, args.text, args.tokens, "text"))]
    options += ["--budgets", *map(str, args.budgets), "--interval", str(args.interval)]
    options += ["--prompt", str(args.prompt), "--step", str(args.step or args.interval)]
    run(Path(sys.executable), "run_kvpage.py", options, args.scorers)
    if args.kvpress_python:
        if args.calibration:
            file = write_ids(args, source, args.calibration, None, "calibration")
            options += ["--calibration-ids", str(file)]
        run(args.kvpress_python, "run_kvpress.py", options, args.presses)
    show(args, results(args, Path(source).name))


def parse() -> argparse.Namespace:
    paragraphs = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=paragraphs[0],
        epilog=paragraphs[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kvpress-python", type=Path, help="interpreter of an environment with kvpress")
    add("--model", help="path or hub id; default: SmolLM2-135M-Instruct, fetched")
    add("--text", type=Path, help="default: this repository's README and sources")
    add("--calibration", type=Path, help="another text: statistics for ExpectedAttentionStatsPress")
    add("--tokens", type=at_least(2), default=4096, help="of the text; default 4096")
    add("--prompt", type=at_least(1), default=128, help="tokens of the first forward; default 128")
    add("--budgets", type=at_least(1), nargs="+", default=[512, 1024, 256], help="in this order")
    add("--interval", type=at_least(1), default=128, help="default 128")
    add("--step", type=at_least(1), help="tokens of a forward after the prompt; default: interval")
    add("--scorers", nargs="+", help="of kvpage; default: all")
    add("--presses", nargs="+", help="of kvpress, such as 'SnapKVPress, mended'; default: all")
    add("--out", type=Path, default=Path("peers"), help="folder; default peers")
    args = parser.parse_args()
    for name, tokens in (("tokens", args.tokens), *(("budgets", b) for b in args.budgets)):
        if tokens < args.prompt or (tokens - args.prompt) % args.interval:
            parser.error(
                f"--{name}: the prompt ({args.prompt}) and whole intervals ({args.interval}) "
                f"expected, so that both sides compact at the same positions, got {tokens}"
            )
        if name == "budgets" and tokens + args.interval >= args.tokens - 1:
            parser.error(f"--budgets: text after the first compaction expected, got {tokens}")
    if args.interval % (args.step or 1):
        parser.error(f"--step: a divisor of the interval expected, got {args.step}")
    return args


def write_ids(
    args: argparse.Namespace, source: str, file: Path | None, tokens: int | None, name: str
) -> Path:
    """Token ids of the text in `file` as JSON, so that no other tokenizer has a say."""
    files = [file] if file else [ROOT / "README.md", *sorted((ROOT / "kvpage").glob("*.py"))]
    text = "\n".join(path.read_text() for path in files)
    ids = AutoTokenizer.from_pretrained(source)(text).input_ids
    if len(ids) < (tokens or 0):
        raise SystemExit(f"--tokens: at most {len(ids)} expected, got {tokens}")
    target = args.out.resolve() / f"{name}-ids.json"
    target.write_text(json.dumps(ids[:tokens]))
    return target


def run(python: Path, script: str, options: list[str], contenders: list[str] | None) -> None:
    """Run one side; what it has to say goes to the terminal. Exits where it fails."""
    some = ["--contenders", *contenders] if contenders else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [str(python), str(HERE / script), *options, *some]
    try:
        done = subprocess.run(command, env=environment, check=False)
    except OSError as error:
        raise SystemExit(f"{python}: {error.strerror}") from None
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed, see above")


def results(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Every result in the folder that was found on this text with these settings."""
    common = {
        "interval": args.interval,
        "prompt": args.prompt,
        "model": model,
        "text_sha256": digest(args.out / "text-ids.json"),
    }
    found = [json.loads(file.read_text()) for file in sorted(args.out.glob("kvp*-*-*.json"))]
    found = [
        one
        for one in found
        if common.items() <= one["settings"].items() and one["settings"]["budget"] in args.budgets
    ]
    full = [one["full_nll"] for one in found]
    if max(full) - min(full) > SAME_NLL:
        raise SystemExit(f"one full cache expected on both sides, got NLL {sorted(set(full))}")
    return found


def show(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """One table, by budget and KL, on the terminal and in the folder."""
    ranked = sorted(
        (one for one in found if "kl" in one),
        key=lambda one: (one["settings"]["budget"], one["kl"]),
    )
    best: dict[int, dict[str, Any]] = {}
    for one in ranked:
        best.setdefault(one["settings"]["budget"], one)
    rows = [cells(one, best[one["settings"]["budget"]]) for one in ranked]
    reasons = "\n".join(failures(found))
    title = f"Fidelity under a budget: {args.tokens:,} tokens, interval {args.interval}"
    table = Table(*HEAD, title=title)
    for row, after in zip(rows, [*rows[1:], [""]], strict=True):
        table.add_row(*row, end_section=row[0] != after[0])
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    text = markdown([HEAD, *rows])
    if reasons:
        console.print(f"Can't run while decoding:\n{reasons}", markup=False, highlight=False)
        text += f"\n\nCan't run while decoding:\n\n{reasons}"
    short = [{k: v for k, v in one.items() if k != "kl_by_position"} for one in found]
    write(args.out, "peers", {"tokens": args.tokens, "results": short}, title, text)


def failures(found: list[dict[str, Any]]) -> list[str]:
    """What could not run, and why, with the budgets at which."""
    budgets: dict[tuple[str, str], list[int]] = {}
    for one in found:
        if "error" in one:
            budgets.setdefault((named(one), one["error"]), []).append(one["settings"]["budget"])
    return [
        f"- {name}, budgets {', '.join(map(str, sorted(at)))}: {error}"
        for (name, error), at in sorted(budgets.items())
    ]


def cells(one: dict[str, Any], best: dict[str, Any]) -> list[str]:
    settings = one["settings"]
    over = torch.tensor(one["kl_by_position"]) - torch.tensor(best["kl_by_position"])
    keys = f"{one['attended_mean']:.0f} ({one['attended_least']:.0f} to {one['attended_most']:.0f})"
    return [
        str(settings["budget"]),
        named(one),
        with_interval(one["kl"], one["kl_interval"]),
        "-" if one is best else with_interval(over.mean().item(), bootstrap_interval(over)),
        with_interval(one["nll_change"], one["nll_change_interval"]),
        f"{one['top1']:.3f}",
        keys,
        str(settings["step"]),
        f"{one['seconds']:.0f}",
    ]


def named(one: dict[str, Any]) -> str:
    return f"{one['settings']['side'].split()[0]} {one['settings']['contender']}"


def with_interval(value: float, ends: list[float]) -> str:
    return f"{value:.4f} ({ends[0]:.4f} to {ends[1]:.4f})"


if __name__ == "__main__":
    main()

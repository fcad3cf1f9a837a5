"""What the two runners share beside the metrics: settings, arguments, one JSON file a contender.

Imports only torch and, when there is something to measure, transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from fidelity_metrics import Forward, check_exact, full_log_probs, summary, trace
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """What a result depends on: one that was found under other settings is measured anew."""

    side: str
    """The library and its version."""
    contender: str
    budget: int
    interval: int
    prompt: int
    tokens: int
    step: int
    """Tokens of every forward after the prompt."""
    model: str
    text_sha256: str

    def file(self, out: Path) -> Path:
        name = self.contender.lower().replace(", ", "-")
        return out / f"{self.side.split()[0]}-{name}-{self.budget}.json"

    def finished(self, out: Path) -> bool:
        file = self.file(out)
        return file.exists() and json.loads(file.read_text())["settings"] == asdict(self)

    def write(self, out: Path, result: dict[str, Any]) -> None:
        """In one rename, so that an interruption leaves no half of a file."""
        out.mkdir(parents=True, exist_ok=True)
        scratch = self.file(out).with_suffix(".part")
        scratch.write_text(json.dumps({"settings": asdict(self), **result}) + "\n")
        scratch.rename(self.file(out))


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--model", required=True)
    add("--ids", type=Path, required=True, help="JSON list of the text's token ids")
    add("--calibration-ids", type=Path, help="those of another text, for statistics made ahead")
    add("--out", type=Path, required=True)
    add("--budgets", type=int, nargs="+", required=True)
    add("--interval", type=int, required=True)
    add("--prompt", type=int, required=True)
    add("--step", type=int, required=True)
    add("--contenders", nargs="+", help="default: all")
    return parser.parse_args()


def read_ids(file: Path) -> Tensor:
    """Token ids `[1, T]`."""
    return torch.tensor([json.loads(file.read_text())])


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def plan(
    args: argparse.Namespace, side: str, contenders: Sequence[str], steps: dict[str, int]
) -> list[Settings]:
    """What is not finished yet, budget by budget; `steps` where they are not `args.step`."""
    tokens, text_sha256 = read_ids(args.ids).shape[1], digest(args.ids)
    everything = [
        Settings(
            side,
            name,
            budget,
            args.interval,
            args.prompt,
            tokens,
            steps.get(name, args.step),
            Path(args.model).name,
            text_sha256,
        )
        for budget in args.budgets
        for name in contenders
    ]
    return [settings for settings in everything if not settings.finished(args.out)]


def load_model(source: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def measure_all(
    planned: Sequence[Settings],
    args: argparse.Namespace,
    full: Forward,
    traced: Callable[[Settings, Callable[[Forward], dict[str, Any]]], dict[str, Any]],
) -> None:
    """Measure what is planned. `traced(settings, measure)` makes a forward and measures it."""
    ids = read_ids(args.ids)
    reference = full_log_probs(full, ids)
    following = ids[0, 1:, None]
    full_nll = -reference[:-1].gather(1, following).double().mean().item()
    for number, settings in enumerate(planned, 1):

        def measure(forward: Forward, settings: Settings = settings) -> dict[str, Any]:
            found = trace(forward, ids, reference, settings.prompt, settings.step)
            check_exact(found, settings.budget)
            return summary(found, settings.budget, settings.interval)

        result = traced(settings, measure)
        settings.write(args.out, {"full_nll": full_nll, **result})
        told = f"KL {result['kl']:.4f}" if "kl" in result else result["error"]
        print(
            f"[{number}/{len(planned)}] {settings.side}, {settings.contender}, budget "
            f"{settings.budget}: {told}",
            file=sys.stderr,
            flush=True,
        )

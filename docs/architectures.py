"""Runs a tiny random model of every family and prints the table of docs/architectures.md.

    python docs/architectures.py            prints the table
    python docs/architectures.py --write    puts it into docs/architectures.md

Each row was run: decoding under budget must give `DynamicCache`'s tokens, and over budget the
logits of the oracle (no cache, explicit mask per layer and head) at every step; so were the
refusals.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch
import transformers
from families import FAMILIES, REFUSED, family, refused_model
from oracle import check_against_oracle
from tiny import cache_name, generate, prompt
from transformers import DynamicCache

from kvpage import PagedCompactCache
from kvpage.architectures import describe
from kvpage.compat import INSTEAD

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
HEADER = (
    "| family: `model_type` | layers | RoPE of the layers ranked | under budget | over budget |\n"
    "| --- | --- | --- | --- | --- |"
)


def table() -> str:
    """The rows of every family and of every refusal, as Markdown."""
    rows = [row for name in FAMILIES if (row := row_of(name)) is not None]
    refusals = [f"- {line}" for name in REFUSED if (line := refusal_of(name)) is not None]
    return "\n".join([HEADER, *rows, "", f"Refused by name ({INSTEAD}):", "", *refusals])


def row_of(name: str) -> str | None:
    if not hasattr(transformers, FAMILIES[name][0]):
        return None
    model = family(name)
    decoder = describe(model)
    under, over = under_budget(model), over_budget(model, dynamic="dynamic" in name)
    label = f"{name}: `{decoder.config.model_type}`"
    cells = [label, layers_of(model), rope_of(decoder), under, over]
    return f"| {' | '.join(cells)} |"


def layers_of(model) -> str:
    report = PagedCompactCache(model).report()
    kinds = {
        "full": report.full_layers,
        "sliding": report.sliding_layers,
        "state": report.state_layers,
    }
    return ", ".join(kind for kind, count in kinds.items() if count)


def rope_of(decoder) -> str:
    found = []
    for site in decoder.sites:
        if site.rope is None:
            continue
        rope = site.rope()
        if rope.bands == 0:
            text = "none"
        else:
            text = "pairs" if rope.interleaved else "halves"
            dim = head_dim(site.attention)
            text += f", {2 * rope.bands} of {dim} dimensions" if 2 * rope.bands < dim else ""
        if text not in found:
            found.append(text)
    return "; ".join(found) or "nothing to rank"


def head_dim(attention) -> int:
    return getattr(attention, "head_dim", None) or attention.head_size


def under_budget(model) -> str:
    expected, _ = generate(model, prompt(30), DynamicCache(config=model.config), 60)
    got, _ = generate(model, prompt(30), PagedCompactCache(), 60)
    assert torch.equal(got, expected), model.config.model_type
    return "`DynamicCache`'s tokens"


@torch.no_grad()
def over_budget(model, dynamic: bool) -> str:
    cache = PagedCompactCache(model, budget=64, interval=24, recent=16, trace=True)
    ids = prompt(150)
    logits = []
    for start, stop in pairwise([0, *range(30, 151)]):
        new, told = ids[:, start:stop], {cache_name(model): cache}
        told["attention_mask"] = torch.ones(1, stop, dtype=torch.long)
        told["position_ids"] = torch.arange(start, stop)[None]
        logits.append(model(new, **told).logits)
    if not cache.report().full_layers:
        return "no layer to evict from"
    assert cache.report().budget_bound
    check_against_oracle(
        model, cache.trace, ids, torch.cat(logits, dim=1), atol=2e-4, stepwise=30 if dynamic else 0
    )
    return "the oracle's logits"


def refusal_of(name: str) -> str | None:
    model = refused_model(name)
    if model is None:
        return None
    try:
        PagedCompactCache(model)
    except ValueError as error:
        return f"{name}: {str(error).removeprefix('model: ').removesuffix(f'; {INSTEAD}')}"
    raise AssertionError(f"{name} was not refused")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    text = f"{BEGIN}\n\n{table()}\n\n{END}"
    page = ROOT / "docs" / "architectures.md"
    if "--write" in sys.argv[1:]:
        before, rest = page.read_text().split(BEGIN)
        page.write_text(before + text + rest.split(END)[1])
    else:
        print(text)


if __name__ == "__main__":
    main()

r"""Decode a long answer in a bounded KV cache and print what that cost, beside a full cache.

python examples/long_trace.py
python examples/long_trace.py --new-tokens 4096 --budget 512 --compare
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from loading import CACHE, MODEL_HELP, ask, load, parser_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from kvpage import Footprint, PagedCompactCache, Report

QUESTION = "Describe a journey through the solar system, planet by planet, in great detail."
EXCERPT = 300
"""Characters of the text to print from either end."""


@dataclass(frozen=True)
class Decoding:
    """What one generation gave: its tokens, the seconds from the first to the last, and memory."""

    token_ids: list[int]
    seconds: float
    device_bytes_peak: int | None

    @property
    def tokens_per_second(self) -> float:
        return (len(self.token_ids) - 1) / self.seconds


class ProgressStreamer(BaseStreamer):
    """Advances a bar by one per decoded token and times them; the prompt, put first, is prefill."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar
        self.times: list[float] = []
        self.is_prompt = True

    def put(self, value: Tensor) -> None:
        if not self.is_prompt:
            self.times.append(perf_counter())
            self.bar.update()
        self.is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.new_tokens < 2:
            raise ValueError(f"--new-tokens: at least 2 expected, got {args.new_tokens}")
        options = {"interval": args.interval, "recent": args.recent, "scorer": args.scorer}
        cache = PagedCompactCache(budget=args.budget, **options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model, tokenizer = load(args.model, args.dtype, args.device)
    ids = ask(tokenizer, args.prompt).to(model.device)
    paged = decode(model, ids, cache, args)
    report, console = cache.report(), Console(highlight=False)
    text = tokenizer.decode(paged.token_ids, skip_special_tokens=True)
    if len(text) > 2 * EXCERPT:
        text = f"{text[:EXCERPT]}\n\n[…]\n\n{text[-EXCERPT:]}"
    console.print(text, markup=False, end="\n\n")
    full_bytes = Footprint.of(model).dynamic_bytes(report.seen_tokens)
    console.print(memory_table(report, full_bytes))
    if args.compare:
        del cache
        gc.collect()  # or its storage would count in the peak of the other run
        full_cache = DynamicCache(config=model.config)
        full = decode(model, ids, full_cache, args)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in full_cache.layers)
        console.print(comparison_table(paged, report.bytes_peak, full, held))
    return 0


def decode(model: PreTrainedModel, ids: Tensor, cache: Cache, args: argparse.Namespace) -> Decoding:
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    set_seed(args.seed)
    with tqdm(total=args.new_tokens, desc=type(cache).__name__, unit="token") as bar:
        streamer = ProgressStreamer(bar)
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=args.do_sample,
            repetition_penalty=args.repetition_penalty,
            streamer=streamer,
            **{CACHE: cache},
        )
    return Decoding(
        token_ids=sequences[0, ids.shape[1] :].tolist(),
        seconds=streamer.times[-1] - streamer.times[0],
        device_bytes_peak=torch.cuda.max_memory_allocated(model.device) if on_cuda else None,
    )


def memory_table(report: Report, full_bytes: int) -> Table:
    """`report` of a PagedCompactCache beside what a DynamicCache holds after as many tokens."""
    seen, full = report.seen_tokens, mebibytes(full_bytes)
    full_blocks = f"{-(-seen // report.block_size):,}"
    unbound = None if report.budget_bound else "the budget never bound: nothing was evicted"
    table = Table(title=f"KV cache after {seen:,} tokens", caption=unbound)
    add_columns(table, "PagedCompactCache", "DynamicCache")
    table.add_row("live tokens", f"{report.live_tokens:,}", f"{seen:,}")
    table.add_row(f"blocks of {report.block_size} in use", f"{report.blocks_used:,}", full_blocks)
    table.add_row("blocks at the peak", f"{report.blocks_peak:,}", full_blocks)
    table.add_row("blocks given back", f"{report.blocks_freed:,}", "0")
    table.add_row("… had it only evicted", f"{report.blocks_freed_without_compaction:,}", "")
    table.add_row("KV memory in use", mebibytes(report.bytes_in_use), full)
    table.add_row("KV memory at the peak", mebibytes(report.bytes_peak), full)
    table.add_row("queries kept to rank by", mebibytes(report.bytes_statistics), "0")
    cost = f"{report.compactions:,} in {report.compaction_seconds:.2f} s"
    table.add_row("compactions", cost, "")
    return table


def comparison_table(
    paged: Decoding, paged_kv_bytes: int, full: Decoding, full_kv_bytes: int
) -> Table:
    table = Table(title=f"{len(paged.token_ids):,} tokens decoded, prefill not timed")
    add_columns(table, "PagedCompactCache", "DynamicCache")
    table.add_row("time", f"{paged.seconds:.1f} s", f"{full.seconds:.1f} s")
    rates = (f"{run.tokens_per_second:.1f}" for run in (paged, full))
    table.add_row("tokens per second", *rates)
    table.add_row("KV memory at the peak", mebibytes(paged_kv_bytes), mebibytes(full_kv_bytes))
    if paged.device_bytes_peak is not None and full.device_bytes_peak is not None:
        peaks = (paged.device_bytes_peak, full.device_bytes_peak)
        table.add_row("CUDA memory at the peak", *map(mebibytes, peaks))
    pairs = zip(paged.token_ids, full.token_ids, strict=True)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), len(full.token_ids))
    table.add_row("same tokens from the start", f"{first:,}", "")
    return table


def add_columns(table: Table, *names: str) -> None:
    table.add_column()
    for name in names:
        table.add_column(name, justify="right")


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    numbers = {"type": int, "metavar": "N"}
    add("--model", help=MODEL_HELP)
    add("--prompt", default=QUESTION, help="what to ask; default: a journey through the planets")
    add(
        "--new-tokens",
        default=1024,
        **numbers,
        help="tokens to decode, exactly: the end of the answer is barred until then; default: 1024",
    )
    add("--budget", default=256, **numbers, help="tokens a compaction leaves; default: 256")
    add("--interval", default=128, **numbers, help="tokens between compactions; default: 128")
    add("--recent", default=128, **numbers, help="latest tokens, always kept; default: 128")
    add("--scorer", default="sampled", help="how tokens are ranked; default: sampled")
    add("--compare", action="store_true", help="decode with DynamicCache as well, and time both")
    add("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    add("--seed", default=0, **numbers, help="of sampling; default: 0")
    add(
        "--repetition-penalty",
        type=float,
        default=1.05,
        metavar="X",
        help="above 1, a small model loops less; default: 1.05",
    )
    add("--dtype", default="auto", help="float32, bfloat16, ...; default: as the model was saved")
    add("--device", help="cpu, cuda, ...; default: the accelerator, if any")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

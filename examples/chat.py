r"""Chat for as long as you like in one bounded KV cache: each turn feeds only what is new.

python examples/chat.py                            # in the terminal; an empty line ends it
python examples/chat.py --budget 192 --say "Who was Marie Curie?" "What did she find?"

After every turn a line says what the cache holds: tokens seen, tokens live, blocks used.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from loading import CACHE, MODEL_HELP, load, parser_of
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvpage import PagedCompactCache, Report

MARK = "THE-ANSWER-BEFORE"


class Chat:
    """A conversation: `ids`, all its tokens so far, and one cache that has seen all but the last.

    Raises `ValueError` for a tokenizer without a chat template.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: PagedCompactCache
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("model: one with a chat template expected, got one without")
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.ids: list[int] = []

    def say(self, question: str, max_new_tokens: int = 256, **options: object) -> str:
        """The model's answer; `options` are those of `generate`."""
        self.ids += self.new_ids(question)
        seen, device = self.cache.get_seq_length(), self.model.device
        out = self.model.generate(
            input_ids=torch.tensor([self.ids[seen:]]).to(device),
            attention_mask=torch.ones(1, len(self.ids), dtype=torch.long).to(device),
            max_new_tokens=max_new_tokens,
            pad_token_id=self.tokenizer.eos_token_id,
            **{CACHE: self.cache},
            **options,
        )
        answer = out[0, len(self.ids) - seen :].tolist()
        self.ids += answer
        return self.tokenizer.decode(answer, skip_special_tokens=True)

    def new_ids(self, question: str) -> list[int]:
        """What the chat template puts behind the text so far to ask `question`.

        Answers stay as the model wrote them: tokens in the cache can't be tokenized again.
        """
        turns = [{"role": "user", "content": question}]
        if self.ids:  # what stands behind an answer does not depend on which answer it is
            before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            turns = before + turns
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text.rpartition(MARK)[2], add_special_tokens=False).input_ids
        ended = self.ids[-1:] == ids[:1]  # the model wrote the end of its turn itself
        return ids[1:] if ended else ids


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(highlight=False)
    try:
        cache = PagedCompactCache(budget=args.budget, interval=args.interval, recent=args.recent)
        model, tokenizer = load(args.model, device=args.device)
        chat = Chat(model, tokenizer, cache)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = {"do_sample": args.temperature > 0}
    if args.temperature > 0:
        sampling["temperature"] = args.temperature
    torch.manual_seed(args.seed)
    try:
        for question in questions(args.say, console):
            chat.say(question, args.max_new_tokens, streamer=streamer, **sampling)
            console.print(f"[dim]{meter(cache.report())}[/dim]\n", soft_wrap=True)
    except (EOFError, KeyboardInterrupt):
        console.print()
    return 0


def questions(said: Sequence[str] | None, console: Console) -> Iterator[str]:
    """Those given, else what is typed, up to an empty line."""
    if said is None:
        console.print("[dim]An empty line, Ctrl-D or Ctrl-C ends the chat.[/dim]")
        while question := console.input("[bold]> [/bold]").strip():
            yield question
    for question in said or ():
        console.print("[bold]> [/bold]", end="")
        console.print(question, markup=False)
        yield question


def meter(report: Report) -> str:
    """What the cache holds, in one line; the bar is of its blocks, full where one is used."""
    reserved, cells = report.blocks_used + report.blocks_free, 20
    filled = round(cells * report.blocks_used / reserved)
    return (
        f"{report.seen_tokens:,} tokens seen, {report.live_tokens:,} live "
        f"{'█' * filled}{'░' * (cells - filled)} {report.blocks_used} of {reserved} blocks used, "
        f"{report.blocks_freed} freed so far, {report.bytes_in_use / 2**20:.1f} MiB"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    numbers = {"type": int, "metavar": "N"}
    add("--model", help=MODEL_HELP)
    add("--say", nargs="+", metavar="TEXT", help="what to ask, turn by turn, instead of typing")
    add("--budget", default=512, **numbers, help="tokens a compaction leaves; default: 512")
    add("--interval", default=128, **numbers, help="tokens between compactions; default: 128")
    add("--recent", default=128, **numbers, help="latest tokens, never evicted; default: 128")
    add("--max-new-tokens", default=256, **numbers, help="longest answer; default: 256")
    add("--temperature", type=float, default=0.0, help="of sampling; default: 0, greedy")
    add("--seed", default=0, **numbers, help="of sampling; default: 0")
    add("--device", help="cpu, cuda, ...; default: the accelerator, if any")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

r"""Sample n answers that share the blocks of one prompt, and pick the best of them.

python examples/best_of_n.py
python examples/best_of_n.py --model my-model --n 16 --prompt "..." --pick vote

The prompt goes through the model once. Its cache is then repeated to n rows by reference to the
same blocks; a row gets blocks of its own for what it writes. (`cache.fork(n)` shares in the same
way where the answers shall not be decoded together.)
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from loading import CACHE, MODEL_HELP, ask, load, parser_of
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage import PagedCompactCache, Report

SOLVED = """\
Question: A box holds 6 eggs. How many eggs are in 4 boxes?
Answer: Each box holds 6 eggs and there are 4 boxes, so 6 * 4 = 24. The answer is 24.

Question: Anna had 15 apples and gave 4 to Ben. How many apples does she have left?
Answer: Anna had 15 apples and gave away 4, so 15 - 4 = 11. The answer is 11.

Question: A train has 8 carriages with 10 seats each. How many seats are there?
Answer: There are 8 carriages with 10 seats each, so 8 * 10 = 80. The answer is 80.

Question: Tom read 12 pages on Monday and 9 pages on Tuesday. How many pages did he read?
Answer: Tom read 12 pages and then 9 pages, so 12 + 9 = 21. The answer is 21.

Question: A garden has 5 rows with 6 trees each. How many trees are there?
Answer:"""


@dataclass(frozen=True)
class Sample:
    """An answer, the mean log-probability of its tokens, and the number it comes down to."""

    text: str
    logprob: float
    number: str | None


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    n: int,
    cache: PagedCompactCache,
    ends: Sequence[int],
    **options: object,
) -> list[Sample]:
    """`n` answers to the prompt `ids` `[1, T]`, drawn in one batch, each up to a token in `ends`.

    options: of `generate`.
    """
    model(ids[:, :-1], **{CACHE: cache})
    cache.batch_repeat_interleave(n)
    rows = ids.repeat(n, 1)
    out = model.generate(
        rows,  # all but the last token are in the cache already
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        return_dict_in_generate=True,
        output_logits=True,
        **{CACHE: cache},
        **options,
    )
    answers = out.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1)  # [n, T, V]
    chosen = logprobs.gather(2, answers[:, :, None])[:, :, 0]
    ended = torch.isin(answers, torch.tensor(ends, device=answers.device)).long()
    real = ended.cumsum(1) - ended == 0  # the first end still is; what follows it is padding
    means = (chosen * real).sum(1) / real.sum(1)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [
        Sample(text.strip(), mean, last_number(text))
        for text, mean in zip(texts, means.tolist(), strict=True)
    ]


def last_number(text: str) -> str | None:
    r"""What is in the last `\boxed{}`, else the last number."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text) or re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


def best(samples: Sequence[Sample], pick: str) -> Sample:
    """The likeliest of all, or, with `pick="vote"`, of those with the commonest number."""
    if pick == "vote":
        votes = Counter(one.number for one in samples if one.number is not None)
        number = votes.most_common(1)[0][0] if votes else None
        samples = [one for one in samples if one.number == number]
    return max(samples, key=lambda one: one.logprob)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.n < 1:
            raise ValueError(f"--n: at least 1 expected, got {args.n}")
        cache = PagedCompactCache(budget=args.budget)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model, tokenizer = load(args.model, device=args.device)
    ends = [tokenizer.eos_token_id]
    if args.prompt is None:
        ids = tokenizer(SOLVED, return_tensors="pt").input_ids
        ends += tokenizer("\n").input_ids[-1:]  # the answers there are of one line
    else:
        ids = ask(tokenizer, args.prompt)
    torch.manual_seed(args.seed)
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_k": 0}
    samples = sample(model, tokenizer, ids.to(model.device), args.n, cache, ends, **options)
    show(Console(highlight=False), samples, best(samples, args.pick), cache.report(), ids.shape[1])
    return 0


def show(
    console: Console, samples: Sequence[Sample], picked: Sample, report: Report, prompt: int
) -> None:
    table = Table("", "log-prob", "number", "answer", box=None)
    for one in samples:
        mark, text = "→" if one is picked else "", one.text.replace("\n", " ")
        table.add_row(mark, f"{one.logprob:.2f}", one.number or "-", escape(text))
    console.print(table)
    n, blocks = report.batch_size, -(-report.live_tokens // report.block_size)
    console.print(
        f"\n{n} answers to one prompt of {prompt} tokens hold {report.blocks_used} blocks of "
        f"{report.block_size} tokens; in caches of their own, {n} times {blocks} = {n * blocks}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    numbers = {"type": int, "metavar": "N"}
    add("--model", help=MODEL_HELP)
    add("--prompt", help="what to ask; default: a sum, behind four that are solved")
    add("--n", default=8, **numbers, help="answers to sample; default: 8")
    add(
        "--pick",
        choices=("vote", "logprob"),
        default="vote",
        help="the likeliest of those with the commonest number, or the likeliest; default: vote",
    )
    add("--max-new-tokens", default=48, **numbers, help="longest answer; default: 48")
    add("--temperature", type=float, default=0.8, help="of sampling; default: 0.8")
    add("--seed", default=0, **numbers, help="of sampling; default: 0")
    add("--budget", default=2048, **numbers, help="tokens a compaction leaves; default: 2048")
    add("--device", help="cpu, cuda, ...; default: the accelerator, if any")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

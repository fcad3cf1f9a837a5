r"""An OpenAI-compatible server with a bounded KV cache: `transformers serve`, as it comes.

python examples/serve_openai.py --budget 512    # needs pip install 'transformers[serving]'
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Who was Marie Curie?"}]}'

The server loads a folder that links to the model's files, with the `custom_generate/` beside this
file added, which transformers puts in the place of the model's `generate`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from loading import MODEL_HELP
from small_models import fetch_smollm2

from kvpage import PagedCompactCache

CUSTOM_GENERATE = Path(__file__).resolve().parent / "custom_generate" / "custom_generate"


def main(argv: Sequence[str] | None = None) -> int:
    args, others = parse(argv)
    options = {"budget": args.budget, "interval": args.interval}
    try:
        if find_spec("fastapi") is None or find_spec("uvicorn") is None:
            raise ValueError("no server is installed: pip install 'transformers[serving]'")
        PagedCompactCache(**options).reset()  # refuses here what each request would stumble over
        source = Path(args.model or fetch_smollm2())
        source = source if source.is_dir() else Path(snapshot_download(args.model))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_hub_id = args.model is not None and not Path(args.model).is_dir()
    name = args.model if is_hub_id else source.resolve().name
    with tempfile.TemporaryDirectory(prefix="kvpage-") as folder:
        compose(source, Path(folder) / name, options)
        print(f"serving {name!r}, with a budget of {args.budget} tokens a request", flush=True)
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", name]
        try:  # in that folder, so that the server calls the model by its name
            return subprocess.call([*command, "--trust-remote-code", *others], cwd=folder)
        except KeyboardInterrupt:
            return 130


def compose(source: Path, served: Path, options: dict[str, object]) -> None:
    """Make the folder `served`: the model in `source`, to generate with `options` of the cache."""
    served.mkdir(parents=True)
    for file in source.resolve().iterdir():
        if file.name not in ("custom_generate", "generation_config.json"):
            (served / file.name).symlink_to(file)
    (served / "custom_generate").symlink_to(CUSTOM_GENERATE)
    config = source / "generation_config.json"
    settings = json.loads(config.read_text()) if config.exists() else {}
    settings.pop("_from_model_config", None)  # transformers would drop keys it does not know
    (served / config.name).write_text(json.dumps(settings | {"kvpage": options}))


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All else goes to `transformers serve`: --port, --device, --dtype, ...",
    )
    parser.add_argument("--model", help=MODEL_HELP)
    numbers = {"type": int, "metavar": "N"}
    parser.add_argument("--budget", default=2048, **numbers, help="tokens kept; default: 2048")
    parser.add_argument(
        "--interval", default=128, **numbers, help="tokens between compactions; default: 128"
    )
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())

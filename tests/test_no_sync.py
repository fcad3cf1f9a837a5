"""A steady decode step never waits for the device: nothing on it is read by the host.

On a CPU reading is free, so where the code asks whether it is, it is told otherwise here.
"""

from __future__ import annotations

import pytest
import torch
from families import family
from tiny import cache_name, prompt
from torch.utils._python_dispatch import TorchDispatchMode

from kvpage import PagedCompactCache, attention, decoding

READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
}


METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Of a tensor: what makes numbers of it, which on a CPU dispatches nothing."""


class Reads(TorchDispatchMode):
    """Notes every op whose result the host has to wait for, and every method of `METHODS`."""

    def __init__(self):
        super().__init__()
        self.seen, self.watches = [], False

    def __enter__(self):
        self.watches = True
        return super().__enter__()

    def __exit__(self, *error):
        self.watches = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in READS or (name == "aten::index" and has_bool_index(args[1])):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def has_bool_index(indices):
    return any(index is not None and index.dtype == torch.bool for index in indices)


@pytest.fixture
def reads(monkeypatch):
    for module in (attention, decoding):
        monkeypatch.setattr(module, "reads_are_free", lambda device: False)
    mode = Reads()
    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, noting(mode, name, getattr(torch.Tensor, name)))
    return mode


def noting(mode, name, method):
    def call(*args, **kwargs):
        if mode.watches:
            mode.seen.append(name)
        return method(*args, **kwargs)

    return call


def decode(model, cache, steps, mask, batch):
    """Run `steps` one-token forwards, with the 2-D mask if there is one."""
    token = prompt(1, batch=batch, seed=1)
    for _ in range(steps):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        with torch.inference_mode():
            model(token, attention_mask=mask, **{cache_name(model): cache})
    return mask


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "qwen3-next"])
def test_a_steady_step_reads_nothing_of_the_device(reads, name, static, padded):
    """Through three compactions, between two of the checks that come when the text has doubled."""
    model, batch = family(name), 2
    model.set_attn_implementation("kvpage")
    cache = PagedCompactCache(model, budget=64, interval=24, recent=16, static=static)
    ids, mask = prompt(130, batch=batch), torch.ones(batch, 130, dtype=torch.long)
    mask[0, :40] = 0
    mask = mask if padded else None
    with torch.inference_mode():
        model(ids, attention_mask=mask, **{cache_name(model): cache})
    mask = decode(model, cache, 30, mask, batch)
    compactions = cache.report().compactions
    with reads:
        decode(model, cache, 80, mask, batch)
    assert cache.report().compactions >= compactions + 3
    assert reads.seen == []


def test_a_read_would_show(reads):
    with reads, torch.inference_mode():
        bool(torch.ones(1).all())
        torch.ones(3)[torch.tensor([True, False, True])]
        torch.ones(3).tolist()
        torch.ones(1).cpu()
    assert {"__bool__", "aten::index", "tolist", "cpu"} <= set(reads.seen)
    assert {"aten::_local_scalar_dense", "aten::is_nonzero"} & set(reads.seen)

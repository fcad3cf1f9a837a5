"""What a CUDA graph does, on a CPU: the operations of one forward, recorded and replayed.

A replay runs no Python of the model, the hooks or the cache: it repeats the same operations on the
same memory. So whatever the forward took from the host is as it was when it was recorded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpage import core, decoding, places


class Recorder(TorchDispatchMode):
    """Records every operation within it; `replay` repeats them, results in the same memory."""

    def __init__(self, captures: bool = True) -> None:
        """captures: whether this stands for a graph, of which only some forwards can be made."""
        super().__init__()
        self.captures = captures
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __enter__(self) -> Recorder:
        """What asks whether a graph is being captured is told so."""
        self._patches = pytest.MonkeyPatch()
        for module in (core, decoding, places):
            self._patches.setattr(module, "capturing", lambda: self.captures)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            outs = out if isinstance(out, tuple | list) else [out]
            results = again if isinstance(again, tuple | list) else [again]
            returns = func._schema.returns
            if len(returns) != len(outs):  # a list of views or tensors
                returns = [returns[0]] * len(outs)
            for old, new, declared in zip(outs, results, returns, strict=True):
                if isinstance(old, Tensor) and declared.alias_info is None:
                    old.copy_(new)

    def shapes(self) -> list[tuple[str, list[torch.Size]]]:
        """Each operation with the shapes of what it takes and gives."""
        return [
            (
                str(func),
                [leaf.shape for leaf in tree_leaves((args, kwargs, out)) if is_tensor(leaf)],
            )
            for func, args, kwargs, out in self.calls
        ]


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)

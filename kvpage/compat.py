"""What differs between transformers versions. Supported: >=5.4,<6."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import DynamicCache, cache_utils

compiler_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True
)
"""What `torch.compile` does with the frames of this thread; gives `None` where it is not used.
(A torch that can't tell: taken as used.)"""

F = TypeVar("F", bound=Callable[..., Any])

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])

NEWEST = "cache" if RELEASE >= (5, 24) else "past_key_values"
CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")
"""Names of the cache argument: `past_key_values` up to 5.23, `cache` since 5.24; `layer_past` in
the attention of GPT-NeoX."""


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a module's call, under either name; else `None`."""
    cache = arguments.get(NEWEST)
    if cache is None:
        for name in CACHE_ARGUMENTS:
            cache = arguments.get(name)
            if cache is not None:
                break
    return cache


def tokens_to_remove(argument: int, seen: int) -> int:
    """How many tokens `crop(argument)` removes from `seen`.

    Since 5.15 the argument is the number to remove, negative; before, it was the length to keep,
    or the number to remove when negative. Raises `ValueError` for a positive one since 5.15.
    """
    if argument < 0:
        return -argument
    if RELEASE < (5, 15):
        return max(0, seen - argument)
    if argument > 0:
        raise ValueError(f"tokens_to_remove: zero or a negative number expected, got {argument}")
    return 0


def not_compiled(function: F) -> F:
    """Keep `torch.compile` out of `function`: a compiled model breaks its graph there.

    Where nothing is compiled, as usual, `torch.compiler.disable` costs more than most of what it
    would wrap here, so it is asked first whether anything is.
    """
    disabled = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or compiler_callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


OLDEST, TESTED = (5, 4), (5, 24)
"""The oldest and the newest transformers release the tests have run with."""


@functools.cache
def warn_if_untested() -> None:
    """Warn, once, when transformers is newer than what kvpage was tested with."""
    if RELEASE > TESTED:
        warnings.warn(
            f"kvpage was tested with transformers up to {'.'.join(map(str, TESTED))}, this is "
            f"{transformers.__version__}",
            stacklevel=3,
        )


StateLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""transformers' layer for states of fixed size (linear attention, Mamba, convolutions); `None` in
releases before it."""


INSTEAD = "not supported, use transformers' DynamicCache for it"


@dataclass(frozen=True)
class Window:
    """An attention layer; `tokens` `None`: it looks at all tokens."""

    tokens: int | None


def native_layers(config: Any) -> list[Any]:
    """How transformers itself caches each layer of `config`: a `Window`, or a new `StateLayer`.

    Raises `ValueError` naming a layer of any other kind.
    """
    plain = {"full_attention", "sliding_attention"}
    kinds = list(getattr(config, "layer_types", None) or ())
    other = sorted(set(kinds) - plain)
    if "chunked_attention" in other or (other and StateLayer is None):
        raise ValueError(f"model: {config.model_type!r} has layers {other}; {INSTEAD}")
    layers = DynamicCache(config=config).layers
    return [_native_layer(config, layer) for layer in layers]


def _native_layer(config: Any, layer: Any) -> Any:
    if type(layer) is cache_utils.DynamicLayer:
        return Window(None)
    if type(layer) is cache_utils.DynamicSlidingWindowLayer:
        return Window(layer.sliding_window)
    if StateLayer is not None and type(layer) is StateLayer:
        return layer
    raise ValueError(
        f"model: {config.model_type!r} has a layer that transformers caches in a "
        f"{type(layer).__name__}; {INSTEAD}"
    )

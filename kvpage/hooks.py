"""How a cache meets its model: stateless forward hooks, shared by every cache and thread.

A hook reads the cache out of the call's own arguments and, when it is one of ours, hands it what
only the model has: the 2-D attention mask, and the queries and keys before RoPE. Nothing is kept
on the model but the hooks; what passes between the hooks of one attention call is thread-local.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpage.architectures import AttentionSite, Split
from kvpage.attention import finish
from kvpage.compat import cache_argument, not_compiled
from kvpage.contract import HookedCache, ModelKey


@dataclass(slots=True)
class Call:
    """A decoder's forward with a cache of ours: what was captured since the last `Cache.update`."""

    cache: weakref.ref[HookedCache]
    layer_idx: int = -1
    """The layer that `queries` and `keys` are of."""
    queries: Tensor | None = None
    keys: Tensor | None = None
    mask: Tensor | None = None
    """The mask of this layer's own, for `Cache.update` to complete."""


class _Current(threading.local):
    call: Call | None = None


_current = _Current()


def current_call(cache: HookedCache, layer_idx: int) -> Call | None:
    """The forward with `cache` that this thread is in, if any, with what was captured of the layer.

    `update` clears it: what the next layer finds is to be its own.
    """
    call = _current.call
    if call is None or call.cache() is not cache:
        return None
    if call.layer_idx != layer_idx:
        call.queries = call.keys = None
    return call


class _Hook:
    """A hook of ours. Copies and pickles of the model are not attached: they get inert ones."""

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class InertHook:
    """What a copied or unpickled model has in the place of a hook."""

    def __call__(self, *args: object) -> None:
        return None


class OuterHook(_Hook):
    """Forward pre-hook of the models around the decoder: how many tokens come as drafts.

    Assisted decoding asks for the logits of the drafts and of the token before them. Also the 2-D
    attention mask, of which models around the decoder may make 4-D ones before it is called.
    """

    def __init__(self, key: ModelKey, model: nn.Module) -> None:
        self.key = key
        self.knows_drafts = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = cache_argument(kwargs)
        if isinstance(cache, HookedCache):
            cache.meet(self.key)
            wanted, mask = kwargs.get("logits_to_keep"), kwargs.get("attention_mask")
            drafts = wanted - 1 if isinstance(wanted, int) and wanted > 0 else 0
            mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
            cache.expect(drafts if self.knows_drafts else None, mask)


class DecoderHook(_Hook):
    """Forward pre-hook of the decoder: announces a forward and its attention mask."""

    def __init__(
        self, key: ModelKey, parameters: tuple[str, ...], hook_masks: Callable[[], None]
    ) -> None:
        """parameters: of the decoder's forward, in order; hook_masks: installs `MaskHook`s."""
        self.key, self.parameters, self.hook_masks = key, parameters, hook_masks

    @not_compiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        _current.call = None
        finish(completed=False)
        arguments = dict(zip(self.parameters, args, strict=False)) | kwargs
        cache = cache_argument(arguments)
        if not isinstance(cache, HookedCache):
            return None
        cache.meet(self.key)
        if module.training and torch.is_grad_enabled():
            cache.check_trainable()
        inputs = arguments.get("input_ids")
        if inputs is None:
            inputs = arguments.get("inputs_embeds")
        if inputs is None:
            return None
        given = arguments.get("attention_mask")
        mask = _mask_of(given)
        visible = _padding_of(given) if isinstance(given, Mapping) else None
        if visible is not None:
            visible = visible.expand(inputs.shape[0], -1)
        position_ids = arguments.get("position_ids")
        used = cache.announce(inputs.shape[1], mask, position_ids, visible)
        if cache.has_mid():
            self.hook_masks()
        _current.call = Call(weakref.ref(cache))
        return None if used is mask else ((), arguments | {"attention_mask": used})


class EndHook(_Hook):
    """Forward hook of the decoder, run also when it raised: its forward is over."""

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        _current.call = None
        finish(completed=output is not None)


class FirstHook(_Hook):
    """Forward pre-hook of the first attention module: the positions of the forward's tokens.

    Also, of a bare decoder that was hooked while its first call was running, that it began.
    """

    def __init__(self, key: ModelKey) -> None:
        self.key = key

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = cache_argument(kwargs)
        if not isinstance(cache, HookedCache):
            _current.call = None
            return
        cache.meet(self.key)
        if not cache.is_announced():
            hidden = args[0] if args else kwargs["hidden_states"]
            cache.announce(hidden.shape[1], _padding_of(kwargs.get("attention_mask")), None)
        if _current.call is None or _current.call.cache() is not cache:
            _current.call = Call(weakref.ref(cache))
        position_ids = kwargs.get("position_ids")
        if position_ids is not None:
            cache.see_positions(position_ids)


class MaskHook(_Hook):
    """Forward pre-hook of an attention module, once forwards end in drafts: hands it a mask of its
    own where one of the drafts makes a compaction due."""

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx

    @not_compiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = _current.call
        cache = None if call is None else call.cache()
        if call is None or cache is None or not cache.needs_private_mask(self.layer_idx):
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        mask = _mask_of(kwargs.get("attention_mask"))
        call.mask = cache.private_mask(self.layer_idx, mask, hidden)
        return args, kwargs | {"attention_mask": call.mask}


class CaptureHook(_Hook):
    """Forward hook of the module that yields the pre-RoPE query, or the key."""

    def __init__(self, name: str, site: AttentionSite) -> None:
        """name: `"queries"` or `"keys"`, of `Call`."""
        self.name, self.layer_idx, self.heads_first = name, site.layer_idx, site.heads_first

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        call = _current.call
        if call is not None:
            call.layer_idx = self.layer_idx
            setattr(call, self.name, output.transpose(1, 2) if self.heads_first else output)


class FusedHook(_Hook):
    """Forward hook of a module that yields query and key in one: `split` takes them apart."""

    def __init__(self, split: Split, site: AttentionSite) -> None:
        self.split, self.layer_idx = split, site.layer_idx
        self.attention = weakref.ref(site.attention)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        call, attention = _current.call, self.attention()
        if call is not None and attention is not None:
            call.layer_idx = self.layer_idx
            call.queries, call.keys = self.split(output, attention)


def _mask_of(mask: object) -> Tensor | None:
    """The mask tensor among what transformers takes as `attention_mask`."""
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention")
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask: a tensor or None expected, got {type(mask).__name__}; use "
            "attn_implementation 'sdpa', 'eager' or 'kvpage'"
        )
    return mask


def _padding_of(mask: object) -> Tensor | None:
    """The 2-D padding mask behind a layer's causal mask: what its last query may look at."""
    mask = _mask_of(mask)
    if mask is None or mask.ndim == 2:
        return mask
    last = mask[:, 0, -1]
    return last if last.dtype == torch.bool else last == 0

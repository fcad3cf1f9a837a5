"""How a cache meets its model: stateless forward hooks, shared by every cache and thread.

A hook reads the cache out of the call's own arguments and, when it is one of ours, hands it what
only the model has: the 2-D attention mask, and the queries and keys before RoPE. Nothing is kept
on the model but the hooks; what passes between the hooks of one attention call is thread-local.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpage.architectures import AttentionSite, Split, decoder_of, describe
from kvpage.attention import register
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

    def __init__(self, attachment: Attachment, parameters: tuple[str, ...]) -> None:
        self.attachment, self.key, self.parameters = attachment, attachment.key, parameters

    @not_compiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        _current.call = None
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
            self.attachment.hook_masks()
        _current.call = Call(weakref.ref(cache))
        return None if used is mask else ((), arguments | {"attention_mask": used})


class EndHook(_Hook):
    """Forward hook of the decoder, run also when it raised: its forward is over."""

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        _current.call = None


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


@dataclass
class Attachment:
    """The hooks on one model and the caches they serve."""

    key: ModelKey
    handles: list[RemovableHandle] = field(default_factory=list)
    outer: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Models around the decoder that are hooked too."""
    inner: list[RemovableHandle] = field(default_factory=list)
    """Hooks on modules within the decoder; `handles` has the others."""
    hooked: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """Those modules, in order."""
    attentions: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    """The attention modules, by layer."""
    users: weakref.WeakSet[HookedCache] = field(default_factory=weakref.WeakSet)
    explicit: bool = False

    def remove(self) -> None:
        for handle in self.handles + self.inner:
            handle.remove()
        self.handles.clear()
        self.inner.clear()
        self.outer.clear()

    def hook_sites(self, sites: tuple[AttentionSite, ...]) -> None:
        """Hook the modules of `sites`, unless they are; rather than what adapters or quantisers
        have replaced since."""
        modules = [module for site in sites for module in site.modules]
        if self.inner and [reference() for reference in self.hooked] == modules:
            return
        for handle in self.inner:
            handle.remove()
        first = min(sites, key=lambda site: site.layer_idx).attention
        hook = FirstHook(self.key)
        self.inner = [first.register_forward_pre_hook(hook, with_kwargs=True)]
        self.inner += [handle for site in sites for handle in _capture(site)]
        self.hooked = [weakref.ref(module) for module in modules]
        self.attentions = {site.layer_idx: weakref.ref(site.attention) for site in sites}

    def hook_masks(self) -> None:
        """Hook every attention module for masks of its own, unless they are."""
        attentions, self.attentions = self.attentions, {}
        for layer_idx, reference in attentions.items():
            module = reference()
            if module is not None:
                hook = MaskHook(layer_idx)
                self.inner.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def join(self, cache: HookedCache) -> None:
        """Stay for as long as `cache` lives."""
        if cache not in self.users:
            self.users.add(cache)
            weakref.finalize(cache, self.remove_if_unused).atexit = False

    def leave(self, cache: HookedCache) -> None:
        self.users.discard(cache)
        self.remove_if_unused()

    def remove_if_unused(self) -> None:
        if not self.explicit and not any(True for _ in self.users):
            self.remove()


_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def _attachment_of(model: nn.Module) -> Attachment:
    """The attachment of `model`, hooked now if it is not; `ValueError` where unsupported."""
    register()
    with _lock:
        described = describe(model)
        decoder = described.module
        attachment = _attachments.get(decoder)
        if attachment is None:
            attachment = _attachments[decoder] = Attachment(ModelKey(described))
        if not attachment.handles:
            attachment.handles += _hook_decoder(decoder, attachment)
        attachment.hook_sites(described.sites)
        attachment.key.see_ropes(described)
        for outer in _models_around(decoder, model):
            if outer not in attachment.outer:
                attachment.outer.add(outer)
                hook = OuterHook(attachment.key, outer)
                handle = outer.register_forward_pre_hook(hook, with_kwargs=True)
                attachment.handles.append(handle)
        return attachment


def _models_around(decoder: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """`model` and the models within it that hold `decoder`."""
    for module in model.modules():
        around = isinstance(module, PreTrainedModel) and module is not decoder
        if around and any(inner is decoder for inner in module.modules()):
            yield module


def _hook_decoder(decoder: nn.Module, attachment: Attachment) -> Iterator[RemovableHandle]:
    signature = inspect.signature(type(decoder).forward)
    hook = DecoderHook(attachment, tuple(signature.parameters)[1:])
    yield decoder.register_forward_pre_hook(hook, with_kwargs=True)
    yield decoder.register_forward_hook(EndHook(), always_call=True)


def _capture(site: AttentionSite) -> Iterator[RemovableHandle]:
    """Hook what yields the queries and keys of `site`, if they are wanted."""
    if site.query is None:
        return
    if site.split is not None:
        yield site.query.register_forward_hook(FusedHook(site.split, site))
        return
    assert site.key is not None
    yield site.query.register_forward_hook(CaptureHook("queries", site))
    yield site.key.register_forward_hook(CaptureHook("keys", site))


def attach(model: nn.Module) -> None:
    """Install kvpage's hooks on `model` until `detach`; without it they come and go with caches.

    Raises `TypeError` when `model` is no transformers model, `ValueError` when its architecture is
    not supported.
    """
    _attachment_of(model).explicit = True


def detach(model: nn.Module) -> None:
    """Remove kvpage's hooks from `model`; caches in use on it then raise at their next forward."""
    with _lock:
        attachment = _attachments.get(decoder_of(model))
        if attachment is not None:
            attachment.explicit = False
            attachment.remove()


def join(model: nn.Module, cache: HookedCache) -> Attachment:
    """Hook `model` for as long as `cache` lives."""
    attachment = _attachment_of(model)
    attachment.join(cache)
    return attachment

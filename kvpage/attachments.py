"""A model's attachment: its hooks, and the caches for which they stay."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpage.architectures import AttentionSite, decoder_of, describe
from kvpage.attention import register
from kvpage.contract import HookedCache, ModelKey
from kvpage.hooks import (
    CaptureHook,
    DecoderHook,
    EndHook,
    FirstHook,
    FusedHook,
    MaskHook,
    OuterHook,
)


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
    parameters = tuple(signature.parameters)[1:]
    hook = DecoderHook(attachment.key, parameters, attachment.hook_masks)
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


def model_of(key: ModelKey) -> nn.Module:
    """The decoder that is hooked under `key`."""
    with _lock:
        return next(decoder for decoder, found in _attachments.items() if found.key is key)


def join(model: nn.Module, cache: HookedCache) -> Attachment:
    """Hook `model` for as long as `cache` lives."""
    attachment = _attachment_of(model)
    attachment.join(cache)
    return attachment

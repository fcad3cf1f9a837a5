"""A cache and its one model: found, kept, checked."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from kvpage.attachments import Attachment, join
from kvpage.compat import not_compiled
from kvpage.contract import HookedCache, ModelKey


class Watcher:
    """Finds the model of a cache that was made without one.

    Until the cache has met its model, a process-wide pre-hook sees every model being called and
    hooks it for this cache, before any of its attention modules run.
    """

    def __init__(self, cache: HookedCache) -> None:
        self._cache = weakref.ref(cache)
        self.refusal: tuple[type[Exception], str] | None = None
        """Why the last model called can't be used: no exception, whose traceback holds frames."""
        self.candidates: list[Attachment] = []
        self._handle = register_module_forward_pre_hook(self._see)
        weakref.finalize(cache, self._handle.remove).atexit = False

    @not_compiled
    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        cache = self._cache()
        if cache is None or not isinstance(module, PreTrainedModel):
            return
        try:
            attachment = join(module, cache)
        except (ValueError, TypeError) as error:
            self.refusal = type(error), str(error)
            return
        self.refusal = None
        if attachment not in self.candidates:
            self.candidates.append(attachment)

    def stop(self, key: ModelKey) -> Attachment:
        """The cache met the model of `key`: leave all others; returns its attachment."""
        self._handle.remove()
        cache = self._cache()
        assert cache is not None
        (met,) = (a for a in self.candidates if a.key is key)
        for attachment in self.candidates:
            if attachment is not met:
                attachment.leave(cache)
        self.candidates.clear()
        return met


class Meeting:
    """Which model a cache belongs to: the one it was made with, or the first that uses it."""

    def __init__(self, cache: HookedCache, model: nn.Module | None) -> None:
        self._watcher = Watcher(cache) if model is None else None
        self._attachment: Attachment | None = None if model is None else join(model, cache)

    def fork(self, twin: HookedCache) -> Meeting:
        """The meeting of a copy: the same model, if there is one yet."""
        if self._attachment is None:
            return Meeting(twin, None)
        meeting = Meeting.__new__(Meeting)
        meeting.__dict__.update(self.__dict__)
        self._attachment.join(twin)
        return meeting

    @property
    def key(self) -> ModelKey | None:
        """The model, once it was met."""
        return None if self._attachment is None else self._attachment.key

    @property
    def name(self) -> str | None:
        return None if self.key is None else self.key.name

    def meet(self, key: ModelKey, filled_layers: int) -> None:
        """The model of `key` uses the cache, which has `filled_layers` layers already.

        Raises `ValueError` when the cache belongs to another model.
        """
        if self._attachment is None:
            if filled_layers and not filled_layers == key.num_layers == key.num_full_layers:
                raise ValueError(
                    f"cache: filled with {filled_layers} layers of full attention before it met "
                    f"{key.name}, of whose {key.num_layers} layers {key.num_full_layers} are such"
                )
            assert self._watcher is not None
            self._attachment = self._watcher.stop(key)
            self._watcher = None
        elif self._attachment.key is not key:
            raise ValueError(
                f"cache: belongs to the {self.name} it was first used with, offered to another "
                f"{key.name}; a cache serves one model, make a new one"
            )

    def check_caller(self) -> None:
        """Raise unless an update that no hook announced can be: there is no model yet."""
        if self._attachment is None:
            if self._watcher is not None and self._watcher.refusal is not None:
                kind, message = self._watcher.refusal
                raise kind(message)
        elif not self._attachment.handles:
            raise RuntimeError(f"kvpage was detached from this {self.name}; attach it again")
        else:
            raise ValueError(
                f"cache: belongs to the {self.name} it was first used with; this update came from "
                "elsewhere. A cache serves one model: make a new one"
            )

"""What a cache and the hooks on its model know of each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpage.architectures import Decoder
from kvpage.compat import INSTEAD, native_layers
from kvpage.rope import RopeSource

ROPE_CHECK_TOKENS = 8
"""The last keys of a forward that `ModelKey.check_keys` is given."""


class ModelKey:
    """Identity of a hooked model, with what a cache needs of it; holds no module."""

    def __init__(self, decoder: Decoder) -> None:
        self.name = type(decoder.module).__name__
        self.config = decoder.config
        self.num_layers = len(self.native_layers())
        self.num_attention_layers = len(decoder.sites)
        self.num_full_layers = sum(site.window is None for site in decoder.sites)
        self.see_ropes(decoder)
        self.groups = {site.layer_idx: site.groups for site in decoder.sites}
        """By layer: query heads per KV head."""
        self.scales = {site.layer_idx: site.scale for site in decoder.sites}
        """By layer: of the attention's logits."""

    @property
    def attends_over_blocks(self) -> bool:
        """Whether the model has attn_implementation "kvpage" now."""
        return getattr(self.config, "_attn_implementation", None) == "kvpage"

    def see_ropes(self, decoder: Decoder) -> None:
        """Take the RoPEs as they are now: a cast of the model changes their frequencies."""
        self.ropes = {site.layer_idx: site.rope for site in decoder.sites}

    def rope(self, layer_idx: int) -> RopeSource:
        """The RoPE of a layer of full attention."""
        rope = self.ropes[layer_idx]
        assert rope is not None
        return rope

    def check_keys(self, layer_idx: int, before: Tensor, after: Tensor, positions: Tensor) -> None:
        """Raise `ValueError` unless the keys `before` `[B, n, ...]` are, after RoPE at `positions`
        `[1 or B, m]`, the last `m` of `after` `[B, Hkv, n, D]`."""
        batch, kv_heads, new, _ = after.shape
        last = positions.shape[1]
        before = before.reshape(batch, new, kv_heads, -1).transpose(1, 2)
        try:
            self.rope(layer_idx)().check(before[:, :, -last:], after[:, :, -last:], positions)
        except ValueError as error:
            raise ValueError(
                f"model: layer {layer_idx} of {self.name}: {error}; {INSTEAD}"
            ) from None

    def native_layers(self) -> list[Any]:
        """How each layer is cached: a `Window` of attention, or a new state of transformers'."""
        return native_layers(self.config)


class HookedCache:
    """What the hooks call on a cache. (No ABC: whether a cache is one is asked in every layer.)"""

    def meet(self, key: ModelKey) -> None:
        """A model uses this cache; raises `ValueError` when it belongs to another."""
        raise NotImplementedError

    def check_trainable(self) -> None:
        """A forward in training mode with gradients starts; raises where they would be wrong."""
        raise NotImplementedError

    def expect(self, drafts: int | None, mask: Tensor | None) -> None:
        """A model around the decoder says what it was given: how many of the coming forward's last
        tokens are drafts, if it knows, and the 2-D attention mask, if any."""
        raise NotImplementedError

    def announce(
        self,
        num_new: int,
        mask: Tensor | None,
        position_ids: Tensor | None,
        visible: Tensor | None = None,
    ) -> Tensor | None:
        """A forward of `num_new` tokens starts, under this 2-D mask; returns the mask to use.

        visible: bool `[B, live + q]`, the columns that the last query may look at, where the
        mask is a 4-D one of transformers' own making.
        """
        raise NotImplementedError

    def is_announced(self) -> bool:
        """Whether the running forward was announced and its first layer is still to come."""
        raise NotImplementedError

    def has_mid(self) -> bool:
        """Whether a draft of the announced forward makes a compaction due."""
        raise NotImplementedError

    def needs_private_mask(self, layer_idx: int) -> bool:
        """Whether one mask for all heads can't say what this layer's queries see."""
        raise NotImplementedError

    def private_mask(self, layer_idx: int, mask: Tensor | None, hidden: Tensor) -> Tensor:
        """An additive mask `[B, H, q, L]` that starts as `mask`, for `hidden` `[B, q, ...]`."""
        raise NotImplementedError

    def see_positions(self, position_ids: Tensor) -> None:
        """The positions `[1 or B, q]` of the running forward."""
        raise NotImplementedError

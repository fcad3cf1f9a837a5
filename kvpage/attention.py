"""Attention that reads the blocks: `model.set_attn_implementation("kvpage")`.

`Cache.update` returns keys and values, which says nothing of blocks. So a forward of one token is
handed over: `update` leaves a `Decode` for the attention function that follows it in the same
thread, which knows it by the tensors it was returned and reads the blocks in their place. All else
(prompts, drafts, other caches, training) is transformers' own SDPA, or, where a model has logit
soft-capping or attention sinks, the formula.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

import kvpage.kernels.reference as reference
from kvpage import kernels
from kvpage.compat import not_compiled
from kvpage.device import reads_are_free
from kvpage.places import Places
from kvpage.storage import LayerStorage

NAME = "kvpage"
QUERY_CHUNK = 256
"""Queries whose logits are held at a time where soft-capping or sinks keep SDPA out."""


def register() -> None:
    """Make "kvpage" known to transformers, as an attention and as a mask function.

    `attach(model)` and `PagedCompactCache(model)` do so; call it to set the implementation before.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@functools.cache
def resolve_backend(requested: str, device: str, block_size: int) -> str:
    """What reads the blocks on `device`: `"triton"`, `"reference"` or `"flash_attn"`.

    `"auto"` is Triton on a GPU where it is installed, else the reference. Raises `ValueError`, or
    `ImportError` for a package that is not there, where `requested` can't be had.
    """
    gpu = device == "cuda"
    if requested == "auto":
        return "triton" if gpu and find_spec("triton") is not None else "reference"
    if requested == "reference":
        return requested
    if not gpu:
        raise ValueError(
            f"backend: 'auto' or 'reference' expected on {device!r}, got {requested!r}"
        )
    package = "triton" if requested == "triton" else "flash_attn"
    if find_spec(package) is None:
        raise ImportError(f"backend: {requested!r} needs the package {package}, which is missing")
    if requested == "flash_attn" and block_size % 256:
        raise ValueError(
            "backend: 'flash_attn' reads blocks of a multiple of 256 tokens, got block_size = "
            f"{block_size}"
        )
    return requested


@dataclass(slots=True)
class Decode:
    """The new token of one layer and what it attends to, on the way from `update` to `attention`.

    Without `places` the keys and values that `update` returned are all live ones; else they are
    placeholders and the live ones are in the blocks of `storage`.
    """

    layer_idx: int
    backend: str
    keys: Tensor
    visible: Tensor | None
    """bool `[B, live]`: which live slots hold no pad."""
    storage: LayerStorage | None = None
    places: Places | None = None
    window: int | None = None

    def attend(
        self,
        query: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Outputs `[B, H, Dv]` of the queries `[B, H, D]`."""
        if self.places is None:
            return _attend_rows(query, self.keys, value, self.visible, scale, softcap, sinks)
        assert self.storage is not None
        if self.backend == "flash_attn":
            return self._flash_attn(query, scale, softcap, sinks)
        op = kernels.paged_attention
        if self.backend == "reference":
            op = reference.paged_attention
        return op(
            query, self.storage.keys, self.storage.values, self.places.tables, self.places.stop,
            scale, window=self.window, softcap=softcap, sinks=sinks, visible=self.places.visible,
        )  # fmt: skip

    def _flash_attn(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """flash-attn's paged decode; its cache is `[num_blocks, block_size, Hkv, D]`, any strides
        but the last. It knows no pads, so where a mask was given the device is asked for them."""
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

        assert self.storage is not None and self.places is not None
        if sinks is not None or self.places.has_pads():
            what = "attention sinks" if sinks is not None else "pads"
            raise ValueError(f"backend: 'flash_attn' has no {what} over blocks, use 'triton'")
        return flash_attn_with_kvcache(
            query[:, None],
            self.storage.keys.permute(1, 2, 0, 3),
            self.storage.values.permute(1, 2, 0, 3),
            cache_seqlens=self.places.stop,
            block_table=self.places.tables,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            softcap=softcap or 0.0,
        )[:, 0]


class _Waiting(threading.local):
    decode: Decode | None = None


_waiting = _Waiting()


def hand_over(decode: Decode) -> None:
    """Leave `decode` for the attention function that follows.

    Raises `RuntimeError` when the last one of this forward was never taken.
    """
    finish(completed=True)
    _waiting.decode = decode


def finish(completed: bool) -> None:
    """A forward, or a layer of it, is over: nothing waits any longer.

    Raises `RuntimeError` when it is `completed`, but its attention was not ours.
    """
    left, _waiting.decode = _waiting.decode, None
    if completed and left is not None and left.places is not None:
        raise RuntimeError(
            f"the attention of layer {left.layer_idx} did not go through attn_implementation "
            f"{NAME!r}; this model can't use it: model.set_attn_implementation('sdpa')"
        )


def _take(keys: Tensor, queries: int) -> Decode | None:
    decode, _waiting.decode = _waiting.decode, None
    if decode is None or (decode.keys is keys and queries == 1):
        return decode
    placeholders = decode.places is not None
    if keys.shape != decode.keys.shape or (placeholders and not bool(keys.isnan().all())):
        return None  # a forward was interrupted, and this is another
    raise RuntimeError(
        f"the attention of layer {decode.layer_idx} changed the keys on their way from the cache; "
        f"this model can't use attn_implementation {NAME!r}: model.set_attn_implementation('sdpa')"
    )


@not_compiled
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `[B, H, q, D]` to `([B, q, H, Dv], None)`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    position_bias = kwargs.get("position_bias")
    decode = _take(key, query.shape[2])
    if decode is not None:
        if position_bias is not None:
            raise ValueError(f"position_bias: not supported by attn_implementation {NAME!r}")
        return decode.attend(query[:, :, 0], value, scale, softcap, s_aux)[:, None], None
    on_cpu = query.shape[2] == 1 and reads_are_free(query.device)
    if on_cpu and not dropout and position_bias is None and _hides_slots_only(attention_mask):
        visible = None if attention_mask is None else attention_mask[:, 0, 0]
        query = query[:, :, 0]
        return _attend_rows(query, key, value, visible, scale, softcap, s_aux)[:, None], None
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout or position_bias is not None:
        raise ValueError(
            f"dropout, position_bias: not supported by attn_implementation {NAME!r} together with "
            "softcap or s_aux"
        )
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()[None, None]
    outputs = [
        reference.attend(
            query[:, :, start : start + QUERY_CHUNK],
            key,
            value,
            None if attention_mask is None else attention_mask[:, :, start : start + QUERY_CHUNK],
            scale,
            softcap,
            s_aux,
        )
        for start in range(0, query.shape[2], QUERY_CHUNK)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _hides_slots_only(mask: Tensor | None) -> bool:
    """Whether `mask`, of one query, says for all heads alike which slots it sees."""
    return mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1)


def _attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over rows that lie in order: the query heads of a KV head are its queries.

    On a CPU faster than SDPA's `enable_gqa`, which reads the keys once for every query head.
    """
    batch, heads, dim = query.shape
    mask = None if visible is None else visible[:, None, None, :]
    if softcap is not None or sinks is not None:
        query = query[:, :, None]
        return reference.attend(query, keys, values, mask, scale, softcap, sinks)[:, :, 0]
    grouped = query.reshape(batch, keys.shape[1], -1, dim)
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(batch, heads, -1)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: SDPA's, but for one token, which sees everything but pads.

    Then it is the 2-D mask as it is, a view, and the device is not asked whether all of it is True
    (on the CPU it is, as that saves the mask).
    """
    sees_all = allow_is_causal_skip and not use_vmap and q_length == 1
    sees_all = sees_all and (local_size is None or kv_length <= local_size)
    stop = kv_offset + kv_length
    if attention_mask is not None:
        sees_all = sees_all and attention_mask.ndim == 2 and attention_mask.shape[1] >= stop
    if not sees_all or not isinstance(q_offset, int) or q_offset != stop - 1:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            local_size, allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, **kwargs,
        )  # fmt: skip
    if attention_mask is None:
        return None
    visible = attention_mask[:, kv_offset:stop].bool()
    if reads_are_free(visible.device) and bool(visible.all()):
        return None
    return visible[:, None, None]

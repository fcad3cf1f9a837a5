"""A cache that keeps nothing but the sums of the queries and keys that pass it, before RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvpage.architectures import describe
from kvpage.attachments import join
from kvpage.compat import INSTEAD, not_compiled
from kvpage.contract import ROPE_CHECK_TOKENS, HookedCache, ModelKey
from kvpage.hooks import current_call
from kvpage.layer_calibration import LayerCalibration
from kvpage.summaries import SAMPLE_TOKENS, RunningMoments


class Recorder(HookedCache, DynamicCache):
    """A cache for one forward after the other that keeps nothing but sums.

    What `update` is given it returns; the queries and keys before RoPE are added up.
    """

    def __init__(self, model: nn.Module, layers: Mapping[int, LayerCalibration]) -> None:
        decoder = describe(model)
        super().__init__(config=decoder.config)
        self._decoder, self._layers = decoder, layers
        self._real: Tensor | None = None
        self._checked: set[int] = set()
        self.sums: dict[int, dict[str, Tensor]] = {}
        """Of the forward since `begin`, by layer and name; float64, on the CPU once read."""
        self._attachment = join(model, self)

    def begin(self, real: Tensor, first_row: int) -> None:
        """A forward of new rows is to come, `first_row` of all the data the first; `real` `[B, n]`
        bool is False for pads."""
        self.layers = DynamicCache(config=self._decoder.config).layers
        self._real, self.sums = real, {}
        priority = _priorities(first_row, real)[real]
        self._priority, self._places = priority.topk(
            min(SAMPLE_TOKENS, len(priority)), largest=False
        )

    # What the hooks call.

    def meet(self, key: ModelKey) -> None:
        if key is not self._attachment.key:
            raise ValueError(f"cache: records another model than this {key.name}")

    def expect(self, drafts: int | None, mask: Tensor | None) -> None:
        return None

    def announce(
        self,
        num_new: int,
        mask: Tensor | None,
        position_ids: Tensor | None,
        visible: Tensor | None = None,
    ) -> Tensor | None:
        return mask

    def is_announced(self) -> bool:
        return True

    def has_mid(self) -> bool:
        return False

    def see_positions(self, position_ids: Tensor) -> None:
        return None

    @not_compiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states as they are, with the layer's queries and keys added to `sums`."""
        layer = self._layers.get(layer_idx)
        if layer is not None:
            call = current_call(self, layer_idx)
            if call is None or call.queries is None or call.keys is None:
                raise RuntimeError(
                    f"queries or keys of layer {layer_idx} did not pass kvpage's hooks; {INSTEAD}"
                )
            assert self._real is not None
            batch, kv_heads, new, _ = key_states.shape
            queries = call.queries.reshape(batch, new, -1, key_states.shape[-1])
            keys = call.keys.reshape(batch, new, kv_heads, -1)
            call.queries = call.keys = None
            self._check(layer_idx, layer, queries, keys, key_states)
            self.sums[layer_idx] = self._summed(layer_idx, queries, keys)
        return key_states, value_states

    def _check(
        self, layer_idx: int, layer: LayerCalibration, queries: Tensor, keys: Tensor, after: Tensor
    ) -> None:
        """Raise unless the heads are all there and the keys turn to what arrived here, once."""
        heads, dim = layer.query_total.shape
        got = queries.shape[2], keys.shape[2], keys.shape[3]
        if got != (heads, layer.kv_heads, dim):
            raise ValueError(
                f"model: layer {layer_idx}: {heads} query heads and {layer.kv_heads} KV heads of "
                f"{dim} dimensions expected, got {got[0]} and {got[1]} of {got[2]}; {INSTEAD}"
            )
        new = keys.shape[1]
        if layer_idx in self._checked or new == 1:
            return
        last = min(new, ROPE_CHECK_TOKENS)
        positions = torch.arange(new - last, new).expand(keys.shape[0], last)
        self._attachment.key.check_keys(layer_idx, keys, after, positions)
        self._checked.add(layer_idx)

    def _summed(self, layer_idx: int, queries: Tensor, keys: Tensor) -> dict[str, Tensor]:
        assert self._real is not None
        rope, real, sums = self._attachment.key.rope(layer_idx)(), self._real.to(keys.device), {}
        for name, vectors in (("query", queries.detach()), ("key", keys.detach())):
            moments = RunningMoments.of(vectors, real, rope)
            sums[f"{name}_total"] = moments.total.sum(dim=0)
            sums[f"{name}_magnitude_total"] = moments.magnitude_total.sum(dim=0)
        sums["sample"] = queries.detach()[real][self._places.to(queries.device)].float()
        return sums

    def read(self) -> dict[int, dict[str, Tensor]]:
        """The sums of the forward that has ended, and a sample of its queries, on the CPU."""
        missing = self._layers.keys() - self.sums.keys()
        if missing:
            raise RuntimeError(f"layers {sorted(missing)} did not use the cache; {INSTEAD}")
        assert self._real is not None
        more = {"count": self._real.sum().double(), "priority": self._priority}
        return {
            i: more
            | {name: t.cpu() if name == "sample" else t.cpu().double() for name, t in sums.items()}
            for i, sums in self.sums.items()
        }


def _priorities(first_row: int, real: Tensor) -> Tensor:
    """int64 `[B, n]`, as good as random, of tokens by their row among all data and place in it."""
    rows = torch.arange(first_row, first_row + real.shape[0])[:, None]
    mixed = rows * (1 << 32) + torch.arange(real.shape[1])
    for factor in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):  # as SplitMix64
        mixed = (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) * factor
    return mixed & 0x3FFFFFFFFFFFFFFF

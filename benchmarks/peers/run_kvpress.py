"""Fidelity of kvpress's presses while decoding; compare.py runs this file in their environment.

Every `ScorerPress` that kvpress exports is tried under `DecodingPress`, with its own defaults, and
`CAMPress`, a decoding press of its own. What can't run is written down with the reason. Imports
nothing of kvpage.

Two things of DecodingPress bear on what a press can do, so that some run "mended" too:
- the survivors lie in the order of their scores, while StreamingLLM, LagKV, CUR and the pooling of
  SnapKV take the order in the cache for that of the text;
- expected attention and CAP place the coming queries right behind the buffer of hidden states, at
  position 128 of any text, and SnapKV rotates every query of its window to the last position.
"mended" keeps the order of the text and hands over the positions; nothing else changes. Measured on
English verse, it makes most of them much better, but SnapKV worse.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from peer_runs import Settings, load_model, measure_all, parse, plan
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: a press must not fetch

SIDE = f"kvpress {version('kvpress')}"
FIRST = (
    "ExpectedAttentionPress",
    "KeyDiffPress",
    "KnormPress",
    "SnapKVPress",
    "TOVAPress",
    "StreamingLLMPress",
    "LagKVPress",
)
"""Measured before the others."""
MENDED = (
    "ExpectedAttentionPress",
    "ExpectedAttentionStatsPress",
    "SnapKVPress",
    "StreamingLLMPress",
    "LagKVPress",
    "CURPress",
    "CapPress",
)
ONE_TOKEN = ("SnapKVPress", "PyramidKVPress", "ObservedAttentionPress", "CAMPress")
"""Presses that do something else when a forward has several tokens; for others nothing changes."""
NEEDS = {
    "QFilterPress": "needs filters trained for this model",
    "KVzapPress": "needs a network trained for this model",
}
SAMPLES, SAMPLE_TOKENS, SINKS = 40, 250, 4
"""Of the text that statistics are made of ahead: kvpress takes 100 of 1,000 characters."""


def main() -> None:
    args = parse(__doc__.splitlines()[0])
    names = args.contenders or contenders()
    planned = plan(args, SIDE, names, dict.fromkeys(ONE_TOKEN, 1))
    if not planned:
        return
    model = load_model(args.model)
    statistics: list[Tensor] = []

    def make(name: str) -> Any:
        if name == "ExpectedAttentionStatsPress" and not statistics:
            if args.calibration_ids is None:
                raise NotImplementedError("needs statistics of another text: --calibration")
            calibration = torch.tensor(json.loads(args.calibration_ids.read_text()))
            statistics.extend(query_statistics(model, calibration))
        return new_press(name, statistics)

    def traced(settings: Settings, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        torch.manual_seed(0)
        eager = settings.contender == "ObservedAttentionPress"  # looks at attention weights
        model.set_attn_implementation("eager" if eager else "sdpa")
        try:
            press = decoding_press(settings, make)
            with press(model):
                return measure(forward_with(model))
        except (AssertionError, NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    measure_all(planned, args, forward_with(model), traced)


def contenders() -> list[str]:
    """Every scorer press, the important ones first, then those mended."""
    import kvpress

    found = {press.__name__ for press in subclasses(kvpress.ScorerPress)}
    missing = {*FIRST, *MENDED} - found
    if missing:
        raise RuntimeError(f"{SIDE} has no {', '.join(sorted(missing))}; 0.5.5 is known to")
    others = sorted((found | {"CAMPress"}) - set(FIRST))
    return [*FIRST, *(f"{name}, mended" for name in MENDED), *others]


def subclasses(kind: type) -> Iterable[type]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("kvpress."):
            yield child
            yield from subclasses(child)


def decoding_press(settings: Settings, make: Callable[[str], Any]) -> Any:
    """A press that compresses every interval: it counts forwards, not tokens."""
    import kvpress

    name, _, mended = settings.contender.partition(", ")
    if name in NEEDS:
        raise NotImplementedError(NEEDS[name])
    kind, base = kvpress.DecodingPress, name
    if name == "CAMPress":
        kind, base = kvpress.CAMPress, "KnormPress"
    press = make(base)
    if mended:
        press.__class__ = mended_class(type(press))
    return kind(
        base_press=press,
        compression_interval=settings.interval // settings.step,
        target_size=settings.budget,
        hidden_states_buffer_size=max(256, settings.interval),
    )


def new_press(name: str, statistics: list[Tensor]) -> Any:
    import kvpress

    if name == "CriticalKVPress":  # refines the scores of another press
        return kvpress.CriticalKVPress(kvpress.ExpectedAttentionPress(use_vnorm=False))
    press = getattr(kvpress, name)()
    if name == "ExpectedAttentionStatsPress":
        press.mu, press.cov = statistics
    return press


def mended_class(press: type) -> type:
    """`press`, with survivors in the order of the text and the positions of its queries."""
    from kvpress.utils import compute_n_kept

    class Mended(press):  # type: ignore[misc]
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            if self.compression_ratio == 0:
                return keys, values
            self.next_position = int(kwargs["position_ids"].max()) + 1
            queries = torch.arange(self.next_position - hidden_states.shape[1], self.next_position)
            rotation = module.rotary_emb(hidden_states, queries[None])
            kwargs = {**kwargs, "position_embeddings": rotation}
            scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
            kept = scores.topk(compute_n_kept(keys.shape[2], self.compression_ratio), dim=-1)
            slots = kept.indices.sort(dim=-1).values[..., None].expand(-1, -1, -1, keys.shape[3])
            return keys.gather(2, slots).contiguous(), values.gather(2, slots).contiguous()

        def apply_avg_rope(self, module, mu, cov, q_len):
            return super().apply_avg_rope(module, mu, cov, self.next_position)

        def _avg_rope_matrix(self, module, q_len, device, dtype):
            return super()._avg_rope_matrix(module, self.next_position, device, dtype)

    return Mended


def forward_with(model: Any) -> Callable[[Tensor, int], tuple[Tensor, float]]:
    """Forwards through a cache of their own, with the positions that kvpress's pipeline passes."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    def forward(ids: Tensor, start: int) -> tuple[Tensor, float]:
        tokens = ids.shape[1]
        held = [layer.get_seq_length() for layer in cache.layers]
        positions = torch.arange(start, start + tokens)[None]
        output = model(input_ids=ids, past_key_values=cache, position_ids=positions)
        return output.logits[0], sum(held) / max(1, len(held)) + tokens

    return forward


@torch.inference_mode()
def query_statistics(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[layers, H, D]` and covariance `[layers, H, D, D]` of queries before RoPE.

    As kvpress's own `collect_queries`, which takes its text from a hub. ids: `[T]`.
    """
    from kvpress.presses.expected_attention_with_stats import patch_rotary_embedding

    queries = []
    for sample in ids.split(SAMPLE_TOKENS)[:SAMPLES]:
        with patch_rotary_embedding(model) as captured:
            model.model(input_ids=sample[None])
        queries.append(torch.cat(captured)[:, :, SINKS:])
    together = torch.cat(queries, dim=2)
    mean = together.mean(dim=2)
    centred = together - mean[:, :, None]
    return mean, centred.mT @ centred / (together.shape[2] - 1)


if __name__ == "__main__":
    main()

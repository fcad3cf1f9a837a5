"""How far the predictions under a budget are from the full cache's. Imports only torch.

`run_kvpage.py` and `run_kvpress.py` share it, each in its own environment, so that both sides are
fed, compared and averaged by the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

BLOCK = 64
"""Positions in a block of the bootstrap: errors of neighbouring positions go together."""
RESAMPLES = 2000
EXACT_KL = 1e-4
"""Nats that float32 rounding may make of a cache that has evicted nothing yet."""

Forward = Callable[[Tensor, int], tuple[Tensor, float]]
"""`(ids [1, q], position of the first) -> (logits [q, V], keys the last of them attended to)`."""


@dataclass(frozen=True)
class Trace:
    """A text fed through a cache with a budget, position by position, all `[T - 1]` float32."""

    kl: Tensor
    """KL divergence of the next-token distribution from the full cache's, nats."""
    nll_change: Tensor
    """Negative log-likelihood of the text's next token less the full cache's, nats."""
    top1: Tensor
    """1 where the likeliest next token is the full cache's."""
    attended: Tensor
    """Keys the position attended to, its own included, mean over the layers."""
    seconds: float
    """In the forwards alone."""


@torch.inference_mode()
def full_log_probs(forward: Forward, ids: Tensor, chunk: int = 256) -> Tensor:
    """Log-probabilities `[T, V]` float32 of the token after each of `ids` `[1, T]`."""
    starts = range(0, ids.shape[1], chunk)
    parts = [forward(ids[:, start : start + chunk], start)[0].float() for start in starts]
    return torch.cat([part.log_softmax(-1) for part in parts])


@torch.inference_mode()
def trace(forward: Forward, ids: Tensor, full: Tensor, prompt: int, step: int) -> Trace:
    """Feed `ids` `[1, T]`, a prompt and then `step` tokens a forward; compare with `full` `[T, V]`.

    Raises `ValueError` unless the prompt and whole steps make up the text.
    """
    tokens = ids.shape[1]
    if (tokens - prompt) % step:
        raise ValueError(f"step: a divisor of {tokens} - {prompt} tokens expected, got {step}")
    columns: list[tuple[Tensor, ...]] = []
    seconds = 0.0
    for start, stop in pairwise([0, *range(prompt, tokens, step), tokens]):
        started = perf_counter()
        logits, attended = forward(ids[:, start:stop], start)
        seconds += perf_counter() - started
        behind = torch.arange(stop - start - 1, -1, -1)
        stop = min(stop, tokens - 1)  # nothing follows the last token
        rows = slice(0, stop - start)
        got, expected = logits.float().log_softmax(-1)[rows], full[start:stop]
        following = ids[0, start + 1 : stop + 1, None]
        columns.append(
            (
                kl_divergence(expected, got),
                (expected - got).gather(1, following)[:, 0],
                (got.argmax(-1) == expected.argmax(-1)).float(),
                (attended - behind)[rows],
            )
        )
    return Trace(*(torch.cat(column) for column in zip(*columns, strict=True)), seconds)


def kl_divergence(expected: Tensor, got: Tensor) -> Tensor:
    """KL(expected || got) `[n]` in nats of log-probabilities `[n, V]`."""
    return (expected.exp() * (expected - got)).sum(-1)


def check_exact(found: Trace, budget: int) -> None:
    """Raise `RuntimeError` unless all is as with the full cache while nothing can be evicted."""
    largest = found.kl[:budget].max().item()
    if not largest < EXACT_KL:
        raise RuntimeError(
            f"not the full cache's predictions over the first {budget} tokens, of which none was "
            f"evicted: KL at most {EXACT_KL:g} expected, got {largest:.3g}"
        )


def bootstrap_interval(
    values: Tensor, block: int = BLOCK, resamples: int = RESAMPLES
) -> list[float]:
    """95 % interval of the mean of `values` `[n]`: percentiles of a moving-block bootstrap.

    Künsch 1989: resamples of whole blocks keep the dependence between neighbours. Reproducible.
    """
    block = min(block, len(values))
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), values.double().cumsum(0)))
    means = (sums[block:] - sums[:-block]) / block
    generator = torch.Generator().manual_seed(0)
    blocks = -(-len(values) // block)
    drawn = torch.randint(len(means), (resamples, blocks), generator=generator)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return means[drawn].mean(1).quantile(ends).tolist()


def summary(found: Trace, budget: int, interval: int) -> dict[str, object]:
    """Means over the positions after the first compaction, as JSON can hold them."""
    first = budget + interval
    kl, nll_change, top1, attended = (
        column[first:] for column in (found.kl, found.nll_change, found.top1, found.attended)
    )
    return {
        "positions": len(kl),
        "kl": kl.double().mean().item(),
        "kl_interval": bootstrap_interval(kl),
        "nll_change": nll_change.double().mean().item(),
        "nll_change_interval": bootstrap_interval(nll_change),
        "top1": top1.double().mean().item(),
        "attended_mean": attended.double().mean().item(),
        "attended_least": attended.min().item(),
        "attended_most": attended.max().item(),
        "seconds": round(found.seconds, 1),
        "kl_before_eviction": found.kl[:budget].max().item(),
        "kl_by_position": [float(f"{value:.4g}") for value in kl.tolist()],
    }

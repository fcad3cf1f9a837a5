"""Attention over distance: the mean logit of a head, and the series that its centroids predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpage.plot.style import BLUE, ORANGE, count_of, drawn, new_figure, rule
from kvpage.rope import Rope


class DistanceCurves(NamedTuple):
    """Mean attention logits of heads by distance, `[..., distances]` float64 on the CPU.

    measured: over all pairs of a query and the key `distance` tokens before it; predicted: by the
    mean query and the mean key; distances: int64, ascending from 1, in tokens.
    """

    measured: Tensor
    predicted: Tensor
    distances: Tensor

    @property
    def correlation(self) -> Tensor:
        """Pearson's between both over the distances, `[...]`; NaN where one is constant."""
        pair = torch.stack((self.measured, self.predicted))
        pair = pair - pair.mean(dim=-1, keepdim=True)
        return pair.prod(dim=0).sum(dim=-1) / pair.norm(dim=-1).prod(dim=0)

    def head(self, index: int) -> DistanceCurves:
        """Those of one head of `[H, distances]`."""
        return self._replace(measured=self.measured[index], predicted=self.predicted[index])


def logits_by_distance(
    queries: Tensor, keys: Tensor, rope: Rope, scale: float = 1.0, points: int = 64
) -> DistanceCurves:
    """What a head's logits are on the mean at each distance, and what its centroids say.

    With bands `q_f`, `k_f` before RoPE (design: `z_f = x[f] + i x[f + F]`) and their means over the
    text, TriAttention's series (arXiv 2604.04921) in the distance `d`:

        predicted(d) = scale Re sum_f mean(q_f) conj(mean(k_f)) exp(i w_f d)
        measured(d)  = scale Re sum_f mean over t of q_f[t] conj(k_f[t - d]) exp(i w_f d)

    The means of products are a cross-correlation, taken by FFT. queries, keys: before RoPE,
    `[..., T, D]` of consecutive tokens; scale: of the logits; points: how many distances, evenly on
    a log scale, from 1 to two thirds of the text, so that each is the mean of many pairs.

    Raises `ValueError` for shapes that differ or are not of `rope`, fewer than 3 tokens or fewer
    than 2 points.
    """
    if queries.shape != keys.shape or queries.ndim < 2:
        raise ValueError(
            f"keys: the shape of queries {list(queries.shape)} expected, [..., T, D], got "
            f"{list(keys.shape)}"
        )
    if queries.shape[-1] < 2 * rope.bands:
        raise ValueError(
            f"queries: head_dim of at least {2 * rope.bands}, as rotated, expected, got "
            f"{queries.shape[-1]}"
        )
    tokens = queries.shape[-2]
    if tokens < 3 or points < 2:
        raise ValueError(f"queries, points: 3 tokens and 2 points expected, got {tokens}, {points}")
    distances = torch.logspace(0, np.log10(2 * tokens / 3), points, dtype=torch.float64)
    distances = distances.round().long().unique()
    query, key = _complex(queries, rope), _complex(keys, rope)  # [..., T, F]
    freq = rope.inv_freq.cpu().double()
    rest = query.shape[-1] - freq.shape[0]
    freq = torch.cat((freq, freq.new_zeros(rest)))
    factor = torch.full_like(freq, scale)
    factor[: rope.bands] *= rope.attention_scaling**2
    turn = torch.polar(factor.expand(len(distances), -1), distances[:, None] * freq)
    spectrum = torch.fft.fft(query, n=2 * tokens, dim=-2)
    spectrum *= torch.fft.fft(key, n=2 * tokens, dim=-2).conj()
    products = torch.fft.ifft(spectrum, dim=-2)[..., distances, :]
    products /= (tokens - distances)[:, None]
    means = query.mean(dim=-2, keepdim=True) * key.mean(dim=-2, keepdim=True).conj()
    return DistanceCurves(
        (products * turn).real.sum(dim=-1), (means * turn).real.sum(dim=-1), distances
    )


def _complex(vectors: Tensor, rope: Rope) -> Tensor:
    """complex128 `[..., F + D - 2 F]`: the bands, and what is not rotated as real numbers."""
    real, imaginary, rest = rope.parts(vectors.detach().cpu().double())
    return torch.cat((torch.complex(real, imaginary), torch.complex(rest, rest * 0)), dim=-1)


@drawn
def attention_over_distance(curves: Mapping[str, DistanceCurves]) -> Figure:
    """Measured and predicted mean logits over distance, a panel beside the other for each head.

    curves: of one head each, by the name that its panel gets; their correlation stands beside it.
    Raises `ValueError` for none, or curves of several heads.
    """
    if not curves or any(each.measured.ndim != 1 for each in curves.values()):
        raise ValueError("curves: those of one head each, by name, expected")
    figure = new_figure(1.0 + 4.8 * len(curves), 3.7)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (name, each) in zip(panels, curves.items(), strict=True):
        axes.semilogx(each.distances, each.measured, color=BLUE, linewidth=1.8, label="measured")
        axes.semilogx(
            each.distances, each.predicted, color=ORANGE, linewidth=1.8, linestyle=(0, (4, 2)),
            label="predicted by the centroids",
        )  # fmt: skip
        axes.set_title(f"{name}: r = {float(each.correlation):.2f}", parse_math=False)
        axes.set_xlabel("distance to the key, in tokens")
        axes.xaxis.set_major_formatter(lambda value, _: count_of(value))
        rule(axes)
    panels[0].set_ylabel("mean attention logit")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure

"""Rotary position embedding (RoPE) as a value: frequencies, pairing, and how it acts on a vector.

Band `f` of a vector `x` is the complex number `x[f] + i x[f + F]` in the half layout and
`x[2 f] + i x[2 f + 1]` in the interleaved one. Dimensions from `2 F` on are not rotated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rope:
    """The rotation a layer applies to its queries and keys.

    inv_freq: float64 `[F]` on the CPU, radians per token, the model's own; empty without RoPE.
    """

    inv_freq: Tensor
    attention_scaling: float = 1.0
    interleaved: bool = False
    _means: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def mean_rotation(
        self, offsets: tuple[int, ...], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """`inv_freq` and the mean over `offsets` of `exp(i inv_freq offset)`, complex128 `[F]`; on
        `device`, worked out once."""
        if (offsets, device) not in self._means:
            phases = self.inv_freq[:, None] * torch.tensor(offsets, dtype=torch.float64)
            mean = torch.polar(torch.ones_like(phases), phases).mean(dim=1)
            self._means[offsets, device] = self.inv_freq.to(device), mean.to(device)
        return self._means[offsets, device]

    @property
    def bands(self) -> int:
        return self.inv_freq.shape[0]

    def parts(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Real and imaginary parts `[..., F]` of the bands of `vectors` `[..., D]`, and the rest
        `[..., D - 2 F]`."""
        bands = self.bands
        rest = vectors[..., 2 * bands :]
        if self.interleaved:
            return vectors[..., 0 : 2 * bands : 2], vectors[..., 1 : 2 * bands : 2], rest
        return vectors[..., :bands], vectors[..., bands : 2 * bands], rest

    def joined(self, real: Tensor, imaginary: Tensor, rest: Tensor) -> Tensor:
        """The vectors `[..., D]` whose `parts` these are."""
        if not self.interleaved:
            return torch.cat((real, imaginary, rest), dim=-1)
        pairs = torch.stack((real, imaginary), dim=-1).flatten(-2)
        return torch.cat((pairs, rest), dim=-1)

    def magnitude(self, vectors: Tensor) -> Tensor:
        """Magnitude `[..., F]` of each band of `vectors` `[..., D]`."""
        real, imaginary, _ = self.parts(vectors)
        return torch.hypot(real, imaginary)

    def turned(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`vectors` `[..., D]` with each band turned by the angle of `cos` and `sin` `[..., F]`."""
        real, imaginary, rest = self.parts(vectors)
        return self.joined(real * cos - imaginary * sin, real * sin + imaginary * cos, rest)

    def rotated(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """`vectors` `[B, H, n, D]` as the model caches them at `positions` `[B, n]`, float64."""
        angle = positions.cpu().double()[:, None, :, None] * self.inv_freq
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return self.turned(vectors.cpu().double(), cos, sin)

    def check(self, before: Tensor, after: Tensor, positions: Tensor) -> None:
        """Raise `ValueError` unless this rotation takes the keys `before` to `after`.

        before, after: `[B, Hkv, n, D]`, ahead of RoPE and as cached; positions: int64 `[B, n]`.
        Wrong frequencies, pairing, scaling or number of rotated dimensions all show, and so does
        a key that was changed between the module it was captured at and the cache.
        """
        if before.shape != after.shape:
            raise ValueError(
                f"key: {list(after.shape)} expected as in the cache, {list(before.shape)} captured "
                "ahead of RoPE"
            )
        if after.shape[-1] < 2 * self.bands:
            raise ValueError(
                f"head_dim: at least {2 * self.bands} rotated dimensions expected, got "
                f"{after.shape[-1]}"
            )
        before, after = before.detach(), after.detach()
        expected, got = self.rotated(before, positions), after.cpu().double()
        error = self._relative_error(before, got - expected)
        # The model's float32 angles are off by about 1e-7 of themselves; cos, sin, products and
        # their sum are rounded in the dtype. Elements add up at random, so their mean says more.
        eps = torch.finfo(after.dtype).eps
        angles = float(positions.max()) * self.inv_freq
        error = (error - 1e-4 - 2e-7 * self._per_element(angles, error)).clamp_min(0)
        mean = float(error.square().mean().sqrt())
        worst, most = float(error.max()) / 6, eps * (1 + 2 / error.numel() ** 0.5)
        if not max(mean, worst) <= most:
            raise ValueError(
                f"rotary embedding: the model's keys differ from ours by {max(mean, worst):.3g} of "
                f"themselves (at most {most:.3g} expected)"
            )

    def _relative_error(self, vectors: Tensor, error: Tensor) -> Tensor:
        """Magnitude of `error` in each band, and each dimension that is not rotated, over that of
        `vectors`."""
        sizes = []
        for values in (error, vectors.cpu().double()):
            real, imaginary, rest = self.parts(values)
            sizes.append(torch.cat((torch.hypot(real, imaginary), rest.abs()), dim=-1))
        tiny = torch.finfo(vectors.dtype).tiny / torch.finfo(vectors.dtype).eps
        return sizes[0] / (sizes[1] * self.attention_scaling + tiny)

    def _per_element(self, bands: Tensor, like: Tensor) -> Tensor:
        """`bands` `[F]` with a zero for each dimension that is not rotated."""
        return torch.nn.functional.pad(bands, (0, like.shape[-1] - bands.shape[0]))


class RopeSource:
    """Reads the `Rope` of a layer from its model, which it does not keep alive."""

    def __init__(self, read: Callable[[nn.Module], Rope], module: nn.Module, fixed: bool) -> None:
        """fixed: the frequencies never change, and are read now."""
        self._read, self._module = read, weakref.ref(module)
        self._fixed = read(module) if fixed else None
        self.kind: object = self
        """Equal where two layers rotate alike."""
        if self._fixed is not None:
            rope = self._fixed
            self.kind = tuple(rope.inv_freq.tolist()), rope.attention_scaling, rope.interleaved

    @property
    def fixed(self) -> bool:
        """Whether the frequencies never change."""
        return self._fixed is not None

    def __call__(self) -> Rope:
        if self._fixed is not None:
            return self._fixed
        module = self._module()
        if module is None:
            raise RuntimeError("the model of this cache is gone")
        return self._read(module)

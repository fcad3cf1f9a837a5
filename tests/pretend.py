"""Several devices, simulated: CPU tensors that carry a device's name, and may not be mixed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU, CUDA_0, CUDA_1 = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


class Pretend(TorchFunctionMode):
    """Within it, tensors are where they say, and mixing devices raises as on real ones.

    A zero-dimensional CPU tensor goes with any, CPU indices too, and `copy_` copies across. Values
    are real, and so is all Python code that runs within: only kernels, streams and transfers of a
    device are not. (`FakeTensorMode` needs a CUDA build to index a fake CUDA tensor.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[Tensor] = []
        """Tensors that `to` or `cpu` copied between devices."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return place_of(args[0])
        if func in (Tensor.to, Tensor.cpu):
            return self._move(func, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if kwargs.get("device") is not None:
            place = torch.device(kwargs["device"])
            kwargs["device"] = really(place)
        else:
            place = common_place(func.__name__, tensors)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not any(leaf is tensor for tensor in tensors):
                leaf.place = place
        return out

    def _move(self, func, tensor, *args, **kwargs):
        place = CPU if func is Tensor.cpu else place_of(tensor)
        for target in (*args, kwargs.get("device")):
            if isinstance(target, Tensor | torch.device | str):
                place = place_of(target) if isinstance(target, Tensor) else torch.device(target)
        args = [really(place) if isinstance(a, torch.device | str) else a for a in args]
        kwargs |= {"device": really(place)} if kwargs.get("device") is not None else {}
        out = func(tensor, *args, **kwargs)
        if place != place_of(tensor):
            self.moved.append(tensor)
            out = out.clone() if out is tensor else out
        if out is not tensor:
            if isinstance(tensor, nn.Parameter):
                out = nn.Parameter(out.detach(), tensor.requires_grad)
            out.place = place
        return out


def really(place):
    return place if place.type == "meta" else CPU


def place_of(tensor):
    return getattr(tensor, "place", tensor.device)


def common_place(name, tensors):
    if not tensors or name == "copy_":
        return place_of(tensors[0]) if tensors else CPU
    places = {place_of(tensor) for tensor in tensors if tensor.ndim} or {place_of(tensors[0])}
    if name in ("__getitem__", "__setitem__") and place_of(tensors[0]) != CPU:
        places.discard(CPU)
    if len(places) > 1:
        raise RuntimeError(f"{name}: all tensors on the same device expected, got {places}")
    return places.pop()

"""Linear layers whose weights lie in memory as oneDNN wants them.

Owns: `PackedLinear`, the packing of a model's linear layers, and the finding of those that share an input.
Knows nothing about: attention, batches, which model it is.
Invariants: the product is the same up to rounding. With the few rows of a decode step the plain layer reads its
weights far below the speed that memory allows, since it spreads badly over threads; a packed one comes close to it
(two threads, 1536 x 576: one row 0.20 ms against 0.39, 8 rows 0.31 against 0.68, 32 rows 0.61 against 1.13).
Layers that multiply the same tensor (query, key and value; gate and up) become one product: fewer, larger reads (30
layers of SmolLM2: one row 37 ms against 43, 8 rows 44 against 54). Whoever is called first computes it for all.
Several threads may run a packed model: at worst a product is computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROWS_HINT = 32
"""Number of rows the memory layout is chosen for; it serves 1 to some hundred about equally well."""


class _Product:
    """The weights of some layers as one: `[..., in_features] -> [..., all their out_features]`.

    A product is kept, with the tensor that it was made of, until its last columns are asked for. It serves that very
    tensor, not an equal one.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.num_columns = sum(linear.out_features for linear in linears)
        weights = torch.cat([linear.weight.detach() for linear in linears])
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights, _ROWS_HINT)
        self._bias: Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            self._bias = torch.cat(
                [torch.zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
            )
        self._kept: tuple[Tensor, Tensor] | None = None

    def weight(self, first: int, last: int) -> Tensor:
        dense: Tensor = self._packed.to_dense()
        return dense[first:last]

    def columns(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """[..., last - first]: these columns of the product with `hidden`."""
        kept = self._kept  # read once: another thread may put its own there at any time
        if kept is not None and kept[0] is hidden:
            output = kept[1]
        else:
            output = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self._bias, "none", [], "")
            self._kept = (hidden, output)
        if last == self.num_columns:
            self._kept = None
        return output[..., first:last]


class PackedLinear(nn.Module):
    """A frozen float32 linear layer on the CPU: columns [first, first + out_features) of a product, by default one of
    its own. `[..., in_features] -> [..., out_features]`."""

    def __init__(self, linear: nn.Linear, product: _Product | None = None, first: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._product = product or _Product([linear])
        self._first, self._last = first, first + linear.out_features

    @property
    def weight(self) -> Tensor:
        """The plain weights, made anew at each call: [out_features, in_features], bit for bit."""
        return self._product.weight(self._first, self._last)

    def forward(self, hidden: Tensor) -> Tensor:
        """The product, as `nn.Linear` has it."""
        return self._product.columns(hidden, self._first, self._last)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights for this device and dtype."""
    mkldnn: Any = torch.backends.mkldnn
    operators = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return operators and mkldnn.is_available() and device.type == "cpu" and dtype == torch.float32


def _plain_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of every plain `nn.Linear`."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


@contextmanager
def watching_inputs(model: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """Within it, the model's forward passes fill the list: linear layers of one parent that were called one after
    the other with the very same tensor."""
    groups: list[list[nn.Linear]] = []
    last: list[Any] = [None, None]

    def watch(parent: nn.Module) -> Any:
        def hook(linear: Any, inputs: tuple[Tensor, ...]) -> None:
            if last[0] is parent and last[1] is inputs[0] and linear not in groups[-1]:
                groups[-1].append(linear)
            else:
                groups.append([linear])
            last[:] = parent, inputs[0]

        return hook

    hooks = [linear.register_forward_pre_hook(watch(parent)) for parent, _, linear in _plain_linears(model)]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()


def pack_linears(model: nn.Module, groups: Sequence[Sequence[nn.Linear]] = ()) -> None:
    """Replace every plain `nn.Linear` of a model by a packed one. groups: layers that share an input; those of a
    group become one product if each stands in no other group."""
    times = Counter(linear for group in groups for linear in group)
    places: dict[nn.Linear, tuple[_Product, int]] = {}
    for group in groups:
        if len(group) > 1 and all(times[linear] == 1 for linear in group):
            product, first = _Product(group), 0
            for linear in group:
                places[linear] = product, first
                first += linear.out_features
    for parent, name, linear in _plain_linears(model):
        setattr(parent, name, PackedLinear(linear, *places.get(linear, ())))

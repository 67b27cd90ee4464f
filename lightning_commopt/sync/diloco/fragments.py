"""Fragments: the parts of a model that are exchanged in turn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Sequential

from lightning_commopt.compressors import Layout
from lightning_commopt.compressors.base import as_real
from lightning_commopt.plan import OptionError


@dataclass(frozen=True, eq=False)
class Buffer:
    """A buffer of a module.

    Attributes:
        owner: the module.
        name: name of the buffer in the module.
        first: the tensor when the fit began.
        shape: its shape at that time, since a forward may resize the tensor in place.
    """

    owner: Module
    name: str
    first: Tensor
    shape: torch.Size

    @property
    def tensor(self) -> Tensor:
        """The module's present tensor, since the module may replace a buffer by another tensor.

        All ranks must send the same shapes. Therefore a tensor of another shape or dtype, such as a cache that grows,
        is not exchanged: ``first`` is returned in its place, or zeros if ``first`` was resized in place.
        """
        tensor = dict(self.owner.named_buffers(recurse=False)).get(self.name, self.first)
        if (tensor.shape, tensor.dtype) != (self.shape, self.first.dtype):
            return self.first if self.first.shape == self.shape else self.first.new_zeros(self.shape)
        return tensor if torch.is_inference_mode_enabled() else ensure_normal_buffer(self.owner, self.name, tensor)


def ensure_normal_buffer(owner: Module, name: str, tensor: Tensor) -> Tensor:
    """Returns a buffer; one from inference mode is first replaced by a copy, which can be changed outside of it."""
    if tensor.is_inference():
        tensor = tensor.clone()
        setattr(owner, name, tensor)
    return tensor


@dataclass(frozen=True, eq=False)
class Fragment:
    """Parameters that are exchanged together, with the buffers of their modules.

    Attributes:
        parameters: trainable parameters by name; a parameter that modules share is there only once.
        float_buffers: floating-point buffers by name; all workers get their mean.
        other_buffers: all other buffers by name; all workers get those of the first worker.
    """

    parameters: dict[str, Tensor]
    float_buffers: dict[str, Buffer] = field(default_factory=dict)
    other_buffers: dict[str, Buffer] = field(default_factory=dict)

    @property
    def floats(self) -> dict[str, Tensor]:
        """The tensors of ``float_buffers`` at present."""
        return {name: buffer.tensor for name, buffer in self.float_buffers.items()}

    @property
    def integers(self) -> dict[str, Tensor]:
        """The tensors of ``other_buffers`` at present."""
        return {name: buffer.tensor for name, buffer in self.other_buffers.items()}

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {**self.float_buffers, **self.other_buffers}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which differences are computed and sent: float64 if a parameter has it, otherwise float32."""
        wide = any(as_real(x).dtype == torch.float64 for x in self.parameters.values())
        return torch.float64 if wide else torch.float32

    @cached_property
    def layout(self) -> Layout:
        """The layout of all parameters in one flat tensor ``(n,)``."""
        return Layout.of([*self.parameters.values()], self.dtype)

    def new_flat(self) -> Tensor:
        """Returns uninitialized host memory ``(n,)``, pinned if the model is on CUDA, so that copies can overlap."""
        is_cuda = any(x.is_cuda for x in self.parameters.values())
        return torch.empty(self.layout.numel, dtype=self.dtype, device="cpu", pin_memory=is_cuda)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a view of ``flat`` ``(n,)`` for each parameter, in the shape of `real_parameters`."""
        return self.layout.split(flat)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns `views` by the names of the parameters."""
        return dict(zip(self.parameters, self.views(flat), strict=True))

    def tensors(self) -> list[Tensor]:
        """Returns everything that is exchanged: `real_parameters`, then the buffers."""
        return [*self.real_parameters(), *self.floats.values(), *self.integers.values()]

    def real_parameters(self) -> list[Tensor]:
        """Returns the parameters, complex ones viewed as pairs of real numbers."""
        return [as_real(x.detach()) for x in self.parameters.values()]


def split_model(
    module: Module, number: int, by: str, trained: Collection[str] = (), buffers: Mapping[str, Buffer] | None = None
) -> tuple[Fragment, ...]:
    """Divides the trainable parameters of a model into fragments, in the same way on all ranks.

    Args:
        module: the model. Only parameters that require a gradient or are in ``trained`` are included.
        number: number of fragments.
        by: "blocks" or "bytes"; see `DiLoCoPlan`.
        trained: names of parameters that were trained before, and may be frozen now.
        buffers: buffers of an earlier division of the model, by name.

    Raises:
        OptionError: the model has fewer blocks or parameters than fragments.
    """
    parameters = {name: x for name, x in module.named_parameters() if x.requires_grad or name in trained}
    if not parameters:
        raise OptionError("DiLoCo has nothing to exchange: no parameter of the model requires a gradient")
    groups = _blocks(module, parameters) if by == "blocks" and number > 1 else [[name] for name in parameters]
    if number > len(groups):
        kind = "blocks" if by == "blocks" else "trainable parameters"
        hint = ", or fragment_by='bytes'" if by == "blocks" and number <= len(parameters) else ""
        raise OptionError(
            f"fragments={number} is too many: the model has {len(groups)} {kind}, so use at most"
            f" fragments={len(groups)}{hint}"
        )
    parts = (
        _distribute_groups(groups, number, parameters)
        if by == "blocks"
        else _balance(groups, [[] for _ in range(number)], parameters)
    )
    order = {name: position for position, name in enumerate(parameters)}
    parts = [sorted(names, key=order.__getitem__) for names in parts]
    return _add_buffers(module, [{name: parameters[name] for name in names} for names in parts], buffers or {})


def _blocks(module: Module, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of parameters, grouped by block: first the repeated modules in order, then all others."""
    containers = [
        name for name, part in module.named_modules() if isinstance(part, ModuleList | Sequential) and len(part) > 1
    ]
    sizes = {name: sum(x.numel() for key, x in parameters.items() if _is_in(key, name)) for name in containers}
    # If nested containers have the same parameters, the innermost one has the repeated blocks.
    container = max(sizes, key=lambda name: (sizes[name], name.count(".")), default=None)
    blocks: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for name in parameters:
        if container is not None and _is_in(name, container):
            rest = name[len(container) + 1 :] if container else name
            blocks.setdefault(rest.partition(".")[0], []).append(name)
        else:
            others.setdefault(name.rpartition(".")[0], []).append(name)
    return [*blocks.values(), *others.values()]


def _is_in(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _distribute_groups(groups: Sequence[list[str]], number: int, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Deals out groups of the most frequent size to ``number`` fragments in turn, and balances the other groups."""
    sizes = [sum(parameters[name].numel() for name in group) for group in groups]
    usual = max(set(sizes), key=lambda size: (sizes.count(size), size))
    repeated = [group for group, size in zip(groups, sizes, strict=True) if size == usual]
    parts: list[list[str]] = [[] for _ in range(number)]
    for position, group in enumerate(repeated):
        parts[position % number] += group
    return _balance([group for group, size in zip(groups, sizes, strict=True) if size != usual], parts, parameters)


def _balance(groups: Iterable[list[str]], parts: list[list[str]], parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Adds each group, the largest first, to the part with the fewest elements."""

    def numel(names: Sequence[str]) -> int:
        return sum(parameters[name].numel() for name in names)

    for group in sorted(groups, key=numel, reverse=True):
        min(parts, key=numel).extend(group)
    return parts


def _add_buffers(
    module: Module, parts: Sequence[dict[str, Tensor]], earlier: Mapping[str, Buffer]
) -> tuple[Fragment, ...]:
    """Returns fragments that also have the buffers: with a parameter of the same module, or else in the first one."""
    fragments = tuple(Fragment(parameters) for parameters in parts)
    owners = {name.rpartition(".")[0]: fragment for fragment in reversed(fragments) for name in fragment.parameters}
    for name, tensor in module.named_buffers():
        owner, _, own_name = name.rpartition(".")
        part, buffer = module.get_submodule(owner), earlier.get(name)
        if buffer is None or buffer.owner is not part:
            buffer = Buffer(part, own_name, tensor, tensor.shape)
        fragment = owners.get(owner, fragments[0])
        (fragment.float_buffers if buffer.first.is_floating_point() else fragment.other_buffers)[name] = buffer
    return fragments

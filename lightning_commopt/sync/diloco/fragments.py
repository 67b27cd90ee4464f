"""Fragments: the parts of a model that are exchanged in turns."""

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
        name: its name there.
        first: what it was when the fit began.
        shape: its shape then, as a forward may resize it in place.
    """

    owner: Module
    name: str
    first: Tensor
    shape: torch.Size

    @property
    def tensor(self) -> Tensor:
        """What the module has by now, as it may replace a buffer by another tensor.

        One of another shape, such as a cache that grows, is left to each rank, and ``first`` stands in for it, or zeros
        if it was resized in place: ranks must send the same shapes.
        """
        now = dict(self.owner.named_buffers(recurse=False)).get(self.name, self.first)
        if (now.shape, now.dtype) != (self.shape, self.first.dtype):
            return self.first if self.first.shape == self.shape else self.first.new_zeros(self.shape)
        return now if torch.is_inference_mode_enabled() else ordinary_buffer(self.owner, self.name, now)


def ordinary_buffer(owner: Module, name: str, tensor: Tensor) -> Tensor:
    """Returns a buffer; if it was made in inference mode, a copy takes its place that can be changed elsewhere."""
    if tensor.is_inference():
        tensor = tensor.clone()
        setattr(owner, name, tensor)
    return tensor


@dataclass(frozen=True, eq=False)
class Fragment:
    """Parameters that are exchanged together, with the buffers of their modules.

    Attributes:
        parameters: the trainable parameters by their names, each only once if modules share it.
        float_buffers: floating-point buffers, whose mean the workers get, by their names.
        other_buffers: all other buffers, which the workers get from the first of them.
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
        """What differences are computed and sent in: float64 if a parameter has it, otherwise float32."""
        wide = any(as_real(x).dtype == torch.float64 for x in self.parameters.values())
        return torch.float64 if wide else torch.float32

    @cached_property
    def layout(self) -> Layout:
        """The layout of all parameters in one flat tensor ``(n,)``."""
        return Layout.of([*self.parameters.values()], self.dtype)

    def new_flat(self) -> Tensor:
        """Returns uninitialized memory ``(n,)`` on the host, from which CUDA can copy while the host goes on."""
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
        """Returns the parameters, complex ones as pairs of real numbers, which share their memory."""
        return [as_real(x.detach()) for x in self.parameters.values()]


def split_model(
    module: Module, number: int, by: str, trained: Collection[str] = (), buffers: Mapping[str, Buffer] | None = None
) -> tuple[Fragment, ...]:
    """Divides what a model trains into fragments, in the same way on all ranks.

    Args:
        module: the model. Other parameters than those that require a gradient or are ``trained`` are left out.
        number: number of fragments.
        by: "blocks" or "bytes"; see `DiLoCoPlan`.
        trained: names of parameters that were trained before, and may be frozen.
        buffers: those of an earlier division of the model by their names.

    Raises:
        OptionError: the model has fewer blocks or parameters than fragments.
    """
    parameters = {name: x for name, x in module.named_parameters() if x.requires_grad or name in trained}
    if not parameters:
        raise OptionError("DiLoCo has nothing to exchange: no parameter of the model requires a gradient")
    groups = _blocks(module, parameters) if by == "blocks" and number > 1 else [[name] for name in parameters]
    if number > len(groups):
        what = "blocks" if by == "blocks" else "trainable parameters"
        hint = ", or fragment_by='bytes'" if by == "blocks" and number <= len(parameters) else ""
        raise OptionError(
            f"fragments={number} do not fit: the model has {len(groups)} {what}; use at most"
            f" fragments={len(groups)}{hint}"
        )
    parts = (
        _stride(groups, number, parameters)
        if by == "blocks"
        else _balance(groups, [[] for _ in range(number)], parameters)
    )
    order = {name: position for position, name in enumerate(parameters)}
    parts = [sorted(names, key=order.__getitem__) for names in parts]
    return _with_buffers(module, [{name: parameters[name] for name in names} for names in parts], buffers or {})


def _blocks(module: Module, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of parameters by block: repeated modules first, in their order, then all other modules."""
    containers = [
        name for name, part in module.named_modules() if isinstance(part, ModuleList | Sequential) and len(part) > 1
    ]
    sizes = {name: sum(x.numel() for key, x in parameters.items() if _is_in(key, name)) for name in containers}
    # Of nested containers with the same parameters the innermost has the repeated blocks.
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


def _stride(groups: Sequence[list[str]], number: int, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Gives every ``number``-th of the groups of the usual size to the same fragment, and balances the others."""
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


def _with_buffers(
    module: Module, parts: Sequence[dict[str, Tensor]], known: Mapping[str, Buffer]
) -> tuple[Fragment, ...]:
    """Returns the fragments, with each buffer in the one that has parameters of its module, or else in the first."""
    fragments = tuple(Fragment(parameters) for parameters in parts)
    owners = {name.rpartition(".")[0]: fragment for fragment in reversed(fragments) for name in fragment.parameters}
    for name, tensor in module.named_buffers():
        owner, _, own_name = name.rpartition(".")
        part, buffer = module.get_submodule(owner), known.get(name)
        if buffer is None or buffer.owner is not part:
            buffer = Buffer(part, own_name, tensor, tensor.shape)
        fragment = owners.get(owner, fragments[0])
        (fragment.float_buffers if buffer.first.is_floating_point() else fragment.other_buffers)[name] = buffer
    return fragments

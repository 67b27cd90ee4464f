"""The parameters that are in no fragment, because they were frozen or did not exist when the model was divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_commopt.compressors.base import as_real

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LeftOut:
    """The parameters that are in no fragment. Hooks may change them, such as those of a teacher model.

    Args:
        parameters: all parameters of the model, with their names.
        known: parameters that are in fragments.
        earlier: the object that this one replaces, whose records continue; None at the beginning of a fit.

    Attributes:
        parameters: the parameters that are in no fragment, by name.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], known: Iterable[Tensor], earlier: LeftOut | None = None
    ) -> None:
        ids = {id(x) for x in known}
        self.parameters = {name: x for name, x in parameters if id(x) not in ids}
        self._trained: set[str] = set() if earlier is None else earlier._trained
        self._sums: dict[str, int] = {} if earlier is None else dict(earlier._sums)
        for name, x in self.parameters.items():
            if name not in self._sums:
                self._sums[name] = _sum(x)

    def note_training(self) -> None:
        """Records which parameters require a gradient in this step, since they may be frozen between batches."""
        self._trained.update(name for name, x in self.parameters.items() if x.requires_grad)

    def unfrozen(self) -> dict[str, Tensor]:
        """Returns the parameters that require a gradient now, or did so in a step."""
        return {name: x for name, x in self.parameters.items() if x.requires_grad or name in self._trained}

    def moved(self) -> dict[str, Tensor]:
        """Returns the parameters that have changed on this rank since the fit began."""
        return {name: x.detach() for name, x in self.parameters.items() if _sum(x) != self._sums[name]}

    @torch.no_grad()
    def restore(self, moved: Mapping[str, Tensor]) -> None:
        """Sets the parameters that `moved` has returned."""
        for name, value in moved.items():
            if name in self.parameters:
                self.parameters[name].copy_(value)


def _sum(x: Tensor) -> int:
    """Returns the sum of a tensor's bits as integers, a checksum that is as fast as the memory."""
    flat = as_real(x.detach()).reshape(-1)
    return int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))

"""ShowsWeights: which weights a model has, this worker's own or others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import as_real
from lightning_commopt.sync.diloco.exchange import Exchange, GlobalWeights


class ShowsWeights:
    """The part of `Rounds` that puts other weights into the model in place of this worker's own, and those back.

    Attributes:
        fragments: the global weights.
        set_at_end: the weights that a callback has given the model at the end of a fit, also of the one that this fit
            was resumed from, until it trains; None without such a callback.
    """

    exchange: Exchange
    fragments: list[GlobalWeights]
    set_at_end: list[GlobalWeights] | None = None
    _own: list[list[Tensor]] | None = None  # this worker's weights while the model has others
    _final_weights: list[GlobalWeights] | None = None

    @property
    def shows_own(self) -> bool:
        """Whether the model has this worker's weights."""
        return self._own is None

    @property
    def shows_final(self) -> bool:
        """Whether the model has the weights of the end of a fit."""
        return self._final_weights is not None

    def has_final(self, module: Module) -> bool:
        """Returns whether a module has the parameters of the end of the fit; a validation may move buffers."""
        parameters = {name: as_real(x.detach()) for name, x in module.named_parameters()}
        values = {name: x for of in self._final_weights or () for name, x in of.fragment.by_name(of.weights).items()}
        return all(
            name in parameters and torch.equal(parameters[name].cpu(), value.to(parameters[name].dtype))
            for name, value in values.items()
        )

    def own_weights(self) -> list[list[Tensor]]:
        """Returns this worker's weights and buffers of each fragment, whatever the model shows."""
        return [of.fragment.tensors() for of in self.fragments] if self._own is None else self._own

    def show_global(self) -> None:
        """Puts the global weights of the last exchanges into the model until `show_own`."""
        self._show(self.fragments)

    def _show(self, weights: list[GlobalWeights]) -> None:
        if self._own is None:
            self._own = [[x.detach().clone() for x in tensors] for tensors in self.own_weights()]
        for of in weights:
            foreach_copy_(of.fragment.tensors(), of.tensors())

    def show_own(self) -> None:
        """Puts this worker's own weights back, if the model has others."""
        own, self._own, self._final_weights = self._own, None, None
        for of, tensors in zip(self.fragments, own or (), strict=False):
            foreach_copy_(of.fragment.tensors(), tensors)

    def to_host(self) -> None:
        """Moves this worker's own weights, while the model has others, to the host's memory."""
        self._own = [[x.cpu() for x in tensors] for tensors in self._own or ()]

    def differs_from(self, weights: list[GlobalWeights]) -> bool:
        """Returns whether the model has other values on any rank. All ranks must call it."""
        pairs = [pair for of in weights for pair in zip(of.fragment.tensors(), of.tensors(), strict=True)]
        return self.exchange.any_rank(not all(torch.equal(x.cpu(), value.to(x.dtype)) for x, value in pairs))

    def has_other_weights(self) -> bool:
        """Returns whether parameters of the model differ from the global ones; a forward may have moved buffers."""
        return any(
            not torch.equal(x.cpu(), value.to(x.dtype))
            for of in self.fragments
            for x, value in zip(of.fragment.real_parameters(), of.fragment.views(of.weights), strict=True)
        )

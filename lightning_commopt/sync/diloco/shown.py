"""ShowsWeights: swaps the weights in a model between this worker's own, the global ones and the final ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import as_real
from lightning_commopt.sync.diloco.exchange import Exchange, GlobalWeights


class ShowsWeights:
    """The part of `Rounds` that puts other weights into the model in place of this worker's own, and puts these back.

    Attributes:
        fragments: the global state of each fragment.
        set_at_end: weights that a callback has set in the model at the end of a fit; after resuming from its checkpoint
            they stay until the first training step. None without such a callback.
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
        """Whether the model has the final weights of a fit."""
        return self._final_weights is not None

    def has_final(self, module: Module) -> bool:
        """Returns whether a module has the fit's final parameters. Buffers may differ after a validation."""
        parameters = {name: as_real(x.detach()) for name, x in module.named_parameters()}
        values = {
            name: x
            for global_state in self._final_weights or ()
            for name, x in global_state.fragment.by_name(global_state.weights).items()
        }
        return all(
            name in parameters and torch.equal(parameters[name].cpu(), value.to(parameters[name].dtype))
            for name, value in values.items()
        )

    def own_weights(self) -> list[list[Tensor]]:
        """Returns this worker's own weights and buffers of each fragment, whichever weights the model has."""
        return [global_state.fragment.tensors() for global_state in self.fragments] if self._own is None else self._own

    def show_global(self) -> None:
        """Puts the global weights of the last exchanges into the model until `show_own`."""
        self._show(self.fragments)

    def _show(self, weights: list[GlobalWeights]) -> None:
        if self._own is None:
            self._own = [[x.detach().clone() for x in tensors] for tensors in self.own_weights()]
        for global_state in weights:
            foreach_copy_(global_state.fragment.tensors(), global_state.tensors())

    def show_own(self) -> None:
        """Puts this worker's own weights back, if the model has others."""
        own, self._own, self._final_weights = self._own, None, None
        for global_state, tensors in zip(self.fragments, own or (), strict=False):
            foreach_copy_(global_state.fragment.tensors(), tensors)

    def to_host(self) -> None:
        """Moves this worker's own weights, which the model does not have now, to the host's memory."""
        self._own = [[x.cpu() for x in tensors] for tensors in self._own or ()]

    def differs_from(self, weights: list[GlobalWeights]) -> bool:
        """Returns whether the model has other values than ``weights`` on any rank. All ranks must call it."""
        pairs = [
            pair
            for global_state in weights
            for pair in zip(global_state.fragment.tensors(), global_state.tensors(), strict=True)
        ]
        return self.exchange.any_rank(not all(torch.equal(x.cpu(), value.to(x.dtype)) for x, value in pairs))

    def has_other_weights(self) -> bool:
        """Returns whether the model's parameters differ from the global ones. Buffers are not compared.

        A forward may have changed these.
        """
        return any(
            not torch.equal(x.cpu(), value.to(x.dtype))
            for global_state in self.fragments
            for x, value in zip(
                global_state.fragment.real_parameters(), global_state.fragment.views(global_state.weights), strict=True
            )
        )

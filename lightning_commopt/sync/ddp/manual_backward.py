"""Detects manual optimization whose backwards DDP never sees, in which case each rank trains weights of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.torch import add_step_hook
from lightning_commopt.sync.ddp.buckets import synced_parameters
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class ManualBackwardCheck:
    """Warns once if an optimizer steps on gradients although no backward of the fit could be synchronized.

    Under manual optimization Lightning keeps DDP's forward from preparing the reducer; ``self.manual_backward(loss)``
    prepares it, and ``loss.backward()`` does not. The check ends as soon as one backward is known to be prepared, even
    within ``no_sync``, or when the program calls the wrapper itself. It sends nothing and waits for nothing.

    Nothing is checked if ``model`` is not wrapped in DDP, or if ``module`` is None or uses automatic optimization.
    """

    def __init__(self, model: object, module: LightningModule | None, optimizers: Iterable[Optimizer]) -> None:
        self._handles: list[RemovableHandle] = []
        self._has_warned = False
        if not isinstance(model, DistributedDataParallel) or module is None or module.automatic_optimization:
            return
        self._synced = {*synced_parameters(model).values()}
        self._handles = [model.register_forward_hook(self._end_forward)]
        for optimizer in optimizers:
            if (handle := add_step_hook(optimizer, self._end_step)) is not None:
                self._handles.append(handle)

    def close(self) -> None:
        """Ends the check. Must be called before every backward that Lightning runs, and at the end of the fit."""
        while self._handles:
            self._handles.pop().remove()

    def _end_forward(self, model: DistributedDataParallel, *args: object) -> None:
        # Lightning disables it in its own calls of the wrapper, so this was a call of the user's program.
        if model.require_backward_grad_sync:
            self.close()

    def _end_step(self, optimizer: Optimizer, *args: object) -> None:
        if self._has_warned:  # hooks are not removed here, because torch iterates over them while it calls this one
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.grad is not None and parameter in self._synced for parameter in parameters):
            self._has_warned = True
            warn_once(
                "Gradients are not synchronized: an optimizer has stepped, but no backward went through Lightning."
                " Under manual optimization call self.manual_backward(loss) instead of loss.backward(). Otherwise each"
                " rank trains weights of its own, unless your code averages gradients or weights itself."
            )

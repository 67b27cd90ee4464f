"""Another plan, or another set of trained parameters, in the middle of a fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.ddp.rewrap import ResidualAdder, Trainable, is_within_batch, kept_buffers, unwrap
from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.strategy.base import FollowsPlan
from lightning_commopt.strategy.checkpoint import SavesCommState
from lightning_commopt.strategy.checks import check_plans_agree


class ChangesPlan(FollowsPlan, SavesCommState):
    """Mixed into a strategy whose model can be wrapped again while it trains."""

    _trainable: Trainable | None = None
    _next_plan: CommPlan | None = None
    _bytes_of_closed_hooks = 0

    def apply_plan(self, plan: CommPlan) -> None:
        """Changes how gradients travel, in the middle of a fit if need be.

        All ranks must call it, with equal plans. Called between two batches it takes effect at once; within a
        batch, before the next one. Gradients that were accumulated so far are kept. Between lossless plans training
        goes on as if nothing had happened; what a compressor's error feedback still owes is added to the next
        gradients.

        Args:
            plan: the new plan.

        Raises:
            OptionError: the strategy has a ``ddp_comm_hook`` too, or the ranks' plans differ.
        """
        if plan.comm_hook is not None and self._ddp_comm_hook is not None:
            raise OptionError("the plan's comm_hook and the strategy's ddp_comm_hook exclude each other")
        module = self.lightning_module
        if module is not None and isinstance(self.model, DistributedDataParallel) and is_within_batch(module.trainer):
            self._next_plan = plan
        else:
            self._change_plan(plan)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Applies a plan that arrived within the last batch; wraps again where parameters were frozen or unfrozen."""
        super().on_train_batch_start(batch, batch_idx)
        if self._next_plan is not None:
            self._change_plan(self._next_plan)
        module = self.lightning_module
        if self._trainable is None or module is None or module._param_requires_grad_state:
            return
        may_be_frozen = self._plan.find_unused_parameters or not self._trainable.some_frozen()
        if self._trainable.some_unfrozen() or not may_be_frozen:
            self._wrap_again()

    def _change_plan(self, plan: CommPlan) -> None:
        self._next_plan = None
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        if is_wrapped:
            check_plans_agree(plan)
        for name in self._plan.ddp_kwargs():
            self._ddp_kwargs.pop(name, None)
        self._ddp_kwargs.update(plan.ddp_kwargs())
        self._plan = plan
        if is_wrapped:
            self._wrap_again()

    def _wrap_again(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        resumed = self._hook.state() if self._hook is not None and self._hook.has_only_resumed else None
        residuals = self._close_hook()
        module = self.model = unwrap(self.model)
        with kept_buffers(module):  # wrapping sends those of rank 0 to the others
            self._synchronize_device()  # Lightning wraps on a stream that does not wait for the last step
            self.configure_ddp()
            self._synchronize_device()
        if resumed is not None:  # a callback has frozen parameters again that were frozen in the checkpoint
            self._resume(resumed)
        elif self._hook is not None:
            self._hook.add_residuals(residuals)
        elif residuals:
            self._residual_adder = ResidualAdder(module, residuals)

    def _synchronize_device(self) -> None:
        if self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)

    def _close_hook(self) -> dict[str, Tensor]:
        """Returns what this rank owes its peers, by parameter name."""
        if self._residual_adder is not None:
            self._residual_adder.cancel()
            self._residual_adder = None
        if self._hook is None:
            return {}
        hook, self._hook = self._hook, None
        residuals = hook.close()
        self._bytes_of_closed_hooks += hook.bytes_sent
        return residuals

"""Compressors with faults, and the law that finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors import AfterSteps, Claims, Compressor, ErrorFeedback, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.testing import laws
from lightning_commopt.testing.law import Law
from support.own_compressors import Averages


@dataclass(frozen=True, kw_only=True)
class Faulty(Averages):
    """All-reduces, and then does something wrong.

    Attributes:
        fault: what.
        hidden: what should be in the state, and is not.
    """

    fault: str
    hidden: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    claims = Claims(is_lossy=False)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages, with the fault."""
        yield channel.all_reduce(flat.div_(channel.size))
        self.hidden.append(flat.clone())
        if self.fault == "talkative" or (self.fault == "fickle" and self.hidden[-1].isnan().any()):
            yield channel.all_reduce(torch.zeros(1))
        else:
            _, damage = FAULTS[self.fault]
            damage(flat, self.hidden)

    def reference(self, shares: Tensor, layout: Layout, state: State) -> tuple[Tensor, Tensor]:
        """Averages without a fault."""
        return shares.mean(0), shares


FAULTS: dict[str, tuple[Law, Callable[[Tensor, list[Tensor]], object]]] = {
    "fickle": (laws.same_collectives, lambda flat, hidden: None),
    "inexact": (laws.averages, lambda flat, hidden: flat.mul_(1.001)),
    "inexact vectors": (laws.small_and_unused, lambda flat, hidden: flat.mul_(1.001)),
    "almost exact": (laws.as_ddp, lambda flat, hidden: flat.mul_(1 + 2e-5)),
    "unlike its reference": (laws.as_reference, lambda flat, hidden: flat.mul_(1.01)),
    "unequal": (laws.ranks_agree, lambda flat, hidden: flat.add_(dist.get_rank(), alpha=1e-7)),
    "talkative": (laws.bytes_as_declared, lambda flat, hidden: None),
    "poisoned": (laws.overflow, lambda flat, hidden: flat.add_(torch.stack(hidden).sum(0), alpha=1e-12)),
    "silent": (laws.overflow, lambda flat, hidden: flat.nan_to_num_(0, 0, 0)),
    "leaky": (laws.tiny, lambda flat, hidden: None if flat.any() else flat.add_(1e-9)),
    "seeding": (laws.own_randomness, lambda flat, hidden: torch.manual_seed(7)),
    "drawing": (laws.own_randomness, lambda flat, hidden: torch.rand(1)),
    "forgetful": (laws.resume, lambda flat, hidden: flat.add_(len(hidden), alpha=1e-6)),
}
"""The law that finds a fault; and what the fault does to averages ``(n,)``, given those of all steps."""


@dataclass(frozen=True, kw_only=True)
class Lossy(Averages):
    """A user's, inexact by a factor, which is an error of that share.

    Attributes:
        factor: of the averages.
        error_bound: that it declares.
    """

    factor: float
    error_bound: float | None = None

    @property
    def claims(self) -> Claims:
        """Lossy."""
        return Claims(error_bound=self.error_bound)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages, and keeps a part of it; the residual is right only with the factor 0."""
        if residual is not None:
            flat.add_(residual)
            residual.copy_(flat)
        yield channel.all_reduce(flat.div_(channel.size))
        flat.mul_(self.factor)


LOSSY: dict[str, tuple[Compressor, str]] = {
    "unbounded": (Lossy(factor=0.99), "is lossy and declares no error_bound"),
    "wrapped": (AfterSteps(inner=Lossy(factor=0.99), start_step=1), "is lossy and declares no error_bound"),
    "within": (Lossy(factor=0.99, error_bound=0.011), ""),
    "beyond": (
        Lossy(factor=0.99, error_bound=0.009),
        "an average is off by 0.01 in the 2-norm, its error_bound is 0.009",
    ),
    "nothing": (ErrorFeedback(inner=Lossy(factor=0.0, error_bound=1.0)), "an average is off by 1 in the 2-norm"),
    "leaking": (ErrorFeedback(inner=Lossy(factor=0.9, error_bound=0.2)), "of the gradients is neither in the averages"),
}

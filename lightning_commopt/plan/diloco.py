"""DiLoCoPlan: how often and how workers exchange what they have learned. The options are validated here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

from lightning_commopt.compressors import Compressor, compressor_from_config
from lightning_commopt.compressors.words import short_name
from lightning_commopt.plan.base import OptionError, Plan, option_errors
from lightning_commopt.plan.ddp import CommPlan
from lightning_commopt.text.validation import check_choice, check_integer, check_positive, check_switch

OVERLAPPED_MIXING = 0.5
"""Share of a worker's own parameters while exchanges overlap with steps: alpha of Streaming DiLoCo, section 3.2."""


@dataclass(frozen=True, kw_only=True)
class DiLoCoPlan(Plan):
    """The options of training with few exchanges: each worker takes ``sync_every`` optimizer steps on its own.

    Then an outer optimizer, SGD with Nesterov momentum, moves the global weights by the mean of what the workers have
    changed. ``outer_lr=1.0`` and ``outer_momentum=0.0`` give the mean of the workers' parameters, known as local SGD.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105),
    whose outer learning rate and momentum are the defaults; and "Streaming DiLoCo with overlapping communication"
    (arXiv:2501.18512) for fragments, overlap and mixing.

    Attributes:
        sync_every: number of optimizer steps between two exchanges of the same parameters, H in the papers. Steps of
            the first optimizer count.
        fragments: number of parts of the model, which take turns: every part is exchanged once in ``sync_every`` steps.
        fragment_by: what a fragment consists of. "blocks": every n-th of the model's repeated blocks, and of its other
            modules as many as keep the fragments about equal; "bytes": single parameters, for fragments that are as
            equal as they can be.
        overlap: number of steps that training goes on while a fragment is exchanged, tau in the paper.
        mixing: share of a worker's own parameters that remains in them when the new global weights arrive, alpha in the
            paper, from 0 to below 1. None for 0 without ``overlap``, and for 0.5, the paper's, with it.
        comm_hook: how the differences travel: None or "none" uncompressed, otherwise as in `CommPlan`.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum, from 0 to below 1.
        nesterov: whether the momentum is Nesterov's.
        eval_weights: what validation during a fit uses: the "global" weights, or a worker's own, "local".
        inner: how the ranks of a node form one worker: "ddp", or a `CommPlan` (also as a mapping of its options) for
            DDP with these options; None if every rank is a worker.

    Raises:
        OptionError: a value is out of range, or two options exclude each other.
    """

    searched: ClassVar[tuple[str, ...]] = ()

    sync_every: int = 30
    fragments: int = 1
    fragment_by: Literal["blocks", "bytes"] = "blocks"
    overlap: int = 0
    mixing: float | None = None
    comm_hook: Compressor | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    eval_weights: Literal["global", "local"] = "global"
    inner: CommPlan | None = None

    def __post_init__(self) -> None:
        with option_errors("comm_hook: "):
            object.__setattr__(self, "comm_hook", compressor_from_config(self.comm_hook))
        object.__setattr__(self, "inner", _inner_plan(self.inner))
        with option_errors():
            for name, least in (("sync_every", 1), ("fragments", 1), ("overlap", 0)):
                check_integer(name, getattr(self, name), at_least=least)
            check_choice("fragment_by", self.fragment_by, ("blocks", "bytes"))
            check_choice("eval_weights", self.eval_weights, ("global", "local"))
            check_switch("nesterov", self.nesterov)
            check_positive("outer_lr", self.outer_lr)
            for name in ("outer_momentum", *(("mixing",) if self.mixing is not None else ())):
                _check_share(name, getattr(self, name))
        if self.fragments > self.sync_every:
            raise OptionError(
                f"fragments={self.fragments} is too large for sync_every={self.sync_every}: a step exchanges one"
                f" fragment at most, so the maximum is fragments={self.sync_every}"
            )
        if self.overlap >= self.sync_every:
            raise OptionError(
                f"overlap={self.overlap} is too large for sync_every={self.sync_every}: an exchange must end before the"
                f" next one of the same fragment, so the maximum is overlap={self.sync_every - 1}"
            )
        if self.nesterov and self.outer_momentum == 0:
            # Without momentum the option has no effect. As plans are compared by value, it must have one value then.
            object.__setattr__(self, "nesterov", False)

    @property
    def own_share(self) -> float:
        """Share of a worker's own parameters that remains when global weights arrive."""
        if self.mixing is not None:
            return self.mixing
        return OVERLAPPED_MIXING if self.overlap else 0.0

    @property
    def offsets(self) -> tuple[int, ...]:
        """For each fragment, the step in a round of ``sync_every`` steps after which it is exchanged; 0 is the last."""
        return tuple(index * self.sync_every // self.fragments for index in range(self.fragments))

    @property
    def is_lossy(self) -> bool:
        """Whether the plan changes numbers; it does, as workers train on different weights."""
        return True

    @property
    def sync_method(self) -> str:
        """The name of what averages over the ranks, in records of runs: "diloco", or "diloco_int8"."""
        return "diloco" if self.comm_hook is None else f"diloco_{super().sync_method}"

    @property
    def name(self) -> str:
        """The short name of the plan in all tables and figures, with everything that differs from the defaults.

        >>> DiLoCoPlan(sync_every=100, fragments=4, overlap=2, comm_hook="int4").name
        'DiLoCo every 100 steps, int4, 4 fragments, overlap 2'
        """
        words = [f"DiLoCo every {self.sync_every} steps"]
        if self.comm_hook is not None:
            words.append(short_name(self.comm_hook))
        if self.fragments > 1:
            words.append(f"{self.fragments} fragments{' by bytes' if self.fragment_by == 'bytes' else ''}")
        if self.overlap:
            words.append(f"overlap {self.overlap}")
        if self.mixing is not None:
            words.append(f"mixing {self.mixing:g}")
        defaults = DiLoCoPlan.__dataclass_fields__
        words += [
            f"{shown} {getattr(self, name):g}"
            for name, shown in (("outer_lr", "outer lr"), ("outer_momentum", "momentum"))
            if getattr(self, name) != defaults[name].default
        ]
        if not self.nesterov and self.outer_momentum:
            words.append("no Nesterov")
        if self.eval_weights != "global":
            words.append("local weights in validation")
        if self.inner is not None:
            words.append("DDP within nodes" if self.inner == CommPlan() else f"DDP within nodes ({self.inner.name})")
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        options = super().to_dict()
        return options if self.inner is None else {**options, "inner": self.inner.to_dict() or "ddp"}


def _inner_plan(inner: object) -> CommPlan | None:
    if inner is None or isinstance(inner, CommPlan):
        return inner
    if inner == "ddp":
        return CommPlan()
    if isinstance(inner, Mapping):
        with option_errors("inner: "):
            return CommPlan.from_dict(inner)
    raise OptionError(f"inner must be 'ddp', a CommPlan, a mapping of its options or None, got {inner!r}")


def _check_share(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be a number of at least 0 and below 1, got {value!r}")

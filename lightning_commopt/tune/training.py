"""TunedTraining: a fit of a Trainer or a loop in Fabric, as its tuner sees it; and plans that earlier ones chose.

The chosen plan is kept in a file for each kind of training on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors.configs import without_imports
from lightning_commopt.measure.observer import Observers
from lightning_commopt.measure.private_folder import PrivateFolder, UntrustedError, cache_folder
from lightning_commopt.plan import OptionError, Plan
from lightning_commopt.sync.strategies import PlannedStrategy
from lightning_commopt.text.validation import warn_once
from lightning_commopt.tune.options import TuneOptions

_FORMAT = 1
"""Version of the description of a fit. It is raised when a key changes its meaning, which invalidates older choices."""

_MAX_CHOICES = 200
"""Maximum number of choices that are kept, about 1 kB each. It is a judgement: more kinds of training than a user has
at a time."""

_MAX_AGE_S = 365 * 86400.0
"""Choices are kept for a year. The description of a fit includes the version of torch, so older ones rarely match."""

Method = tuple[Any, str]
"""An object, and the name of a method that is called through it; see `wrap_method`."""


class Buckets(NamedTuple):
    """What a tuner may see of gradient sync in DDP."""

    model: Callable[[], DistributedDataParallel]
    """Returns DDP's wrapper of the model."""

    observers: Observers
    """They are notified of every bucket."""


@dataclass(frozen=True, kw_only=True)
class TunedTraining:
    """What a tuner may see and call of the training that it tunes.

    Attributes:
        strategy: the strategy, which has the plan, the ranks and their device.
        parameters: returns the parameters of the model, by name.
        buckets: what can be observed and predicted with DDP; None for sharded models, for which `tries` are tried.
        tries: the plans to try if nothing can be predicted.
        apply_plan: changes the strategy's plan at once; only called when a step begins.
        step: returns the number of optimizer steps so far.
        num_steps_left: returns the number of steps that follow; infinity if unknown.
        accumulated: number of batches in a step; None if unknown. Earlier choices apply only if it is the same.
        begin_backward: method that is called before every backward, or before each that is synchronized.
        end_backward: method that is called after the same backwards, when gradients are averaged.
        forwards: method that is called with the inputs of every forward; without it the tuner gets batches.
        pauses: methods; steps in which one of these is called do not count.
    """

    strategy: PlannedStrategy
    parameters: Callable[[], Iterable[tuple[str, Tensor]]]
    buckets: Buckets | None = None
    tries: Sequence[Plan] = ()
    apply_plan: Callable[[Any], None]
    step: Callable[[], int]
    num_steps_left: Callable[[], float]
    accumulated: Any
    begin_backward: Method
    end_backward: Method
    forwards: Sequence[Method] = ()
    pauses: Sequence[Method]

    def describe(self, base: Plan) -> dict[str, Any] | None:
        """Returns a description of the training to which a choice applies: model, ranks, devices, versions, the plan.

        It is None for a plan whose compressor is not registered. It does not include the link, because an earlier
        choice is tried before it is chosen again.
        """
        parameters = [*self.parameters()]
        shapes = [(name, list(value.shape), str(value.dtype)) for name, value in parameters if value.requires_grad]
        device = self.strategy.root_device
        try:
            plan = base.to_dict()
        except ValueError:
            return None
        return {
            "format": _FORMAT,
            "parameters": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
            "num_ranks": self.strategy.world_size,
            "ranks_per_node": self.strategy.num_processes,
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "backend": self.strategy.process_group_backend,
            "torch": torch.__version__,
            "accumulate_grad_batches": self.accumulated,
            "plan": plan,
        }


def load_choice(fit: dict[str, Any], options: TuneOptions, base: Plan) -> Plan | None:
    """Returns the plan that was chosen for such a fit, if this one may choose it; a damaged file counts as no choice.

    ``fit`` is what `TunedTraining.describe` returned.
    """
    try:
        with PrivateFolder(_folder()) as folder:
            fd = folder.open(_file_name(fit))
        if fd is None:
            return None
        with os.fdopen(fd, "rb") as file:
            saved = json.load(file)
        with without_imports():
            plan = type(base).from_dict(saved["chosen"]) if saved["fit"] == fit else None
    except UntrustedError as error:
        warn_once(f"plan='auto': the plan of an earlier fit is not used, because its file is not safe: {error}")
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OptionError):
        return None
    return plan if plan is not None and plan != base and options.fits(plan, base) else None


def save_choice(fit: dict[str, Any], chosen: Plan) -> None:
    """Keeps a choice, and drops old ones. It keeps nothing without a safe folder, or if the compressor has no name."""
    try:
        content = json.dumps({"fit": fit, "chosen": chosen.to_dict()}, indent=2).encode()
        with PrivateFolder(_folder()) as folder:
            folder.write(_file_name(fit), content)
            folder.drop_oldest(_MAX_CHOICES, _MAX_AGE_S)
    except (OSError, RuntimeError, ValueError):
        return


def _file_name(fit: dict[str, Any]) -> str:
    return f"{hashlib.sha256(json.dumps(fit, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _folder() -> Path:
    return cache_folder() / "plans"

"""The state of DiLoCo in checkpoints, format version 1: a common part in the checkpoint, and a file per rank beside it.

The checkpoint has the global weights, and under `KEY` everything else that all workers share. Each rank writes its own
weights and optimizer states into a file, because gathering them would take too long over links that are slow enough to
need DiLoCo. All files consist of tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)``
can read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import as_real
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.checkpoint import DILOCO_KIND, KEY
from lightning_commopt.sync.diloco.exchange import Arrived, GlobalWeights
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.diloco.resumable import checksum, names_in, why_not_resumable
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.diloco.under_way import UnderWay
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.sync.state import CheckpointError, as_checkpoint_error
from lightning_commopt.text.formatting import lasting_repr
from lightning_commopt.text.validation import info, warn

_VERSION = 1
_FOLDER = f"{KEY}_ranks"
"""Folder beside checkpoints for the files of ranks. Its name must not begin like a checkpoint's, because Lightning
looks for "last.ckpt" by name."""
_FREE_OPTIONS = ("outer_lr", "nesterov", "mixing", "eval_weights")
"""Options of a plan that may differ when a fit is resumed, because the saved state does not depend on them."""


def ranks_folder(path: str | Path) -> str:
    """Returns the folder of the files that ranks write beside a checkpoint."""
    folder, name = os.path.split(path)
    return os.path.join(folder, _FOLDER, name)


def rank_file(path: str | Path, rank: int) -> str:
    """Returns the file of one rank beside a checkpoint."""
    return os.path.join(ranks_folder(path), f"rank_{rank}.ckpt")


def resolve_link(path: str | Path) -> str | Path:
    """Returns the target if a path is a link on a local disk, since the files of ranks are beside the target."""
    return os.path.realpath(path) if os.path.islink(path) else path


def common_part(rounds: Rounds, identity: str, world_size: int) -> dict[str, Any]:
    """Returns what a checkpoint has under `KEY`. Exchanges under way must have ended; see `Rounds.wait`.

    ``identity`` is a text that is unique to this checkpoint, and equal on all ranks.
    """
    return {
        "version": _VERSION,
        "kind": DILOCO_KIND,
        "identity": identity,
        "world_size": world_size,
        "plan": _describe(rounds.plan),
        "num_steps": rounds.num_steps,
        "steps_before": list(rounds.steps_before),
        "changed": sorted(rounds.changed),
        "fragments": [
            _fragment_to_plain(global_state, keeps_weights=rounds.shows_final) for global_state in rounds.fragments
        ],
        "under_way": [_under_way_to_plain(under_way) for under_way in rounds.under_way],
        "set_at_end": None
        if rounds.set_at_end is None
        else [_weights_to_plain(global_state) for global_state in rounds.set_at_end],
    }


def _describe(plan: DiLoCoPlan) -> str:
    try:
        options = plan.to_dict()
    except ValueError:  # the class of a compressor has no name, but may have a `repr`
        options = vars(plan)
    fixed = {name: value for name, value in options.items() if name not in _FREE_OPTIONS}
    return json.dumps(fixed, sort_keys=True, default=lasting_repr)


def _fragment_to_plain(global_state: GlobalWeights, *, keeps_weights: bool) -> dict[str, Any]:
    is_exact = all(as_real(x).dtype == torch.float32 for x in global_state.fragment.parameters.values())
    keeps_weights = keeps_weights or not is_exact
    return {
        **names_in(global_state.fragment),
        # The `state_dict` has the weights already, unless it has rounded them or has those of the end of a fit.
        # Float64 weights count as rounded: Lightning may load them into a module that is converted only later.
        "weights": global_state.weights if keeps_weights else None,
        "checksum": None if keeps_weights else checksum(global_state),
        "momentum": global_state.momentum,
        "values_of_floats": global_state.floats,
        "values_of_integers": global_state.integers,
    }


def _weights_to_plain(global_state: GlobalWeights | Arrived) -> dict[str, Any]:
    return {"weights": global_state.weights, "floats": global_state.floats, "integers": global_state.integers}


def _under_way_to_plain(under_way: UnderWay) -> dict[str, Any]:
    arrived = under_way.arrived
    assert arrived is not None
    return {
        "index": under_way.index,
        "due": under_way.due,
        **_weights_to_plain(arrived),
        "reports": [report.to_plain() for report in arrived.reports],
    }


def rank_part(rounds: Rounds, identity: str, rank: int, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of one rank's file.

    ``entries`` has those entries of Lightning's checkpoint, which only rank 0 writes, that differ between workers.
    """
    return {
        "version": _VERSION,
        "identity": identity,
        "rank": rank,
        "entries": dict(entries),
        "weights": rounds.own_weights(),
        "states": [global_state.state for global_state in rounds.fragments],
        "carried": [global_state.carried for global_state in rounds.fragments],
        "counts": rounds.counts.to_plain(),
        "left_out": rounds.left_out.moved(),
        "trained": sorted(rounds.trained),
    }


@dataclass(frozen=True)
class Saved:
    """The state that a fit resumes from.

    Attributes:
        common: what all workers share, from `common_part`; None to start a new round from the weights that were loaded.
        own: this rank's part, from `rank_part`; None to resume from the global weights.
    """

    common: Mapping[str, Any] | None = None
    own: Mapping[str, Any] | None = None

    @property
    def entries(self) -> Mapping[str, Any]:
        """This rank's entries of Lightning's checkpoint."""
        return {} if self.own is None else self.own["entries"]

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that were in fragments."""
        if self.common is None:
            return frozenset()
        return frozenset(name for saved in self.common["fragments"] for name in saved["parameters"])

    def restore(self, rounds: Rounds) -> None:
        """Restores new rounds, and puts this worker's own weights, or else the global ones, into the model."""
        if self.common is None:
            return
        if reason := why_not_resumable(rounds.fragments, self.common, self.own):
            warn(_describe_loss(reason, has_momentum=False, has_optimizers=self.own is not None))
            return
        rounds.num_steps, rounds.steps_before = self.common["num_steps"], list(self.common["steps_before"])
        for global_state, saved in zip(rounds.fragments, self.common["fragments"], strict=True):
            if saved["weights"] is not None:
                global_state.weights.copy_(saved["weights"])
            global_state.momentum = saved["momentum"]
            global_state.floats, global_state.integers = saved["values_of_floats"], saved["values_of_integers"]
        if self.common["set_at_end"] is not None:
            pairs = zip(rounds.fragments, self.common["set_at_end"], strict=True)
            rounds.set_at_end = [
                replace(global_state, **saved, momentum=None, state={}, carried=None) for global_state, saved in pairs
            ]
        under_way = [_under_way_from_plain(saved) for saved in self.common["under_way"]]
        if self.own is not None:
            self._restore_own(rounds, self.own)
            rounds.under_way.extend(under_way)
            rounds.changed.update(self.common["changed"])
            return
        for exchange in under_way:
            assert exchange.arrived is not None
            rounds.fragments[exchange.index].take(exchange.arrived)
        for global_state in rounds.fragments:
            foreach_copy_(global_state.fragment.tensors(), global_state.tensors())

    def _restore_own(self, rounds: Rounds, own: Mapping[str, Any]) -> None:
        rounds.counts.load_plain(own["counts"])
        rounds.left_out.restore(own["left_out"])
        rounds.trained.update(own["trained"])
        parts = zip(rounds.fragments, own["weights"], own["states"], own["carried"], strict=True)
        for global_state, weights, state, carried in parts:
            global_state.state, global_state.carried = state, carried
            foreach_copy_(global_state.fragment.tensors(), weights)


def _under_way_from_plain(saved: Mapping[str, Any]) -> UnderWay:
    reports = [Report(*values) for values in saved["reports"]]
    arrived = Arrived(saved["weights"], saved["floats"], saved["integers"], reports)
    return UnderWay(saved["index"], saved["due"], arrived)


@dataclass(frozen=True)
class _ReadPart:
    """What one rank has read: ``obstacle`` is why its own part cannot be used, ``damage`` why nothing can be used."""

    identity: str = ""
    obstacle: str = ""
    damage: str = ""
    own: Mapping[str, Any] | None = None


def read_saved(saved: Any, plan: DiLoCoPlan, rank: int, world_size: int, load: Callable[[], Any]) -> Saved:
    """Returns what this rank resumes from, after all ranks have agreed on it. Rank 0 warns about what is lost.

    All ranks must call it.

    Args:
        saved: what the checkpoint has under `KEY`; None if it has nothing.
        plan: the plan in use.
        rank: number of this rank.
        world_size: number of ranks now.
        load: reads the file of this rank.
    """
    part = _read(saved, plan, rank, world_size, load)
    parts = values_of_all_ranks(replace(part, own=None))
    damage = next((other.damage for other in parts if other.damage), "")
    if not damage and any(other.identity != part.identity for other in parts):
        damage = "not all ranks read the same one"
    if damage:
        if saved is None:
            info("The checkpoint has no state of DiLoCo: all workers start from its weights.")
        else:
            warn(_describe_loss(damage, has_momentum=False))
        return Saved()
    obstacle = next((other.obstacle for other in parts if other.obstacle), "")
    if obstacle:
        warn(_describe_loss(obstacle, has_momentum=True))
    return Saved(saved, None if obstacle else part.own)


def _describe_loss(reason: str, *, has_momentum: bool, has_optimizers: bool = False) -> str:
    momentum = "" if has_momentum else "the outer momentum, "
    residuals = "residuals of comm_hook, and the workers' own optimizer states: all continue with those of rank 0"
    return (
        f"All workers resume from the checkpoint's weights, because {reason}. They lose what each had trained since the"
        f" last exchange, {momentum}{'and residuals of comm_hook' if has_optimizers else residuals}."
    )


def _read(saved: Any, plan: DiLoCoPlan, rank: int, world_size: int, load: Callable[[], Any]) -> _ReadPart:
    if saved is None:
        return _ReadPart(damage="it has no state of DiLoCo")
    if not isinstance(saved, Mapping) or saved.get("kind") != DILOCO_KIND:
        return _ReadPart(damage="it was saved by another strategy")
    if saved.get("version") != _VERSION:
        return _ReadPart(damage=f"its version is {saved.get('version')!r}, but only version {_VERSION} can be read")
    try:
        with as_checkpoint_error():
            identity = saved["identity"]
            if saved["plan"] != _describe(plan):
                return _ReadPart(identity, damage=f"it was saved with another plan, {saved['plan']}")
            if saved["world_size"] != world_size:
                size = saved["world_size"]
                return _ReadPart(identity, f"it was saved with a world size of {size}, which is {world_size} now")
    except CheckpointError as error:
        return _ReadPart(damage=str(error))
    try:
        own = load()
    except Exception as error:  # whatever reading a file may raise; the global weights can be used in any case
        return _ReadPart(identity, f"the file of rank {rank} cannot be read ({type(error).__name__}: {error})")
    if not isinstance(own, Mapping) or (own.get("identity"), own.get("rank")) != (identity, rank):
        return _ReadPart(identity, f"the file of rank {rank} belongs to another checkpoint")
    return _ReadPart(identity, own=own)

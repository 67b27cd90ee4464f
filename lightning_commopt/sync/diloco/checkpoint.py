"""What checkpoints hold of DiLoCo, version 1: a common part in the checkpoint, and a file of each rank beside it.

The weights of a checkpoint are the global ones, and everything that all workers share is under `KEY`. A worker's own
weights and optimizer states go into a file that its rank writes: over links that are slow enough for DiLoCo nobody
should gather them. All files hold tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)``
reads them.
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
from lightning_commopt.sync.checkpoint import KEY, OF_DILOCO
from lightning_commopt.sync.diloco.exchange import Arrived, GlobalWeights
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.diloco.resumable import checksum, names_in, reason_against
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.diloco.under_way import UnderWay
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.sync.state import CheckpointError, as_checkpoint_error
from lightning_commopt.text.formatting import lasting_repr
from lightning_commopt.text.validation import info, warn

_VERSION = 1
_FOLDER = f"{KEY}_ranks"  # its name must not begin with that of a checkpoint: Lightning finds "last.ckpt" by its name
_FREE_OPTIONS = ("outer_lr", "nesterov", "mixing", "eval_weights")
"""Options that may change between two fits without a change of what is saved."""


def ranks_folder(path: str | Path) -> str:
    """Returns the folder of the files that ranks write beside a checkpoint."""
    folder, name = os.path.split(path)
    return os.path.join(folder, _FOLDER, name)


def rank_file(path: str | Path, rank: int) -> str:
    """Returns the file of one rank beside a checkpoint."""
    return os.path.join(ranks_folder(path), f"rank_{rank}.ckpt")


def followed(path: str | Path) -> str | Path:
    """Returns what a link on a local disk leads to, since ranks write beside the file."""
    return os.path.realpath(path) if os.path.islink(path) else path


def common_part(rounds: Rounds, identity: str, world_size: int) -> dict[str, Any]:
    """Returns what a checkpoint has under `KEY`. The exchanges under way must have ended; see `Rounds.wait`.

    The ``identity`` is a text that no other checkpoint has, equal on all ranks.
    """
    return {
        "version": _VERSION,
        "kind": OF_DILOCO,
        "identity": identity,
        "world_size": world_size,
        "plan": _describe(rounds.plan),
        "num_steps": rounds.num_steps,
        "steps_before": list(rounds.steps_before),
        "changed": sorted(rounds.changed),
        "fragments": [_fragment_to_plain(of, keeps_weights=rounds.shows_final) for of in rounds.fragments],
        "under_way": [_under_way_to_plain(under_way) for under_way in rounds.under_way],
        "set_at_end": None if rounds.set_at_end is None else [_weights_to_plain(of) for of in rounds.set_at_end],
    }


def _describe(plan: DiLoCoPlan) -> str:
    try:
        options = plan.to_dict()
    except ValueError:  # the class of a compressor has no name, but may have a `repr`
        options = vars(plan)
    fixed = {name: value for name, value in options.items() if name not in _FREE_OPTIONS}
    return json.dumps(fixed, sort_keys=True, default=lasting_repr)


def _fragment_to_plain(of: GlobalWeights, *, keeps_weights: bool) -> dict[str, Any]:
    is_exact = all(as_real(x).dtype == torch.float32 for x in of.fragment.parameters.values())
    keeps_weights = keeps_weights or not is_exact
    return {
        **names_in(of.fragment),
        # The `state_dict` has them, unless it has rounded ones or those of the end of a fit. Lightning may load it into
        # a module in float32 that becomes one in float64 afterwards.
        "weights": of.weights if keeps_weights else None,
        "checksum": None if keeps_weights else checksum(of),
        "momentum": of.momentum,
        "values_of_floats": of.floats,
        "values_of_integers": of.integers,
    }


def _weights_to_plain(of: GlobalWeights | Arrived) -> dict[str, Any]:
    return {"weights": of.weights, "floats": of.floats, "integers": of.integers}


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
    """Returns what the file of one rank holds.

    The ``entries`` are those of Lightning's checkpoint, which rank 0 writes, whose values differ between workers.
    """
    return {
        "version": _VERSION,
        "identity": identity,
        "rank": rank,
        "entries": dict(entries),
        "weights": rounds.own_weights(),
        "states": [of.state for of in rounds.fragments],
        "carried": [of.carried for of in rounds.fragments],
        "counts": rounds.counts.to_plain(),
        "left_out": rounds.left_out.moved(),
        "trained": sorted(rounds.trained),
    }


@dataclass(frozen=True)
class Saved:
    """What a fit resumes from; without ``common`` from the weights that were loaded, in a new round.

    Attributes:
        common: what all workers share, from `common_part`.
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
        """Puts everything back into new rounds, and this worker's or the global weights into the model."""
        if self.common is None:
            return
        if reason := reason_against(rounds.fragments, self.common, self.own):
            warn(_lost(reason, has_momentum=False, has_optimizers=self.own is not None))
            return
        rounds.num_steps, rounds.steps_before = self.common["num_steps"], list(self.common["steps_before"])
        for of, saved in zip(rounds.fragments, self.common["fragments"], strict=True):
            if saved["weights"] is not None:
                of.weights.copy_(saved["weights"])
            of.momentum = saved["momentum"]
            of.floats, of.integers = saved["values_of_floats"], saved["values_of_integers"]
        if self.common["set_at_end"] is not None:
            pairs = zip(rounds.fragments, self.common["set_at_end"], strict=True)
            rounds.set_at_end = [replace(of, **saved, momentum=None, state={}, carried=None) for of, saved in pairs]
        under_way = [_under_way_from_plain(saved) for saved in self.common["under_way"]]
        if self.own is not None:
            self._restore_own(rounds, self.own)
            rounds.under_way.extend(under_way)
            rounds.changed.update(self.common["changed"])
            return
        for ended in under_way:
            assert ended.arrived is not None
            rounds.fragments[ended.index].take(ended.arrived)
        for of in rounds.fragments:
            foreach_copy_(of.fragment.tensors(), of.tensors())

    def _restore_own(self, rounds: Rounds, own: Mapping[str, Any]) -> None:
        rounds.counts.load_plain(own["counts"])
        rounds.left_out.restore(own["left_out"])
        rounds.trained.update(own["trained"])
        parts = zip(rounds.fragments, own["weights"], own["states"], own["carried"], strict=True)
        for of, weights, state, carried in parts:
            of.state, of.carried = state, carried
            foreach_copy_(of.fragment.tensors(), weights)


def _under_way_from_plain(saved: Mapping[str, Any]) -> UnderWay:
    reports = [Report(*values) for values in saved["reports"]]
    arrived = Arrived(saved["weights"], saved["floats"], saved["integers"], reports)
    return UnderWay(saved["index"], saved["due"], arrived)


@dataclass(frozen=True)
class _Finding:
    """What one rank has read; ``obstacle`` says why its own part cannot be used, ``damage`` why nothing can."""

    identity: str = ""
    obstacle: str = ""
    damage: str = ""
    own: Mapping[str, Any] | None = None


def read_saved(saved: Any, plan: DiLoCoPlan, rank: int, world_size: int, load: Callable[[], Any]) -> Saved:
    """Returns what all ranks resume from. All ranks must call it; rank 0 warns of what is lost.

    The checkpoint has ``saved`` under `KEY`, None if it has nothing; ``load`` reads the file of this rank.
    """
    finding = _read(saved, plan, rank, world_size, load)
    everyone = values_of_all_ranks(replace(finding, own=None))
    damage = next((other.damage for other in everyone if other.damage), "")
    if not damage and any(other.identity != finding.identity for other in everyone):
        damage = "not all ranks read the same one"
    if damage:
        if saved is None:
            info("The checkpoint has no state of DiLoCo: all workers start from its weights.")
        else:
            warn(_lost(damage, has_momentum=False))
        return Saved()
    obstacle = next((other.obstacle for other in everyone if other.obstacle), "")
    if obstacle:
        warn(_lost(obstacle, has_momentum=True))
    return Saved(saved, None if obstacle else finding.own)


def _lost(reason: str, *, has_momentum: bool, has_optimizers: bool = False) -> str:
    momentum = "" if has_momentum else "the outer momentum, "
    residuals = "residuals of comm_hook, and the workers' own optimizer states: all continue with those of rank 0"
    return (
        f"All workers resume from the checkpoint's weights, as {reason}. Lost is what each had trained since the"
        f" last exchange, {momentum}{'and residuals of comm_hook' if has_optimizers else residuals}."
    )


def _read(saved: Any, plan: DiLoCoPlan, rank: int, world_size: int, load: Callable[[], Any]) -> _Finding:
    if saved is None:
        return _Finding(damage="it has no state of DiLoCo")
    if not isinstance(saved, Mapping) or saved.get("kind") != OF_DILOCO:
        return _Finding(damage="it was saved by another strategy")
    if saved.get("version") != _VERSION:
        return _Finding(damage=f"its version is {saved.get('version')!r}, and {_VERSION} is the one that can be read")
    try:
        with as_checkpoint_error():
            identity = saved["identity"]
            if saved["plan"] != _describe(plan):
                return _Finding(identity, damage=f"it was saved with another plan, {saved['plan']}")
            if saved["world_size"] != world_size:
                return _Finding(identity, f"it was saved by {saved['world_size']} ranks, and there are {world_size}")
    except CheckpointError as error:
        return _Finding(damage=str(error))
    try:
        own = load()
    except Exception as error:  # whatever reading a file raises; the global weights are left in any case
        return _Finding(identity, f"the file of rank {rank} cannot be read ({type(error).__name__}: {error})")
    if not isinstance(own, Mapping) or (own.get("identity"), own.get("rank")) != (identity, rank):
        return _Finding(identity, f"the file of rank {rank} belongs to another checkpoint")
    return _Finding(identity, own=own)

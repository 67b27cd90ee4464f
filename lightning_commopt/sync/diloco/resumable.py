"""Checks whether the fragments of a model can resume from the state of DiLoCo in a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_commopt.sync.diloco.exchange import GlobalWeights
from lightning_commopt.sync.diloco.fragments import Fragment

_KINDS = ("parameters", "floats", "integers")


def names_in(fragment: Fragment) -> dict[str, list[str]]:
    """Returns the names of a fragment's tensors, under the keys that a checkpoint uses."""
    return {kind: list(getattr(fragment, kind)) for kind in _KINDS}


def checksum(global_state: GlobalWeights) -> int:
    """Returns a checksum of global weights."""
    return zlib.crc32(global_state.weights.numpy().data)


def why_not_resumable(
    fragments: Sequence[GlobalWeights], common: Mapping[str, Any], own: Mapping[str, Any] | None
) -> str | None:
    """Returns why fragments cannot resume from a checkpoint, or None if they can.

    Hooks may have given the model other parameters, or the checkpoint another ``state_dict``, whose weights the
    fragments then have. All ranks get the same answer, because their models are equal, and the files of a checkpoint
    are from the same step.

    Args:
        fragments: fragments of the model after the checkpoint's ``state_dict`` was loaded.
        common: the common part of the checkpoint.
        own: this rank's part; None if it is not used.
    """
    pairs = [*zip(fragments, common["fragments"], strict=False)]
    names = [{kind: saved[kind] for kind in _KINDS} for saved in common["fragments"]]
    if names != [names_in(global_state.fragment) for global_state in fragments]:
        return "the model has other parameters"
    under_way = [(fragments[saved["index"]], saved) for saved in common["under_way"]]
    flats = [
        (global_state, saved[key])
        for global_state, saved in [*pairs, *under_way]
        for key in ("weights", "momentum")
        if key in saved
    ]
    buffers = [[*saved["values_of_floats"], *saved["values_of_integers"]] for _, saved in pairs]
    if (
        any(flat is not None and flat.shape != global_state.weights.shape for global_state, flat in flats)
        or [_shapes([*global_state.floats, *global_state.integers]) for global_state in fragments]
        != [*map(_shapes, buffers)]
        or (
            own
            and [_shapes(global_state.fragment.tensors()) for global_state in fragments]
            != [*map(_shapes, own["weights"])]
        )
    ):
        return "the model has parameters or buffers of other shapes"
    if any(saved["checksum"] not in (None, checksum(global_state)) for global_state, saved in pairs):
        return "a hook has replaced the weights of the last exchanges by others"
    return None


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [x.shape for x in tensors]

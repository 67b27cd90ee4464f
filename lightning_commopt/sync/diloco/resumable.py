"""Whether the fragments of a model can go on from what a checkpoint holds of DiLoCo."""

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
    """Returns the names of a fragment's tensors, under the keys that a checkpoint has."""
    return {kind: list(getattr(fragment, kind)) for kind in _KINDS}


def checksum(of: GlobalWeights) -> int:
    """Returns a number that tells global weights from others."""
    return zlib.crc32(of.weights.numpy().data)


def reason_against(
    fragments: Sequence[GlobalWeights], common: Mapping[str, Any], own: Mapping[str, Any] | None
) -> str | None:
    """Returns why fragments are not those that were saved; None if they are.

    Hooks may give a model other parameters, or a checkpoint another ``state_dict``, whose weights the ``fragments``
    have. All ranks get the same answer, as their models are equal, and the files of a checkpoint are from the same
    step. This rank's ``own`` part is None if it is not used.
    """
    pairs = [*zip(fragments, common["fragments"], strict=False)]
    names = [{kind: saved[kind] for kind in _KINDS} for saved in common["fragments"]]
    if names != [names_in(of.fragment) for of in fragments]:
        return "the model has other parameters"
    under_way = [(fragments[saved["index"]], saved) for saved in common["under_way"]]
    flats = [(of, saved[key]) for of, saved in [*pairs, *under_way] for key in ("weights", "momentum") if key in saved]
    buffers = [[*saved["values_of_floats"], *saved["values_of_integers"]] for _, saved in pairs]
    if (
        any(flat is not None and flat.shape != of.weights.shape for of, flat in flats)
        or [_shapes([*of.floats, *of.integers]) for of in fragments] != [*map(_shapes, buffers)]
        or (own and [_shapes(of.fragment.tensors()) for of in fragments] != [*map(_shapes, own["weights"])])
    ):
        return "the model has parameters or buffers of other shapes"
    if any(saved["checksum"] not in (None, checksum(of)) for of, saved in pairs):
        return "they are not those of its last exchanges, but others that a hook has put in their place"
    return None


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [x.shape for x in tensors]

"""Checks of the laws for DDP: all registered compressors with a small network, for ``--full`` with a larger one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_commopt.commands.selftest.checks import check
from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.testing.law import Law
from lightning_commopt.testing.laws import LAWS, own_randomness, same_collectives
from lightning_commopt.testing.places import Place
from lightning_commopt.testing.steps import Setup, large_setup


def check_all(law: Law, setup: Setup, compressors: Mapping[str, Any]) -> str:
    """Checks whether a law holds for all of the compressors; returns how many."""
    for name, compressor in compressors.items():
        law(setup, name, compressor)
    return f"{len(compressors)} compressors"


def _add(law: Law) -> None:
    def check_small(place: Place) -> str:
        return check_all(law, Setup(place=place), example_compressors())

    def check_large(place: Place) -> str:
        return check_all(law, large_setup(place), example_compressors())

    check(law.statement)(check_small)
    check(f"{law.statement}; in several buckets", is_extra=True)(check_large)


for _law in LAWS.values():
    if _law not in (same_collectives, own_randomness):  # what they find is the same on every machine
        _add(_law)

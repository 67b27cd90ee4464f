"""The samples in a batch, against what Lightning finds where it looks at the same things; the length of a fit."""

import math
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_commopt.compat import lightning as compat_lightning
from lightning_commopt.compat.lightning import PACKAGES, count_samples, num_steps_of, package_in_use
from support.lightnings import PACKAGE, Callback
from support.strategy_models import FEATURES, Tiny, trainer

Pair = namedtuple("Pair", "name x")


@dataclass
class Batch:
    name: Any
    x: Any


class Raising:
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a batch is searched where it has no tensor")


FOUR = torch.ones(4, 3)
SEARCHED = {
    "tensor": FOUR,
    "number": torch.tensor(7.0),
    "no sample": torch.ones(0, 3),
    "parameter": torch.nn.Parameter(FOUR),
    "list": [FOUR, torch.ones(3)],
    "other size first": [torch.ones(3), FOUR],
    "strings first": (["a", "bc"], 5, None, FOUR),
    "dict": {"name": "a", "inner": OrderedDict(y=[], x=FOUR)},
    "user's dict": UserDict(x=FOUR),
    "named tuple": Pair("a", FOUR),
    "dataclass": Batch("a", [FOUR]),
    "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
    "sparse": FOUR.to_sparse(),
    "no tensor": {"x": [1, 2.0, "abc"], "y": SimpleNamespace(x=FOUR)},
}


@pytest.mark.parametrize("kind", SEARCHED)
def test_samples_are_those_that_lightning_counts(kind: str) -> None:
    """If it fails, samples per second are not those of Lightning's own callbacks."""
    sizes = import_module(f"{PACKAGE}.utilities.data")._extract_batch_size(SEARCHED[kind])
    assert count_samples(SEARCHED[kind]) == next((size for size in sizes if size is not None), None)


@pytest.mark.parametrize(
    "leaf",
    [np.array(3), np.ones((8, 3)), b"abc", bytearray(2), Raising(), repeat(1), {1, 2}, Batch],
    ids=lambda leaf: type(leaf).__name__,
)
def test_everything_else_is_passed_over(leaf: Any) -> None:
    """If it fails, a batch with an array or bytes takes seconds, or ends the fit of whoever measures it."""
    for batch in ([leaf, FOUR], {"raw": leaf, "x": FOUR}, Batch(leaf, FOUR)):
        assert count_samples(batch) == 4
    assert count_samples(leaf) is None


def test_unusual_batches() -> None:
    """If it fails, a batch that Lightning skips counts, or one that contains itself or lacks a field ends the fit."""
    own: list[Any] = []
    own.append(own)
    assert count_samples(own) is None
    assert count_samples(None) == 0
    partial = Batch("a", FOUR)
    del partial.name
    assert count_samples(partial) == 4


class Unsized(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return repeat((torch.ones(FEATURES), torch.ones(1)), 12)


class AsksForSteps(Callback):
    num_steps = 0.0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.num_steps = num_steps_of(trainer)


@pytest.mark.parametrize(("max_steps", "num_steps"), [(-1, math.inf), (2, 2)])
def test_data_without_a_length_are_a_fit_without_a_known_end(max_steps: int, num_steps: float) -> None:
    """If it fails, plan="auto" takes such a fit for one that is over, and DiLoCo warns of -1 exchanges."""
    asks = AsksForSteps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers
        trainer("auto", max_epochs=1, max_steps=max_steps, callbacks=[asks]).fit(Tiny(), DataLoader(Unsized(), 4))
    assert asks.num_steps == num_steps


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ([], "lightning.pytorch"),
        (["lightning"], "pytorch_lightning"),
        (["pytorch_lightning"], "lightning.pytorch"),
        (["lightning", "pytorch_lightning"], "neither is installed"),
        (["torchmetrics"], "No module named 'torchmetrics'"),
    ],
    ids=str,
)
def test_the_package_of_a_program_that_has_imported_both(
    missing: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a strategy is made for a package that is not there, or what a package lacks is not named."""

    def import_installed(name: str) -> None:
        for lacking in missing:
            if lacking in (name.partition(".")[0], "torchmetrics"):
                raise ModuleNotFoundError(f"No module named {lacking!r}", name=lacking)

    for package in PACKAGES:
        import_module(package)
    monkeypatch.setattr(compat_lightning, "import_module", import_installed)
    if found in PACKAGES:
        assert package_in_use() == found
    else:
        with pytest.raises(ModuleNotFoundError, match=found):
            package_in_use()

"""The samples in a batch, against what Lightning finds where it looks at the same things."""

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
from torch.nn.utils.rnn import pack_sequence

from lightning_commopt.compat.lightning import count_samples
from support.lightnings import PACKAGE

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

"""How a bucket is divided among the ranks of a node."""

import pytest
import torch

from lightning_commopt.compressors import Layout
from lightning_commopt.compressors.hierarchical import shards


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
def test_shards_are_of_about_the_same_size(num: int) -> None:
    """If it fails, one rank of a node sends most of a bucket across nodes, or rows of matrices are cut."""
    layout = Layout.of([torch.zeros(100, 7), torch.zeros(11), torch.zeros(40, 30)], torch.float32)
    found = shards(layout, num)
    starts = [start for start, _ in found]
    assert starts == [sum(part.numel for _, part in found[:i]) for i in range(num)]
    assert sum(part.numel for _, part in found) == layout.numel
    assert all(abs(part.numel - layout.numel / num) <= 30 for _, part in found)
    assert all(start % 7 == 0 for start in starts if start < 700)

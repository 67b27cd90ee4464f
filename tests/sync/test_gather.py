"""What each rank has for itself, brought to rank 0, and what ranks need for that: backends and key spaces."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors.channel import Channel, backends_of
from lightning_commopt.sync import gather as gathering
from lightning_commopt.sync.gather import all_ranks_ready, gather_on_rank_0, map_tensors
from lightning_commopt.sync.store import key_space, prepare_key_spaces
from support.warm_ranks import run_ranks


def _value(rank: int) -> dict[str, Any]:
    """Something else on every rank, in shape as well."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "step": rank,
        "qs": [torch.randn(3 + rank, 5, generator=generator), torch.randn(4, 6, generator=generator).t()],
        "gap": torch.randn(8, generator=generator)[::2],
        "deep": {"narrow": torch.randn(17, generator=generator).bfloat16(), "flag": torch.tensor(rank == 1)},
        "empty": torch.empty(0, 3),
        "word": "x" * rank,
        **({"only_here": torch.arange(100)} if rank == 1 else {}),
    }


def _tensors(value: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _gather(piece_bytes: int) -> int | None:
    value = _value(dist.get_rank())
    with torch.device("meta"), mock.patch.object(gathering, "_PIECE_BYTES", piece_bytes):
        gathered = gather_on_rank_0(value, torch.device("cpu"))
    for rank, value in enumerate(gathered or ()):
        expected = _value(rank)
        assert value.keys() == expected.keys()
        assert (value["step"], value["word"]) == (rank, "x" * rank)
        for got, tensor in zip(_tensors(value), _tensors(expected), strict=True):
            torch.testing.assert_close(got, tensor, rtol=0, atol=0)
        assert value["qs"][1].stride() == (1, 6)
    return None if gathered is None else len(gathered)


@pytest.mark.parametrize("piece_bytes", [37, 2**23])  # the first cuts elements in two
def test_gather(piece_bytes: int) -> None:
    """If it fails, a checkpoint holds other values than the ranks have, or none under another default device."""
    assert run_ranks(_gather, piece_bytes, world_size=3) == [3, None, None]


def _count_bytes(num_bytes: int) -> list[int]:
    lengths: list[int] = []
    gather = dist.gather

    def count(piece: Tensor, pieces: list[Tensor] | None) -> None:
        lengths.append(sum(len(each) for each in pieces or ()))
        gather(piece, pieces)

    limits = mock.patch.multiple(gathering, _ALL_PIECES_BYTES=3000, _MIN_PIECE_BYTES=100)
    with limits, mock.patch.object(gathering.dist, "gather", count):
        gather_on_rank_0(torch.ones(num_bytes, dtype=torch.uint8), torch.device("cpu"))
    return lengths


def test_the_receivers_memory_does_not_grow_with_the_ranks() -> None:
    """If it fails, saving a checkpoint on hundreds of GPUs runs out of device memory on rank 0."""
    lengths, *_ = run_ranks(_count_bytes, 5000, world_size=3)
    assert lengths == [3000] * 5


def test_other_values_are_refused() -> None:
    """If it fails, a compressor's state may hold what a checkpoint cannot give back."""
    with pytest.raises(TypeError, match=r"a state may hold tensors, .*, not torch.float32"):
        map_tensors(lambda tensor: tensor, {"dtype": torch.float32})


def _meet() -> list[bool]:
    rank = dist.get_rank()
    positions: list[list[str | None]] = [["7", "7"], ["7", "8"], ["7", None], [None, "7"], ["9", "9"]]
    return [all_ranks_ready(position[rank], 5, 5) for position in positions]


def test_ranks_meet_at_the_same_point_only() -> None:
    """If it fails, ranks gather while one of them is elsewhere, and hang."""
    assert run_ranks(_meet) == [[True, False, False, False, True]] * 2


def _miss() -> tuple[bool, float, list[bool]]:
    prepare_key_spaces()
    start = time.monotonic()
    came = dist.get_rank() == 0 and all_ranks_ready("7", 0.5, 5)
    waited_s = time.monotonic() - start
    dist.barrier()
    return came, waited_s, [all_ranks_ready(position, 5, 5) for position in ("8", "9")]


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    """If it fails, a checkpoint that one rank alone saves is never written, or later ones of all ranks lack state."""
    (came, waited_s, later), (_, _, of_other) = run_ranks(_miss)
    assert not came
    assert 0.5 <= waited_s < 4
    assert later == of_other == [True, True]


def _sum_shards() -> tuple[dict[str, str], list[float]]:
    group = dist.new_group(backend="cpu:gloo")
    assert isinstance(group, dist.ProcessGroup)
    message = torch.arange(4.0).view(2, 2) * (dist.get_rank() + 1)
    return backends_of(group), Channel(group).reduce_scatter(message).wait().tolist()


def test_the_backend_is_known_however_it_is_spelled() -> None:
    """If it fails, a group that was made for one device by name counts as another backend's."""
    assert run_ranks(_sum_shards) == [({"cpu": "gloo"}, [0, 3]), ({"cpu": "gloo"}, [6, 9])]
    for config, backends in {"cuda:nccl": ["cuda"], "cpu:gloo,cuda:nccl2": ["cpu", "cuda"]}.items():
        with mock.patch.object(dist, "get_backend_config", return_value=config):
            assert list(backends_of()) == backends


def _write_and_count() -> list[bool]:
    """Returns which of three spaces have a key, before it is written to the first and after."""
    spaces = [key_space("test"), key_space("test"), key_space("other")]
    dist.barrier()
    found = [space.check(["key"]) for space in spaces]
    dist.barrier()
    spaces[0].set("key", "")
    dist.barrier()
    return [*found, *(space.check(["key"]) for space in spaces)]


def test_key_spaces_are_apart_and_shared_by_the_ranks() -> None:
    """If it fails, one fit reads the keys of another."""
    found = run_ranks(_write_and_count)
    assert found == [[False, False, False, True, False, False]] * 2

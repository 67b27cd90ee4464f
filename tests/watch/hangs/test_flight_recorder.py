"""Which ranks have left the order of collectives, from recorded ones."""

import pytest

from lightning_commopt.watch.hangs.flight_recorder import (
    BACKGROUND_GROUP,
    Collective,
    Signature,
    find_difference,
    parse_collectives,
)

SYNC = ("0", "all_reduce", (180,))
GATHER = ("0", "all_gather", (3,))
HOOK = ("5", "all_reduce", (180,))


def recorded(*calls: tuple[str, str, tuple[int, ...]], num_done: int | None = None) -> list[Collective]:
    """Returns collectives numbered in each group; all but the last are done, unless ``num_done`` is given."""
    counts: dict[str, int] = {}
    found = []
    for place, (group, operation, size) in enumerate(calls):
        counts[group] = counts.get(group, 0) + 1
        is_done = place < (len(calls) - 1 if num_done is None else num_done)
        found.append(Collective(Signature(group, operation, (size,), ("Float",)), counts[group], is_done))
    return found


STEP = (GATHER, SYNC)
HOOK_STEP = (GATHER, HOOK)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_skipped_collective_of_one_group(world_size: int) -> None:
    """If it fails, the rank that goes on is taken for one that waits; of two, none has a majority."""
    ranks = {rank: recorded(*STEP * 3, GATHER) for rank in range(world_size)}
    ranks[1] = recorded(*STEP * 3, SYNC)
    found = find_difference(ranks)
    assert found is not None
    assert (found.ranks, found.number, found.is_certain) == ((1,), 7, True)
    assert {rank: str(called) for rank, called in found.called.items()} == {
        rank: "all_reduce (180,)" if rank == 1 else "all_gather (3,)" for rank in range(world_size)
    }


def test_a_skipped_collective_of_another_group_than_the_next() -> None:
    """If it fails, two ranks that wait in different groups look the same."""
    found = find_difference({0: recorded(*HOOK_STEP * 3, GATHER), 1: recorded(*HOOK_STEP * 3, HOOK)})
    assert found is not None
    assert (found.ranks, found.number, found.is_certain) == ((1,), 4, True)
    assert found.called[1] is None


def test_a_collective_that_only_one_rank_calls() -> None:
    """If it fails, the ranks that go on as ever are blamed for one that calls something more."""
    found = find_difference({0: recorded(*[HOOK] * 5), 1: recorded(*[HOOK] * 4, GATHER), 2: recorded(*[HOOK] * 5)})
    assert found is not None
    assert (found.ranks, found.number, found.is_certain) == ((1,), 5, True)
    assert {rank: called is None for rank, called in found.called.items()} == {0: False, 1: True, 2: False}


def test_another_size() -> None:
    """If it fails, tensors of different sizes pass for the same collective."""
    odd = ("0", "all_gather", (4,))
    found = find_difference({rank: recorded(*STEP * 2, odd if rank == 2 else GATHER) for rank in range(4)})
    assert found is not None
    assert (found.ranks, found.number) == ((2,), 5)


def test_two_ranks_without_a_history_are_both_named() -> None:
    """If it fails, one of two is blamed by chance."""
    found = find_difference({0: recorded(GATHER), 1: recorded(SYNC)})
    assert found is not None
    assert (found.ranks, found.is_certain) == ((0, 1), False)


def test_ranks_in_the_same_collective_do_not_differ() -> None:
    """If it fails, a network that is down is taken for a mistake in the program."""
    assert find_difference({rank: recorded(*STEP * 3, GATHER) for rank in range(3)}) is None
    assert find_difference({0: [], 1: recorded(GATHER)}) is None
    assert find_difference({}) is None


def test_parse_collectives() -> None:
    """If it fails, torch's record is read as something else."""
    entry = {
        "collective_seq_id": 7,
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 2]],
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:_all_gather_base",
        "retired": False,
        "state": "scheduled",
        "time_created_ns": 2_000_000_000,
    }
    background = entry | {"process_group": ["4", BACKGROUND_GROUP]}
    (found,) = parse_collectives({"entries": [entry, entry | {"is_p2p": True}, background]})
    assert found == Collective(Signature("0", "all_gather_base", ((3, 2),), ("Float",)), 7, False, 2.0)
    assert str(found.signature) == "all_gather_base (3, 2)"
    assert parse_collectives(None) == parse_collectives({}) == []

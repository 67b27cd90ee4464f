"""Training in rounds on real processes, of which one is frozen or killed at a given point."""

from __future__ import annotations

import json
import random
import signal
from typing import Any

import pytest

from support.patient_ranks import Job, Ranks, Result, train

# The default run has a fit of a Trainer with such ranks, in test_diloco_failures.py.
pytestmark = pytest.mark.exhaustive
PLAN = {"sync_every": 5, "fragments": 2, "overlap": 2, "comm_hook": "int8"}
PATIENCE_S = 5.0
"""A rank that is healthy comes within it on a busy machine; the fault of each test costs a few times as long."""
POINTS = ("meeting", "connecting", "exchange", "passing on", "end")


def run_calmly(world_size: int, job: Job) -> list[Result]:
    with Ranks(train, world_size, job) as ranks:
        return ranks.wait_for(range(world_size))


def check_equal(results: list[Result]) -> None:
    assert all(result.weights.equal(results[0].weights) for result in results)


def goes_on_without(ranks: Ranks, rank: int) -> bool:
    """Returns whether an exchange has succeeded without a rank."""
    names = [f"members/{number}/{attempt}" for number in range(20) for attempt in range(3)]
    done = [x for x in names if ranks.store.check([f"{x}/end"]) and ranks.store.get(f"{x}/end") == b"done"]
    return any(rank not in json.loads(ranks.store.get(f"{name}/members")) for name in done)


@pytest.mark.parametrize(
    "plan",
    [PLAN, {"sync_every": 5, "fragments": 1}, {"sync_every": 4, "fragments": 3, "overlap": 3, "comm_hook": "powersgd"}],
)
def test_patience_changes_no_bit_of_a_healthy_run(plan: dict[str, Any]) -> None:
    steps = 23  # the fit ends within a round
    plain = run_calmly(3, Job(plan, steps, patience_s=None))
    patient = run_calmly(3, Job(plan, steps, patience_s=120.0, pauses_s=(0.0, 0.02, 0.05)))
    assert [result.num_trained for result in patient] == [steps] * 3
    assert not any(result.log for result in patient)
    check_equal([*plain, *patient])


def train_with_frozen(rank: int, point: str, passes: int, plan: dict[str, Any], world_size: int = 3) -> list[Result]:
    """Freezes a rank at a point until the others go on without it; all wait for it before the last steps."""
    job = Job(plan, 40, PATIENCE_S, barrier_step=30, stops={rank: (point, passes)})
    with Ranks(train, world_size, job) as ranks:
        ranks.wait_until(lambda: ranks.is_frozen(rank))
        ranks.wait_until(lambda: goes_on_without(ranks, rank))
        ranks.signal(rank, signal.SIGCONT)
        return ranks.wait_for(range(world_size))


@pytest.mark.parametrize(
    ("rank", "point", "plan"),
    [
        (2, "meeting", PLAN),
        *((0, point, PLAN) for point in POINTS),
        *((1, point, {"sync_every": 5, "comm_hook": "powersgd"}) for point in POINTS),
    ],
)
def test_a_frozen_rank_joins_again_from_the_global_weights(rank: int, point: str, plan: dict[str, Any]) -> None:
    # Connections are made only at first; all other points are passed before the freeze.
    results = train_with_frozen(rank, point, 0 if point == "connecting" else 2, plan)
    check_equal(results)
    frozen, others = results[rank], [result for other, result in enumerate(results) if other != rank]
    assert frozen.num_trained < 40
    assert [result.num_trained for result in others] == [40, 40]
    texts = "\n".join(line for result in results for line in result.log)
    assert f"rank {rank} joins again, from the global weights" in texts
    assert f"rank {rank} did not come within patience_s=5; 2 of 3 ranks continue" in texts


@pytest.mark.parametrize(("rank", "point"), [(0, "exchange"), *zip((2, 0, 2, 2, 0), POINTS, strict=True)])
def test_a_rank_that_is_killed_is_missed_once(rank: int, point: str) -> None:
    job = Job(PLAN, 40, PATIENCE_S, stops={rank: (point, 0 if point == "connecting" else 2)})
    with Ranks(train, 3, job) as ranks:
        ranks.wait_until(lambda: ranks.is_frozen(rank))
        ranks.signal(rank, signal.SIGKILL)
        survivors = ranks.wait_for([other for other in range(3) if other != rank])
    check_equal(survivors)
    assert [result.num_trained for result in survivors] == [40, 40]
    assert sum("did not come" in line for result in survivors for line in result.log) == 1


@pytest.mark.parametrize("seed", range(4))
def test_survivors_of_a_random_moment_are_equal(seed: int) -> None:
    draw = random.Random(seed)
    world_size, rank = draw.choice([3, 4]), draw.randrange(3)
    kind = draw.choice([signal.SIGKILL, signal.SIGSTOP])
    job = Job(PLAN, 60, PATIENCE_S, pauses_s=(0.04,) * world_size, seed=seed)
    with Ranks(train, world_size, job) as ranks:
        ranks.wait_until(lambda: ranks.store.check([f"members/{draw.randrange(8)}/0/end"]))
        ranks.signal(rank, kind)
        survivors = ranks.wait_for([other for other in range(world_size) if other != rank])
    check_equal(survivors)
    assert {result.num_trained for result in survivors} == {60}

"""One search, in steps without noise: which plans it visits, what it takes, and what it chooses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from lightning_commopt.tune.gains import TimedVisit
from lightning_commopt.tune.search import Report, Search, SearchResult, Visit


class _Searched(NamedTuple):
    """A search, and the steps that it wanted; ``cost_s`` is their time beyond that with the user's plan."""

    result: SearchResult
    visits: list[Visit]
    cost_s: float

    @property
    def arms(self) -> str:
        """The plans in turn."""
        return "".join(str(arm) for arm, _ in itertools.groupby(visit.arm for visit in self.visits))


def _run(
    num_plans: int, budget_steps: float, report: Callable[[Visit, bool], Report], *, chosen: int = 0, **options: Any
) -> tuple[SearchResult, list[Visit]]:
    """Searches from the plan that is chosen; ``report`` gets a visit, and whether it changes the plan."""
    settings = {"num_settling_steps": 2, **options}
    expected = settings.pop("expected", [1.0, *[None] * (num_plans - 1)])
    running = Search(expected, budget_steps, arm=chosen, chosen=chosen, **settings).run()
    visits, arm = [next(running)], chosen
    while True:
        is_change, arm = visits[-1].arm != arm, visits[-1].arm
        try:
            visits.append(running.send(report(visits[-1], is_change)))
        except StopIteration as stop:
            return stop.value, visits


def _searched(
    times_s: Sequence[Sequence[float]], budget_steps: float, *, change_s: float, first_s: float = 0.0, **options: Any
) -> _Searched:
    """Searches; the visits of each plan take its times of a step in turn, the first plan is the user's.

    A change takes ``change_s``, and the first step after it ``first_s`` more.
    """
    in_turn, taken_s = [itertools.cycle(times) for times in times_s], list[float]()
    arm, step_s = -1, 0.0

    def report(visit: Visit, is_change: bool) -> Report:
        nonlocal arm, step_s
        if visit.arm != arm:
            arm, step_s = visit.arm, next(in_turn[visit.arm])
        seconds = [step_s + is_change * first_s, *[step_s] * (visit.num_steps - 1)]
        taken_s.extend([*seconds, is_change * change_s])
        return Report(tuple(seconds), change_s)

    result, visits = _run(len(times_s), budget_steps, report, **options)
    return _Searched(result, visits, sum(taken_s) - sum(visit.num_steps for visit in visits) * times_s[0][0])


def test_a_plan_is_chosen_if_it_was_seen_twice_and_is_faster_beyond_the_noise() -> None:
    """If it fails, luck chooses the plan: a single visit, or a mean whose interval reaches to slower steps."""
    once = _searched([[1.0], [0.5]], 6.5, change_s=6.5).result  # a change takes the whole budget
    assert (once.num_steps, once.arm, once.why) == (10, 0, "too short")
    assert once.gains[1].low > 0.4
    noisy = _searched([[1.0, 1.2], [1.0, 1.1]], 100.0, change_s=0.1).result
    assert noisy.gains[1].low < 0.0 < 0.04 < noisy.gains[1].gain
    assert (noisy.arm, noisy.why) == (0, "not sure")


def test_a_search_that_cannot_compare_keeps_what_was_chosen() -> None:
    """If it fails, a plan that is faster is given up because the budget is spent, or no step could be timed."""
    unpaid = _searched([[1.0], [0.5]], -5.0, change_s=0.1, chosen=1).result
    assert (unpaid.arm, unpaid.why, unpaid.gains) == (1, "too short", {})
    unmeasurable = _searched([[math.nan], [0.5]], 100.0, change_s=0.1, chosen=1).result
    assert (unmeasurable.arm, unmeasurable.why) == (1, "unmeasurable")
    assert _searched([[1.0], [1.1]], 100.0, change_s=0.1, chosen=1).result.arm == 0
    assert _searched([[1.0], [1.1]], -5.0, change_s=0.1).result.arm == 0


def test_a_budget_suffices_for_so_many_candidates() -> None:
    """If it fails, a search spends more than it may: the way to a plan and back is 4 steps, a visit 2.5."""
    assert not _searched([[1.0], [1.0]], 6.4, change_s=0.1).result.gains
    assert [*_searched([[1.0], [1.0], [1.0]], 6.5, change_s=0.1).result.gains] == [1]
    assert [*_searched([[1.0], [1.0], [1.0]], 7.0, change_s=0.1).result.gains] == [1, 2]


def test_a_promise_pays_for_nothing() -> None:
    """If it fails, a search spends more than it may on candidates whose predictions are wrong."""
    times_s, expected = [[1.0], [1.4], [1.4], [1.4]], [1.0, 0.1, 0.1, 0.1]
    found = _searched(times_s, 9.0, change_s=0.1, first_s=1.0, expected=expected)  # a visit costs 3.5
    assert found.arms == "012"
    assert found.cost_s == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("times_s", "arms", "chosen"),
    [
        ([1.0, 0.7, 1.05, 1.02], "0123010", 1),  # 2 and 3 cannot win after a visit
        ([1.0, 0.7, 0.8], "012010", 1),  # 2 could by noise, until 1 was visited twice
        ([1.0, 0.7, 0.71], "0120120", 1),  # 2 may be better, but not by 2 %
        ([1.0, 0.75, 0.74, 0.7], "01230321", 3),  # the fastest first, as steps may be too few for all
        ([1.0, 1.01], "010101", 0),
    ],
)
def test_candidates_are_visited_until_they_cannot_win(times_s: list[float], arms: str, chosen: int) -> None:
    """If it fails, steps are lost to a plan that is known to be slow, or to find out which of two fast ones is best."""
    found = _searched([[step_s] for step_s in times_s], 100.0, change_s=0.1)
    assert (found.arms, found.result.arm) == (arms, chosen)


def test_a_plan_with_bad_luck_is_visited_again() -> None:
    """If it fails, a single slow visit rules out the best plan."""
    assert _searched([[1.0], [0.7], [0.72, 0.6]], 100.0, change_s=0.1).result.arm == 2
    assert _searched([[1.0], [0.7], [0.76, 0.68]], 100.0, change_s=0.1).arms == "01201201"  # 2 may still be the best


@pytest.mark.parametrize("unit_s", [1.0, 0.01])
def test_a_search_knows_its_cost_and_stays_within_its_budget(unit_s: float) -> None:
    """If it fails, a fit takes more than 1 % longer, or a search with short steps ends early."""
    expected = {7.0: "0120", 7.3: "01201", 8.5: "01201", 8.8: "0120120", 11.3: "0120120", 11.6: "01201201"}
    for budget_steps, arms in expected.items():
        times_s = [[unit_s * step_s] for step_s in (1.0, 0.99, 1.03)]
        found = _searched(times_s, budget_steps, change_s=0.8 * unit_s, first_s=0.6 * unit_s)
        assert found.result.lost_s == pytest.approx(found.cost_s, abs=1e-9 * unit_s)
        assert found.cost_s <= budget_steps * unit_s
        assert found.arms == arms


@pytest.mark.parametrize(
    ("change_s", "first_s", "budget_steps", "arms"), [(0.1, 4.0, 8.0, [0, 1]), (4.0, 0.1, 12.0, [0, 1, 0])]
)
def test_a_search_expects_its_longest_change_and_its_slowest_first_step_again(
    change_s: float, first_s: float, budget_steps: float, arms: list[int]
) -> None:
    """If it fails, a fit pays once more for what has taken long before."""

    def report(visit: Visit, is_change: bool) -> Report:
        is_long = is_change and visit.arm == 1
        seconds = [1.0 + (first_s if is_long else 0.1), *[1.0] * (visit.num_steps - 1)]
        return Report(tuple(seconds), change_s if is_long else 0.1)

    _, visits = _run(2, budget_steps, report)
    assert [arm for arm, _ in itertools.groupby(visit.arm for visit in visits)] == arms


@pytest.mark.parametrize(("handicap", "arm"), [(0.0, 1), (0.02, 0)])
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_plan_saves_more_than_its_handicap(handicap: float, arm: int, chosen: int) -> None:
    """If it fails, a fit compresses, or goes on compressing, to save next to nothing."""
    found = _searched([[1.0], [0.97]], 100.0, change_s=0.1, chosen=chosen, handicaps={1: handicap})
    assert found.result.arm == arm


def test_a_plan_that_cannot_save_more_than_its_handicap_is_given_up() -> None:
    """If it fails, steps are lost to a compressor that is as fast as none."""
    assert _searched([[1.0], [0.98]], 100.0, change_s=0.1, handicaps={1: 0.1}).arms == "010"


def _times_of_steps(seconds: Sequence[float], num_settling_steps: int = 2) -> tuple[SearchResult, list[Visit]]:
    """Searches; the first steps with the candidate take so long, all others a second."""
    left = iter(seconds)

    def report(visit: Visit, is_change: bool) -> Report:
        return Report(tuple(next(left, 1.0) if visit.arm else 1.0 for _ in range(visit.num_steps)), 0.1)

    return _run(2, 100.0, report, num_settling_steps=num_settling_steps)


def test_a_plan_that_is_far_slower_is_given_up_after_a_few_steps() -> None:
    """If it fails, a slow plan takes up the budget, or a single step that is slow by chance rules out the best one."""
    slow = [Visit(1, 1), Visit(1, 1), Visit(1, 1)]
    assert _times_of_steps([9.0, 1.6, 1.6])[1][1:] == slow
    for seconds, num_settling_steps, others in (([1, 9, 1], 2, [1, 1]), ([9, 9, 1], 3, [2]), ([9, math.nan], 2, [1])):
        result, visits = _times_of_steps(seconds, num_settling_steps)
        assert visits[1 : len(others) + 3] == [Visit(1, num_steps) for num_steps in (1, *others, 4)]
        assert result.gains[1].gain == pytest.approx(0.0)


def test_a_visit_is_repeated_until_most_of_its_steps_count() -> None:
    """If it fails, one step beside a validation stands for a plan."""
    nan = math.nan
    for counted, num_visits in (([nan], 1), ([nan, nan], 2), ([nan] * 12, 3)):
        _, visits = _times_of_steps([1.0, 1.0, *counted])
        of_plan = [*itertools.takewhile(lambda visit: visit.arm == 1, visits[1:])]
        assert of_plan == [Visit(1, 1), Visit(1, 1), *[Visit(1, 4)] * num_visits]


def test_an_undecided_candidate_is_visited_before_others_and_one_of_another_time_after_them() -> None:
    """If it fails, a repeated search drops what the one before has begun, or a candidate is never tried."""
    times_s = [[1.0]] * 5
    undecided = [TimedVisit(0, 0.0, (0.9, 1.1)), TimedVisit(1, 6.0, (0.9, 1.0)), TimedVisit(0, 12.0, (0.9, 1.1))]
    goes_on = _searched(times_s, 100.0, change_s=0.1, earlier=[undecided], tried={1, 2, 3})
    assert goes_on.arms.startswith("01")
    others = _searched(times_s, 100.0, change_s=0.1, tried={1, 2, 3})
    assert others.arms.startswith("0412")
    assert others.result.has_more  # 3, which has lost before something changed

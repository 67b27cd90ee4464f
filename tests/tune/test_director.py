"""The director in simulated fits: it must never harm, and must find what is there."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise

import pytest

from lightning_commopt.cost.predict import Candidate, Prediction
from lightning_commopt.plan import CommPlan
from lightning_commopt.tune.calibration import Shortlist
from lightning_commopt.tune.director import CALIBRATE, Director
from lightning_commopt.tune.gains import TimedVisit, gains
from lightning_commopt.tune.search import Report
from lightning_commopt.tune.verdict import text_to_log, verdict
from support.cross_section import sampled
from support.simulated_fit import HEAVY_NOISES, NOISES, Change, Driven, Outcome, Predictions, noise, simulate

_WORSE = [
    [1.0, 1.02, 1.1, 1.3, 1.01, 1.05, 1.2],
    [1.0, 1.01, 1.01, 1.01],
    [1.0, 2.5, 1.0, 1.05],
    [1.0],
]
_KINDS = pytest.mark.parametrize("kind", sampled(NOISES, by_default=["medium"]))
_BETTER = [[1.0, 0.8, 1.1, 1.02], [1.0, 0.6, 0.55, 0.9], [1.0, 1.2, 0.7]]


def _percentile(outcomes: Sequence[Outcome], share: float) -> float:
    ratios = sorted(outcome.ratio for outcome in outcomes)
    return ratios[min(len(ratios) - 1, int(share * len(ratios)))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", NOISES)
def test_candidates_that_are_worse_cost_at_most_a_percent(kind: str) -> None:
    """If it fails, a fit whose plan was the best trains longer with plan="auto"."""
    outcomes = [
        simulate(arms_s, num_steps, kind, seed)
        for arms_s in _WORSE
        for num_steps in (100, 1000, 3000)
        for seed in range(60)
    ]
    assert statistics.fmean(outcome.ratio for outcome in outcomes) < 1.005
    assert _percentile(outcomes, 0.99) <= 1.0101


@_KINDS
def test_it_finds_the_best_plan(kind: str) -> None:
    """If it fails, a better plan that was tried is not chosen. Much noise may hide a gain of 20 %: then nothing is."""
    outcomes = [(arms_s, simulate(arms_s, 3000, kind, seed)) for arms_s in _BETTER for seed in range(12)]
    near = [arms_s[outcome.arm] <= 1.03 * min(arms_s) for arms_s, outcome in outcomes]
    assert statistics.fmean(near) > {"large": 0.75, "bursts": 0.5, "tails": 0.75, "wandering": 0.9}.get(kind, 0.95)
    assert _percentile([outcome for _, outcome in outcomes], 0.99) <= 1.01
    assert max(outcome.director.searches[0].num_steps for _, outcome in outcomes) <= 60


@_KINDS
def test_a_link_that_changes_makes_it_search_again(kind: str) -> None:
    """If it fails, the plan that was the best at the start stays when another one is."""
    change = Change(5000, [0.5, 0.65, 0.55, 0.7])
    outcomes = [simulate([1.0, 0.7, 0.9, 1.2], 12000, kind, seed, changes=[change]) for seed in range(10)]
    assert sum(outcome.arm == 0 for outcome in outcomes) >= 9
    slower = Change(2000, [3.0, 1.2, 1.4, 2.2])
    outcomes = [simulate([1.0, 1.2, 1.4, 1.2], 5000, kind, seed, changes=[slower]) for seed in range(10)]
    assert sum(outcome.arm == 1 for outcome in outcomes) >= 8
    assert all(outcome.ratio < 1.01 for outcome in outcomes)


@pytest.mark.parametrize("kind", sampled((*NOISES, *HEAVY_NOISES), by_default=["bursts"]))
def test_fits_whose_steps_change_cost_at_most_a_percent(kind: str) -> None:
    """If it fails, each change of a shared machine or link is paid for with more calibrations and searches."""
    outcomes = []
    for seed in range(24):
        rng = random.Random(seed)
        num_steps, plans_s = rng.choice([2000, 6000, 12000]), [1.0, *(1 + rng.random() / 2 for _ in range(4))]
        changes = [
            Change(at_step, [rng.choice([0.3, 0.5, 0.8, 1.5, 3.0]) * plan_s for plan_s in plans_s])
            for at_step in sorted(rng.sample(range(num_steps), rng.randint(1, 6)))
        ]
        changes = [Change(change.at_step, [change.arms_s[0] * plan_s for plan_s in plans_s]) for change in changes]
        told_steps = math.inf if seed % 4 == 0 else None
        predictions = Predictions()
        outcomes.append(
            simulate(plans_s, num_steps, kind, seed, changes=changes, known_steps=told_steps, predictions=predictions)
        )
    assert statistics.fmean(outcome.ratio for outcome in outcomes) < 1.005
    # What was spent before a fit has become faster is a larger share of it.
    assert max(outcome.ratio for outcome in outcomes) < 1.012
    assert max(len(outcome.calibrated_at) for outcome in outcomes) > 2


@_KINDS
@pytest.mark.parametrize("before_s", [[1.0, 1.2, 1.3, 1.1], [1.0, 0.7, 1.3, 1.1]], ids=["none chosen", "one chosen"])
def test_a_slower_link_brings_candidates_that_promised_nothing_before(kind: str, before_s: list[float]) -> None:
    """If it fails, a compressor that the link needs now is never tried, or a choice is given up for the user's plan."""
    changes = [Change(4000, [3.0, 2.4, 1.2, 2.8])]
    outcomes = [simulate(before_s, 19000, kind, seed, changes=changes, predictions=Predictions()) for seed in range(8)]
    assert statistics.fmean(outcome.arm == 2 for outcome in outcomes) > 0.7
    assert all(outcome.arm in (1, 2) for outcome in outcomes)
    assert all(max(outcome.calibrated_at) > 4000 for outcome in outcomes if outcome.arm == 2)


def test_a_calibration_that_predicts_nothing_is_repeated() -> None:
    """If it fails, a disturbed observation of six steps decides that nothing is tried in a fit of a day."""
    never = simulate([1.0, 0.5], 12000, "small", 0, predictions=Predictions(failing=1.0))
    assert 3 <= len(never.calibrated_at) <= 8
    assert never.director.status == "unpredictable"
    assert 1.0 < never.ratio < 1.005
    short = simulate([1.0, 0.5], 1500, "small", 0, predictions=Predictions(failing=1.0))
    assert len(short.calibrated_at) == 2  # it cannot pay for three
    assert short.director.visit == (0, 0)  # nothing is left to decide
    outcomes = [simulate([1.0, 0.5], 6000, "small", seed, predictions=Predictions(failing=0.5)) for seed in range(8)]
    assert sum(outcome.arm == 1 for outcome in outcomes) >= 7
    assert max(len(outcome.calibrated_at) for outcome in outcomes) > 1


def test_a_fit_of_unknown_length_calibrates_again_once_it_can_pay_for_that() -> None:
    """If it fails, a disturbed observation, or a link that changes early, ends the search in a loop of a day."""
    never = simulate([1.0, 0.5], 12000, "small", 0, known_steps=math.inf, predictions=Predictions(failing=1.0))
    assert 3 <= len(never.calibrated_at) <= 8
    assert never.ratio < 1.005
    slower, exact = Change(1500, [3.0, 1.2]), Predictions(failing=0.0)
    found = simulate([1.0, 1.3], 8000, "small", 0, changes=[slower], known_steps=math.inf, predictions=exact)
    assert found.arm == 1


def test_a_plan_that_was_ruled_out_is_left_and_that_is_no_change_of_the_link() -> None:
    """If it fails, a search begins because the user's plan is slower than the one that was left, or others are left."""
    for others, chosen in (([0.5], 0), ([0.5, 0.6], 2)):
        arms_s = [1.0, *others]
        director = Driven([None] * len(arms_s), 100000)
        while director.budget.num_done < 2000:
            if director.visit.num_steps == 100 and director.budget.num_done > 500:
                director.forbid([1])
            director.advance(Report((arms_s[director.visit.arm],) * director.visit.num_steps, 0.1))
        assert director.visit.arm == director.chosen == chosen
        assert [event.what for event in director.events] == ["forbidden"]
        assert len(director.searches) == len(others)


def test_candidates_that_lose_make_room_for_others() -> None:
    """If it fails, a plan is never tried because three others were predicted to be faster, and are not."""
    outcomes = [simulate([1.0, 1.2, 1.05, 1.3, 1.02, 0.8], 8000, "medium", seed) for seed in range(8)]
    assert statistics.fmean(outcome.arm == 5 for outcome in outcomes) > 0.9
    assert all({*search.gains} <= {*range(1, 6)} for outcome in outcomes for search in outcome.director.searches)
    assert max(outcome.ratio for outcome in outcomes) < 1.01
    # A first search leaves enough for another one.
    shorter = [simulate([1.0, 1.2, 1.05, 1.3, 1.02, 0.8], 3000, "medium", seed) for seed in range(8)]
    assert statistics.fmean(outcome.arm == 5 for outcome in shorter) > 0.5


def test_a_plan_that_was_chosen_is_compared_with_candidates_that_were_not_tried() -> None:
    """If it fails, a long fit stays with the best of the first three candidates."""
    outcomes = [simulate([1.0, 0.8, 0.85, 0.82, 0.6], 12000, "small", seed) for seed in range(5)]
    assert {outcome.director.searches[0].arm for outcome in outcomes} == {1}
    assert {outcome.arm for outcome in outcomes} == {4}


def test_the_fastest_candidate_is_seen_twice_first() -> None:
    """If it fails, a search ends on another one, as its steps did not suffice to visit all again."""
    outcomes = [simulate([1.0, 0.75, 0.74, 0.7], 3000, "small", seed) for seed in range(12)]
    assert statistics.fmean(outcome.director.searches[0].arm == 3 for outcome in outcomes) > 0.9


def test_a_run_too_short_tries_nothing() -> None:
    """If it fails, a short fit pays for a search that it cannot get back."""
    outcome = simulate([1.0, 0.5], 60, "small", 0)
    assert outcome.ratio == pytest.approx(1)
    assert outcome.director.searches[0].why == "too short"
    plans = [CommPlan(), CommPlan.from_dict({"comm_hook": "int8"})]
    assert "Candidates that were not tried: int8." in verdict(outcome.director, plans)
    decided = simulate([1.0, 2.0], 2000, "small", 0, expected=[1.0, 1.0]).director
    assert "not tried" not in verdict(decided, plans)


def test_an_unknown_number_of_steps_is_paid_for_by_what_was_trained() -> None:
    """If it fails, a fit of unknown length may search away its time, or never searches."""
    outcome = simulate([1.0, 0.5], 50, "small", 0, known_steps=math.inf)
    assert outcome.ratio == pytest.approx(1)
    assert simulate([1.0, 0.5], 4000, "small", 0, known_steps=math.inf).arm == 1
    assert len(simulate([1.0, 0.5], 600, "small", 0).director.searches) == 1  # it will not be able to pay for more
    worse = [simulate([1.0, 1.3], 4000, "small", seed, known_steps=math.inf).ratio for seed in range(20)]
    assert max(worse) < 1.01


def test_a_fit_of_unknown_length_says_when_a_search_would_begin() -> None:
    """If it fails, who trains 300 steps with manual optimization is told that no step was measured."""
    director = Director(math.inf)
    while director.budget.num_done < 300:
        director.advance(Report((1.0,) * director.visit.num_steps, 0.0))
    assert "was to begin after 800, and the fit ended before" in verdict(director, [CommPlan()])


def test_before_a_search_a_fit_of_unknown_length_is_looked_at_every_hundred_steps() -> None:
    """If it fails, ranks exchange a message every other step, or a slow first step counts as the time of all."""
    director, visits, base_s = Director(math.inf), list[int](), list[float]()
    while director.visit.arm != CALIBRATE:
        visits.append(director.visit.num_steps)
        director.advance(Report((2.0, *[1.0] * (director.visit.num_steps - 1))))
        base_s.append(director.base_s)
    assert visits == [3, 2, *[100] * 8]
    assert base_s[1:] == [1.5, *[1.0] * 8]


@pytest.mark.parametrize(
    ("not_allowed", "told"),
    [
        ({}, "No plan is predicted to be faster: backward hides gradient sync as far as any could."),
        (
            {"bf16": 0.25, "int8": 0.5},
            "No allowed plan is predicted to be faster. int8, lossy, would save up to 50 % of a step: lossy=['int8'],"
            " or commopt tune --lossy int8, allows it.",
        ),
    ],
)
def test_where_nothing_is_tried_it_is_told_what_would_help(not_allowed: dict[str, float], told: str) -> None:
    """If it fails, who could save half of each step is told that there is nothing to save, or the other way round."""
    director = Director(2000)
    while director.status != "nothing promising":
        own = Candidate(CommPlan(), Prediction(step_s=1.0, low_s=0.9, high_s=1.1, exposed_s=0.0))
        director.shortlist = Shortlist(own, (), not_allowed)
        director.advance(Report((1.0,) * director.visit.num_steps, 0.0))
    assert verdict(director, [CommPlan()]) == f"The plan stays: {CommPlan().name}. {told}"


def test_the_log_says_why_a_search_begins_again_and_each_result_once() -> None:
    """If it fails, a search in the middle of a fit has no reason, or its earlier result is logged again."""
    director, plans, texts = Director(20000), [CommPlan(), CommPlan(bucket_cap_mb=1)], list[str]()
    while director.budget.num_done < 6000:
        visit, has_changed = director.visit, director.budget.num_done > 3000
        base, other = (
            Candidate(plan, Prediction(step_s=step_s, low_s=step_s, high_s=step_s, exposed_s=0.0))
            for plan, step_s in zip(plans, (3.0, 1.0) if has_changed else (1.0, 0.5), strict=True)
        )
        if visit.arm == CALIBRATE:
            director.shortlist = Shortlist(base, (other,), {})
        step_s = (other if visit.arm > 0 else base).prediction.step_s
        director.advance(Report((step_s,) * visit.num_steps, 0.1))
        if (text := text_to_log(director, plans)) not in ("", *texts[-1:]):
            texts.append(text)
    begins, chosen = "A search begins", "Chosen after 30 steps of search"
    expected = [begins, chosen, begins, chosen, f"The step time has changed. {begins}", chosen]
    assert [text[: len(start)] for text, start in zip(texts, expected, strict=False)] == expected
    assert "predicted were 1000 ms" in texts[-1]


@pytest.mark.parametrize(("known_s", "is_chosen"), [(0.5, True), (1.3, False)])
def test_what_an_earlier_fit_has_chosen_is_tried_before_anything_is_predicted(known_s: float, is_chosen: bool) -> None:
    """If it fails, a second fit searches anew, or keeps a plan that has become slower than the user's."""
    director, rng, arms = Director(5000, has_known=True), random.Random(0), list[int]()
    while director.visit.arm != CALIBRATE and director.budget.num_done < 2000:
        visit = director.visit
        arms.append(visit.arm)
        step_s = known_s if visit.arm else 1.0
        director.advance(Report(tuple(step_s * rng.gauss(1, 0.01) for _ in range(visit.num_steps)), 0.01))
    assert 1 in arms
    assert (director.chosen, director.visit.arm) == ((1, 1) if is_chosen else (0, CALIBRATE))
    assert is_chosen or director.budget.num_done < 50
    if is_chosen:  # the steps at the beginning tell nothing about those after a change
        while director.visit.arm != CALIBRATE:
            director.advance(Report((2.0,) * director.visit.num_steps))
        director.advance(Report((4.0,) + (math.nan,) * (director.visit.num_steps - 1)))
        assert director.base_s == 4.0


def test_a_prediction_keeps_a_slow_candidate_from_being_tried() -> None:
    """If it fails, a candidate that the budget cannot pay for is tried, and the whole run takes longer."""
    assert simulate([1.0, 30.0], 1500, "small", 0, expected=[1.0, 30.0]).ratio == pytest.approx(1)
    assert simulate([1.0, 3.0], 1500, "small", 0).ratio < 1.01


@pytest.mark.parametrize("kind", HEAVY_NOISES)
def test_steps_with_the_users_plan_lose_nothing(kind: str) -> None:
    """If it fails, a fit that tried no plan on a loaded machine reports that it has lost more steps than it had."""
    for seed in range(100):
        factors, num_done = noise(kind, random.Random(seed)), 0
        director = Director(5000)
        while num_done < 130:
            visit, seconds = director.visit, [0.02 * next(factors) for _ in range(director.visit.num_steps)]
            num_done += visit.num_steps
            is_observed = visit.arm == CALIBRATE
            director.aside_s = 0.03 if is_observed else director.aside_s
            director.advance(Report(tuple(seconds), 0.01 if is_observed else 0.0))
        assert director.status == "unpredictable"
        assert 0 < director.lost_steps == director.calibration_lost_steps < 2.5  # 40 ms for all that measuring takes


@pytest.mark.parametrize("kind", sampled(HEAVY_NOISES, by_default=["outliers"]))
def test_a_search_loses_what_its_changes_take_whatever_the_noise(kind: str) -> None:
    """If it fails, noise counts as lost time: a search stops for it, or a report shows more than the fit took."""
    outcomes = [simulate([1.0, 1.0, 1.0, 1.0], 1500, kind, seed, known_steps=5000) for seed in range(12)]
    directors = [outcome.director for outcome in outcomes]
    changes = simulate([1.0, 1.0, 1.0, 1.0], 1500, "none", 0, known_steps=5000).director.lost_steps
    # A load that comes and goes looks like a change, after which more is searched.
    assert statistics.median([director.lost_steps for director in directors]) == pytest.approx(changes, rel=0.8)
    assert max(director.lost_steps for director in directors) < 100
    assert all(sum(search.lost_s for search in outcome.director.searches) <= outcome.total_s for outcome in outcomes)


def test_measuring_compressors_is_paid_for() -> None:
    """If it fails, a short fit measures compressors for longer than all its search may take, or a long one does not."""
    for num_steps, can_measure in ((1000, False), (20000, True), (math.inf, True)):
        director = Director(num_steps, measuring_s=0.4)
        num_done = 0
        while director.visit.arm != CALIBRATE:
            num_done += director.visit.num_steps
            director.advance(Report((0.02,) * director.visit.num_steps))
        assert (director.measuring_limit_s >= 0.4) == can_measure
        assert director.measuring_limit_s < 0.01 * 0.02 * (num_done if math.isinf(num_steps) else num_steps)


def _visits(base_s: Sequence[float], other_s: Sequence[float]) -> list[TimedVisit]:
    """A plan between visits of the user's, each of four steps that differ by 5 %."""
    seconds = [s for pair in zip(base_s, [*other_s, 0], strict=True) for s in pair][:-1]
    steps = (0.95, 1.0, 1.0, 1.05)
    return [TimedVisit(at % 2, 6.0 * at, tuple(s * step for step in steps)) for at, s in enumerate(seconds)]


def test_a_repeated_search_goes_on_from_the_one_before() -> None:
    """If it fails, noise that one search is too short for hides a gain however often it is repeated."""
    search = _visits([1.0, 1.06, 1.0], [0.9, 0.94])
    assert gains([search])[1].low < 0
    assert gains([search, search, search])[1].low > 0.02
    disturbed = _visits([1.0, 2.0, 1.0], [1.1, 1.1])
    (alone,), (both,) = (gains(searches).values() for searches in ([search], [search, disturbed]))
    assert both.gain == pytest.approx(alone.gain, abs=0.02)
    assert both.high - both.low < alone.high - alone.low


def test_noise_does_not_take_back_what_was_chosen() -> None:
    """If it fails, a plan is left because a later comparison could not prove once more that it is faster."""
    outcomes = [simulate([1.0, 0.92, 0.95, 1.05], 5000, "medium", seed) for seed in range(12)]
    assert statistics.fmean(outcome.arm > 0 for outcome in outcomes) > 0.8


def test_a_handicap_leaves_ties_to_others() -> None:
    """If it fails, a fit compresses where a lossless plan is as fast."""
    for times_s, arm in (((1.0, 0.7, 0.71), 2), ((1.0, 0.5, 0.71), 1)):
        director = Driven([None] * 3, 10000, handicaps={1: 0.02})
        while director.is_searching:
            visit = director.visit
            director.advance(Report((times_s[visit.arm],) * visit.num_steps, 0.1))
        assert director.visit.arm == arm


def test_steps_that_do_not_count_are_replaced() -> None:
    """If it fails, validations or odd batches in a visit decide on its plan, or end the search."""
    director, num_visits = Driven([None, None], 10000), 0
    while director.is_searching:
        visit = director.visit
        seconds = [math.nan if step % 2 else (1.0, 0.7)[visit.arm] for step in range(visit.num_steps)]
        director.advance(Report(tuple(seconds), 0.1))
        num_visits += 1
        assert num_visits < 60
    assert director.visit.arm == 1
    never = Driven([None, None], 10000)
    while never.is_searching:
        never.advance(Report((math.nan,) * never.visit.num_steps))
    assert never.searches[0].why == "unmeasurable"


def _chosen() -> Driven:
    """Returns a director that has just chosen a plan with steps of 0.7 s instead of 1 s."""
    director = Driven([None, None], 100000)
    while director.is_searching:
        director.advance(Report(((1.0, 0.7)[director.visit.arm],) * director.visit.num_steps, 0.1))
    return director


@pytest.mark.parametrize("num_good", [0, 2, 3])
def test_a_choice_that_does_not_hold_is_rolled_back_and_searched_again(num_good: int) -> None:
    """If it fails, a plan that won by chance stays, or a machine that is slow later takes back a good one."""
    director = _chosen()
    assert director.visit == (1, 20)
    for step_s in [*[0.7] * num_good, 1.05]:
        director.advance(Report((step_s,) * director.visit.num_steps))
    assert director.visit.arm == (num_good == 3)
    assert [event.what for event in director.events] == ["rolled back"] * (num_good < 3)
    for _ in range(3):
        if not director.is_searching:
            director.advance(Report(((1.0, 0.7)[director.visit.arm],) * director.visit.num_steps))
    assert director.is_searching == (num_good < 3)


def test_half_of_what_a_plan_saves_pays_for_more_searches() -> None:
    """If it fails, a fit spends what it has not saved: another process may have left when a plan was chosen."""
    director, saved = _chosen(), list[float]()
    for step_s in (0.7, 0.8, 0.62, 2.1):
        lost_steps = director.budget.lost_steps
        director.advance(Report((step_s,) * director.visit.num_steps))
        saved.append(lost_steps - director.budget.lost_steps)
    assert saved == pytest.approx([0.5 * 0.3 * 20, 0.5 * 0.2 * 100, 0.5 * 0.3 * 100, 0.0])


def test_what_was_seen_before_a_change_does_not_count_after_it() -> None:
    """If it fails, visits on another link decide which plan is used now."""
    director, times_s = Driven([None, None], 100000), [itertools.cycle([1.0, 1.2]), itertools.cycle([1.0, 1.1])]
    arm, step_s = -1, 1.0
    while len(director.searches) < 2:
        visit, has_searched = director.visit, bool(director.searches)
        if has_searched:
            step_s = 2.1 if visit.arm else 1.0 if director.budget.num_done < 200 else 3.0
        elif visit.arm != arm:
            arm, step_s = visit.arm, next(times_s[visit.arm])
        director.advance(Report((step_s,) * visit.num_steps, 0.1))
    assert [event.what for event in director.events] == ["drift"]
    assert director.searches[1].gains[1].gain == pytest.approx(0.3)


def test_the_way_to_the_chosen_plan_is_paid_for_once() -> None:
    """If it fails, a report has lost fewer steps than the search took, or more with every hundred steps."""
    director = Driven([None, None], 100000)
    while director.is_searching:
        director.advance(Report(((1.0, 0.7)[director.visit.arm],) * director.visit.num_steps, 0.1))
    lost = [director.lost_steps]
    for _ in range(3):
        director.advance(Report((0.7,) * director.visit.num_steps, 5.0))
        lost.append(director.lost_steps)
    assert [after - before for before, after in pairwise(lost)] == pytest.approx([5.0, 0.0, 0.0])


@pytest.mark.parametrize("chosen", [0, 1])
def test_after_a_change_time_counts_in_steps_of_the_new_length_if_they_are_the_users(chosen: int) -> None:
    """If it fails, a fit that has become slower can spend no more than before, or one that became faster too much."""
    director = Driven([None, None], 100000)
    while director.is_searching:
        director.advance(Report(((1.0, 0.7 if chosen else 1.3)[director.visit.arm],) * director.visit.num_steps, 0.1))
    assert director.chosen == chosen
    director.base_s, lost_steps = 1.0, math.nan
    while not director.is_searching and director.budget.num_done < 1500:
        lost_steps, step_s = director.budget.lost_steps, 4.0 if director.budget.num_done > 500 else (1.0, 0.7)[chosen]
        director.advance(Report((step_s,) * director.visit.num_steps))
    num_done, factor = director.budget.num_done, 1.0 if chosen else 1 / 4
    assert [event.what for event in director.events] == ["drift"]
    assert director.budget.base_steps == pytest.approx(factor * num_done)
    assert director.budget.lost_steps == pytest.approx(factor * lost_steps)
    assert director.base_s == (1.0 if chosen else 4.0)


def test_a_search_begins_when_steps_have_changed_in_two_looks() -> None:
    """If it fails, one disturbed look begins a search, or a link that has become faster never does."""
    for looks_s, is_searching in (([2.0, 1.0, 2.0, 1.0, 2.0, 1.0], False), ([0.5] * 4, True)):
        director = Driven([None, None], 100000, arm=1)
        for step_s in [*[1.0] * 5, *looks_s]:
            if not director.is_searching:
                director.advance(Report((step_s,) * director.visit.num_steps))
        assert director.is_searching == is_searching


def test_searches_in_vain_become_rarer() -> None:
    """If it fails, noise that never ceases is paid for every few hundred steps, or a search that needs more stops."""
    director, times_s = Driven([None, None], 100000), [itertools.cycle([1.0, 1.2]), itertools.cycle([1.0, 1.1])]
    arm, step_s, changes_at = -1, 1.0, list[int]()
    while len(changes_at) < 7:
        visit, is_searching = director.visit, director.is_searching
        assert is_searching or visit == (0, 100)
        if is_searching and visit.arm != arm:
            arm, step_s = visit.arm, next(times_s[visit.arm])
        director.advance(Report((step_s if is_searching else 1.0,) * visit.num_steps, 0.1))
        if director.is_searching != is_searching:
            changes_at.append(director.budget.num_done)
    assert {search.why for search in director.searches} == {"not sure"}
    gains_of_plan = [search.gains[1] for search in director.searches]  # the visits of earlier searches count, too
    assert all(after.high - after.low < 0.9 * (before.high - before.low) for before, after in pairwise(gains_of_plan))
    assert [begin - end for end, begin in pairwise(changes_at)][::2] == [400, 800, 1600]
    assert director.num_search_steps == sum(search.num_steps for search in director.searches)


@pytest.mark.parametrize(("gain", "steps"), [(-0.3, [713, 1223, 2033, 3743]), (0.5, [751, 1201, 1751, 2201])])
def test_changes_begin_fewer_searches_if_these_are_in_vain(gain: float, steps: list[int]) -> None:
    """If it fails, a machine that is now fast, now slow searches for ever, or a long fit does not follow its link."""
    director = Driven([None, None], 1e6)
    while len(director.events) < 4:
        base_s = 3.0 if director.budget.num_done // 500 % 2 else 1.0
        step_s = base_s * (1 - gain if director.visit.arm else 1.0)
        director.advance(Report((step_s,) * director.visit.num_steps, 0.1))
    assert [*director.events] == [(step, "drift") for step in steps]


def _calibrated(director: Director, arms_s: tuple[float, float], comm_hook: str | None) -> None:
    """Trains until a search ends, with one candidate for each calibration."""
    is_searching = False
    while director.is_searching or not is_searching:
        visit, is_searching = director.visit, director.is_searching
        if visit.arm == CALIBRATE:
            plans = CommPlan(), CommPlan.from_dict({"comm_hook": comm_hook, "bucket_cap_mb": 1})
            base, other = (
                Candidate(plan, Prediction(step_s=step_s, low_s=step_s, high_s=step_s, exposed_s=0.0))
                for plan, step_s in zip(plans, arms_s, strict=True)
            )
            director.shortlist = Shortlist(base, (other,), {})
        director.advance(Report((arms_s[max(0, visit.arm)],) * visit.num_steps, 0.1))


def test_a_fit_compresses_only_where_that_saves_more() -> None:
    """If it fails, gradients are not exact for 3 %, or another layout of buckets is not used for them."""
    for comm_hook, chosen in ((None, 1), ("int8", 0)):
        director = Director(20000)
        _calibrated(director, (1.0, 0.97), comm_hook)
        assert director.chosen == chosen


@pytest.mark.parametrize("is_paid", [True, False])
def test_after_a_change_the_present_plan_is_compared_again(is_paid: bool) -> None:
    """If it fails, a change of the link takes back what was chosen, or is paid for with more than the budget."""
    director = Director(20000)
    _calibrated(director, (1.0, 0.7), None)
    director.budget.lost_steps += 0 if is_paid else 1000
    while not director.events:
        step_s = 0.7 if director.budget.num_done < 500 else 2.1
        director.advance(Report((step_s,) * director.visit.num_steps, 0.1))
    assert (director.chosen, director.is_searching, director.visit.arm == CALIBRATE) == (1, not is_paid, is_paid)
    if is_paid:
        _calibrated(director, (math.nan, math.nan), None)
    assert director.chosen == 1


def test_a_plan_that_was_found_before_is_watched_only() -> None:
    """If it fails, a resumed fit searches again, or never notices that the link has changed."""
    director = Driven([None, None], 100000, arm=1)
    for _ in range(5):
        assert director.visit == (1, 100)
        assert not director.is_timed  # so that the guard looks at a lossy plan
        director.advance(Report((1.0,) * director.visit.num_steps))
    for _ in range(4):
        if not director.is_searching:
            director.advance(Report((2.0,) * director.visit.num_steps))
    assert director.is_searching
    assert director.visit.arm == 0  # no first steps that do not count: the fit is under way


@pytest.mark.parametrize("num_steps", [5000, math.inf])
def test_a_resumed_plan_that_is_ruled_out_is_followed_by_a_search_among_others(num_steps: float) -> None:
    """If it fails, a calibration gets no time of a step, so that nothing is predicted and nothing measured."""
    director, forbids_at = Director(num_steps, arm=1, measuring_s=0.4), 1500
    while director.visit.arm != CALIBRATE:
        if director.budget.num_done == forbids_at:
            director.forbid([1])
        director.advance(Report((0.5 if director.visit.arm else 1.0,) * director.visit.num_steps, 0.1))
        assert director.budget.num_done < 4000
    assert director.base_s == 1.0
    assert director.measuring_limit_s > 0.4
    director.base_s = math.nan  # as if each step since had a validation
    director.advance(Report((math.nan,) * director.visit.num_steps, 0.1))
    assert director.calibration_lost_steps == 0.0


def test_a_resumed_plan_that_has_become_slower_is_compared_with_predicted_ones() -> None:
    """If it fails, a loop that was resumed tries nothing else on another link."""
    director = Director(math.inf, arm=1, measuring_s=0.4)
    while director.visit.arm != CALIBRATE:
        step_s = 0.5 if director.budget.num_done < 1500 else 1.5
        director.advance(Report((step_s,) * director.visit.num_steps, 0.1))
        assert director.budget.num_done < 2000
    assert director.measuring_limit_s > 0.4


def test_a_calibration_costs_its_changes_and_what_it_measures_but_not_its_steps() -> None:
    """If it fails, a fit spends more than its budget, or compares predictions with the steps of an hour ago."""
    director = Director(20000, measuring_s=0.4)
    for first_s, base_s in ((1.0, 2.0), (1.0, 4.0)):
        lost_steps, measured_s = director.lost_steps, director.budget.measured_s
        while director.visit.arm != CALIBRATE:
            director.advance(Report((first_s,) * director.visit.num_steps))
        assert director.aside_s == 0.0
        director.aside_s = 3.0
        num_known = 6 if base_s == 2.0 else 1  # the steps before the first calibration count beside its own
        director.advance(Report((base_s,) * num_known + (math.nan,) * (6 - num_known), 1.0))
        assert director.base_s == base_s
        assert director.lost_steps - lost_steps == pytest.approx(4.0 / base_s)
        assert director.budget.lost_steps == director.lost_steps
        assert director.budget.measured_s - measured_s == 3.0
    assert director.calibration_lost_steps == director.lost_steps == pytest.approx(3.0)

"""Which plans are tried, from what the model of a step predicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_commopt import CommPlan
from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.buckets import buckets_of
from lightning_commopt.cost.compressor_cost import own_average
from lightning_commopt.cost.predict import Candidate, Prediction, predict
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.link.link import Link
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.tune import calibration as calibration_module
from lightning_commopt.tune.calibration import MAX_CANDIDATES, Calibration, Shortlist, shortlist
from lightning_commopt.tune.options import TuneOptions

_GRADIENTS = tuple(Gradient(f"layer.{i}", (1024, 1024), 4, 0.01 * (i + 1)) for i in range(20))
_WORKLOAD = Workload(gradients=_GRADIENTS, forward_s=0.1, backward_s=0.2, rest_s=0.01, num_ranks=2)
_OWN = own_average()
_INT8, _BF16 = map(compressor_from_config, ("int8", "bf16"))
_COSTS = {compressor: dataclasses.replace(_OWN, compressor=compressor) for compressor in (None, _INT8, _BF16)}


def _list(link: Link, lossy: tuple[str, ...] = (), base: CommPlan | None = None, **options: bool) -> Shortlist:
    base = base or CommPlan()
    allowed = TuneOptions(lossy=tuple(map(compressor_from_config, lossy)), **options)
    measured_s = predict(base, _WORKLOAD, link, _COSTS).step_s
    return shortlist(Basis(plan=base, workload=_WORKLOAD, link=link, costs=_COSTS, step_s=measured_s), allowed)


_SLOW, _FAST = Link(hop_s=1e-4, s_per_byte=8e-9), Link(hop_s=1e-6, s_per_byte=1e-12)


def test_a_slow_link_promises_something() -> None:
    """If it fails, nothing is tried where compression or other buckets are predicted to help."""
    found = _list(_SLOW, ("bf16", "int8"))
    plans = [one.plan for one in found.candidates]
    assert 0 < len(plans) <= MAX_CANDIDATES
    predictions = [one.prediction for one in found.candidates]
    assert predictions[0].step_s == min(one.step_s for one in predictions)
    assert all(one.step_s < found.base.prediction.step_s for one in predictions)
    assert all(one.low_s <= one.step_s <= one.high_s for one in predictions)


def test_every_compressor_that_may_win_is_tried_and_no_other() -> None:
    """If it fails, steps are spent on a plan that is known to be slow, and none on other buckets of the fastest."""
    slow = _list(_SLOW, ("bf16", "int8")).candidates
    assert {one.plan.comm_hook for one in slow} == {_INT8}
    assert [len(buckets_of(one.plan, _GRADIENTS)) for one in slow] == [20, 2, 7]  # 2 differs most
    close = _list(Link(hop_s=1e-4, s_per_byte=2e-9), ("bf16", "int8")).candidates
    assert {one.plan.comm_hook for one in close} >= {_BF16, _INT8}
    for found in (slow, close):
        assert max(one.prediction.low_s for one in found) < min(one.prediction.high_s for one in found)


def test_a_plan_that_was_chosen_is_compared_again_and_one_that_was_ruled_out_is_not() -> None:
    """If it fails, a new search leaves what was found, or compresses as the guard has forbidden."""
    basis = Basis(plan=CommPlan(), workload=_WORKLOAD, link=_SLOW, costs=_COSTS, step_s=1.0)
    options, kept = TuneOptions(lossy=(_INT8, _BF16)), CommPlan(comm_hook=_BF16, bucket_cap_mb=1)
    without = shortlist(basis, options)
    found = shortlist(basis, options, kept)
    assert [one.plan for one in found.candidates] == [kept, *(one.plan for one in without.candidates)]
    assert found.candidates[0].prediction == basis.predict(kept)
    twice = shortlist(basis, options, without.candidates[0].plan)
    assert len({one.plan for one in twice.candidates}) == len(twice.candidates)
    assert twice.candidates[0] == without.candidates[0]
    left = shortlist(basis, options, None, {_INT8})
    assert {one.plan.comm_hook for one in without.candidates} == {_INT8}
    assert {one.plan.comm_hook for one in left.candidates} == {_BF16}
    assert not left.not_allowed.keys() & {"int8", "bf16"}
    unmeasured = dataclasses.replace(basis, costs={None: _COSTS[None]})
    assert math.isnan(shortlist(unmeasured, options, kept).candidates[0].prediction.step_s)


def test_small_buckets_are_tried_where_they_are_predicted_to_be_about_equal() -> None:
    """If it fails, nothing finds out that several ranks keep a slow link busier with them."""
    four = tuple(Gradient(f"layer.{i}", (768, 768), 4, 0.005 * (i + 1)) for i in range(4))
    workload = dataclasses.replace(_WORKLOAD, gradients=four, backward_s=0.02, num_ranks=4)
    link = Link(hop_s=1e-4, s_per_byte=8e-8)
    basis = Basis(plan=CommPlan(), workload=workload, link=link, costs=_COSTS, step_s=1.0)
    found = shortlist(basis, TuneOptions(lossy=(_INT8,))).candidates
    assert {len(buckets_of(one.plan, four)) for one in found if one.plan.comm_hook == _INT8} == {1, 2, 4}


def test_lossless_stays_lossless_and_names_what_would_help() -> None:
    """If it fails, a compressor is used that nobody has allowed, or nobody learns that it would help."""
    found = _list(_SLOW)
    assert all(one.plan.comm_hook is None for one in found.candidates)
    assert found.not_allowed["int8"] > found.not_allowed["bf16"] > 0
    assert "fp16" not in found.not_allowed  # it overflows
    assert "int8" not in _list(_SLOW, ("int8",)).not_allowed
    assert 0 < _list(_SLOW, ("bf16",)).not_allowed["int8"] < found.not_allowed["int8"]  # what bf16 does not save


def test_a_model_that_sends_hardly_anything_is_not_told_to_compress() -> None:
    """If it fails, latency is taken for a slow link, and compression promised to save what it cannot."""
    small = dataclasses.replace(_WORKLOAD, gradients=(Gradient("layer", (128, 128), 4, 0.01),))
    link = Link(hop_s=1e-4, s_per_byte=1e-4)
    basis = Basis(plan=CommPlan(), workload=small, link=link, costs={}, step_s=1.0)
    assert predict(CommPlan(comm_hook=_INT8), small, link, {}).step_s < predict(CommPlan(), small, link, {}).step_s
    assert shortlist(basis, TuneOptions()).not_allowed == {}


def test_a_fast_link_needs_nothing() -> None:
    """If it fails, steps are spent on a search although communication is hidden."""
    found = _list(_FAST, ("bf16", "int8"))
    assert found.candidates == ()
    assert found.not_allowed == {}


@pytest.mark.parametrize("cap", [1, 25])
def test_what_the_user_has_fixed_stays(cap: float) -> None:
    """If it fails, an option that a user has set is changed."""
    base = CommPlan(bucket_cap_mb=cap, gradient_as_bucket_view=True)
    found = _list(_SLOW, ("int8",), base, has_fixed_buckets=True)
    assert [one.plan for one in found.candidates] == [dataclasses.replace(base, comm_hook=_INT8)]
    fixed = _list(_SLOW, (), CommPlan(comm_hook=_INT8), has_fixed_hook=True)
    assert all(one.plan.comm_hook == _INT8 for one in fixed.candidates)
    assert fixed.not_allowed == {}


def test_unused_parameters_take_no_layout_lists() -> None:
    """If it fails, buckets are laid out for an order of gradients that changes."""
    found = _list(_SLOW, ("bf16",), CommPlan(find_unused_parameters=True))
    assert not any(isinstance(one.plan.bucket_cap_mb, tuple) for one in found.candidates)
    if "bucket_cap_mb_list" in ddp_options():
        assert any(isinstance(one.plan.bucket_cap_mb, tuple) for one in _list(_SLOW, ("bf16",)).candidates)


@pytest.mark.parametrize("lossy", [(), ("int8",)])
def test_a_second_layout_has_far_more_or_fewer_buckets(lossy: tuple[str, ...]) -> None:
    """If it fails, visits are spent on layouts that are alike, though a bucket may cost more than predicted."""
    plans = [one.plan for one in _list(_SLOW, lossy).candidates]
    for hook in {plan.comm_hook for plan in plans}:
        numbers = sorted(len(buckets_of(plan, _GRADIENTS)) for plan in plans if plan.comm_hook == hook)
        assert all(many >= 2 * few for few, many in itertools.pairwise(numbers)), plans
    assert len(plans) > len({plan.comm_hook for plan in plans})


@pytest.mark.parametrize(
    ("promising", "order"),
    [
        # Layouts with each compressor, by the number of buckets and the predicted time. Then bf16, which saves half as
        # much as int8, takes turns with other layouts of the compressors before.
        ("int8 20 0.4, int8 10 0.45, none 10 0.55, bf16 20 0.7, int8 2 0.8", [0, 2, 4, 3, 1]),
        ("int8 20 0.1, int8 5 0.1, int8 2 0.1, int8 1 0.1, none 20 0.5, bf16 20 0.5, fp16 20 0.5", [0, 3, 4, 1, 5, 2]),
    ],
)
def test_compressors_that_promise_less_take_turns_with_layouts(promising: str, order: list[int]) -> None:
    """If it fails, three candidates that are alike are tried first, or a compressor never is."""
    caps = {20: 4.0, 10: 8.0, 5: 16.0, 2: 40.0, 1: 80.0}
    ready: dict[str, Any] = {**ready_compressors(), "none": None}
    candidates = list[Candidate[CommPlan]]()
    for hook, num_buckets, step_s in map(str.split, promising.split(", ")):
        plan = CommPlan(bucket_cap_mb=caps[int(num_buckets)], comm_hook=ready[hook])
        assert len(buckets_of(plan, _GRADIENTS)) == int(num_buckets)
        candidates.append(Candidate(plan, Prediction(step_s=float(step_s), low_s=0.0, high_s=1.0, exposed_s=0.0)))
    basis = Basis(plan=CommPlan(), workload=_WORKLOAD, link=_SLOW, costs=_COSTS, step_s=1.0)
    ordered = calibration_module._ordered_by_diversity(candidates, 1.0, basis)
    assert [candidates.index(candidate) for candidate in ordered] == order


def _calibration(monkeypatch: pytest.MonkeyPatch, limit_s: float, own: Any = None, each_s: float = 0.1) -> Calibration:
    """Returns a calibration that may measure int8 and bf16, each of which takes so long."""
    ticks = {"now_s": 0.0}
    calibration = object.__new__(Calibration)
    vars(calibration).update(
        _strategy=SimpleNamespace(plan=CommPlan(comm_hook=own), root_device=torch.device("cpu"), world_size=2),
        _options=TuneOptions(lossy=(_INT8, _BF16)),
        _times=SimpleNamespace(gradients=list),
        _limit_s=limit_s,
        not_measured=[],
    )

    def measure(compressors: list[Any], *args: Any) -> dict[Any, None]:
        ticks["now_s"] += each_s
        return dict.fromkeys(compressors)

    monkeypatch.setattr(calibration_module, "measure_costs", measure)
    monkeypatch.setattr(calibration_module, "time", SimpleNamespace(perf_counter=lambda: ticks["now_s"]))
    return calibration


@pytest.mark.parametrize(("limit_s", "num_measured"), [(0.1, 0), (0.35, 1), (10.0, 2)])
def test_compressors_are_measured_within_a_limit(
    limit_s: float, num_measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a short fit waits for what it cannot pay for, or nobody learns which compressor was left out."""
    lossy, calibration = (_INT8, _BF16), _calibration(monkeypatch, limit_s)
    costs = calibration.measure({})
    assert [*costs] == [None, *lossy[:num_measured]]
    assert calibration.not_measured == [*lossy[num_measured:]]
    calibration.not_measured = []
    earlier: dict[Any, Any] = {_INT8: "earlier", _BF16: "earlier"}
    again = calibration.measure(earlier)
    assert again == {None: None, **earlier, **dict.fromkeys(lossy[:num_measured])}
    assert calibration.not_measured == []


def test_the_compressor_in_use_is_measured_once_whatever_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, nothing is predicted for a user who compresses, or each calibration pays for it again."""
    calibration = _calibration(monkeypatch, 0.0, own=_INT8)
    assert calibration.measure({}) == {_INT8: None}
    assert calibration.not_measured == [_BF16]
    earlier: dict[Any, Any] = {_INT8: "earlier", _BF16: "earlier"}
    assert calibration.measure(earlier) == earlier


def test_a_slow_compressor_is_expected_to_be_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a machine on which measuring takes long exceeds the limit."""
    calibration = _calibration(monkeypatch, 1.1, each_s=0.4)
    assert [*calibration.measure({})] == [None, _INT8]


def test_a_search_expects_the_longest_predicted_time_and_more_of_lossy_plans() -> None:
    """If it fails, a slow candidate is tried as if it cost nothing, or a fit compresses where that saves nothing."""
    plain, lossy = (
        Candidate(CommPlan(comm_hook=hook, bucket_cap_mb=1), Prediction(step_s=2.0, low_s=1.0, high_s=3.0, exposed_s=0))
        for hook in (None, _INT8)
    )
    unknown = Candidate(plain.plan, Prediction(step_s=math.nan, low_s=math.nan, high_s=math.nan, exposed_s=0))
    found = Shortlist(plain, (lossy, plain, unknown), {})
    assert found.expected == [1.0, 1.5, 1.5, None]
    assert found.handicaps == {1: 0.02}
    assert Shortlist(lossy, (lossy, plain), {}).handicaps == {}

"""Predictions of DiLoCo: worlds that can be worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_predict import COSTS, INT8, LINK, MIB, WORK

from lightning_commopt import CommPlan, DiLoCoPlan
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.cost.diloco import CHECK_LOSS, diloco_candidates, predict_diloco
from lightning_commopt.measure.verdict import verdict
from support.sample_metrics import sample_metrics

BASIS = Basis(plan=CommPlan(bucket_cap_mb=100), workload=WORK, link=LINK, costs=COSTS, step_s=1.1)
LOCAL_S = 0.7  # forward, backward and the rest
EXCHANGE_S = 0.4  # 4 MiB at 0.1 s each


@pytest.mark.parametrize(
    ("options", "waited_s"),
    [
        ({"sync_every": 1}, EXCHANGE_S),
        ({"sync_every": 10}, EXCHANGE_S / 10),
        ({"sync_every": 10, "fragments": 4}, EXCHANGE_S / 10),
        ({"sync_every": 10, "overlap": 1}, 0.0),
        ({"sync_every": 10, "comm_hook": INT8}, EXCHANGE_S * (1 + 4 / 128) / 4 / 10),
    ],
)
def test_a_step_has_its_share_of_the_exchanges(options: dict[str, Any], waited_s: float) -> None:
    prediction = predict_diloco(DiLoCoPlan(**options), BASIS)
    assert prediction.step_s == pytest.approx(LOCAL_S + waited_s, rel=1e-3)
    assert prediction.exposed_s == pytest.approx(waited_s, rel=1e-3)
    assert prediction.low_s < prediction.step_s < prediction.high_s
    assert CHECK_LOSS in prediction.reasons


def test_what_overlap_does_not_hide_is_waited_for_in_each_fragment() -> None:
    slow = dataclasses.replace(BASIS, link=dataclasses.replace(LINK, s_per_byte=1.0 / MIB))
    plan = DiLoCoPlan(sync_every=10, fragments=2, overlap=1)
    assert predict_diloco(plan, slow).exposed_s == pytest.approx(2 * (2.0 - LOCAL_S) / 10)
    # At worst the exchange is slow and the step that hides it is fast.
    local, prediction = slow.predict(CommPlan(), num_ranks=1), predict_diloco(plan, slow)
    for own_s, ratio, hiding_s, whole_s in (
        (local.high_s, slow.link.high_ratio, local.low_s, prediction.high_s),
        (local.low_s, slow.link.low_ratio, local.high_s, prediction.low_s),
    ):
        assert whole_s == pytest.approx(own_s + 2 * (2.0 * ratio - hiding_s) / 10)
    plans = [plan for plan, _ in diloco_candidates(slow)]
    assert plans == [*(DiLoCoPlan(sync_every=every) for every in (10, 30, 100)), DiLoCoPlan(overlap=6)]


def test_gradients_in_16_bits_have_differences_in_32() -> None:
    """If it fails, DiLoCo of a model in bf16-true is promised to send half of what it sends."""
    short = tuple(gradient._replace(itemsize=2) for gradient in WORK.gradients)
    basis = dataclasses.replace(BASIS, workload=dataclasses.replace(WORK, gradients=short))
    assert predict_diloco(DiLoCoPlan(), basis).exposed_s == predict_diloco(DiLoCoPlan(), BASIS).exposed_s


def test_more_ranks_take_longer_and_one_rank_exchanges_nothing() -> None:
    assert predict_diloco(DiLoCoPlan(), BASIS, num_ranks=4).exposed_s == pytest.approx(1.5 * EXCHANGE_S / 30)
    assert predict_diloco(DiLoCoPlan(), BASIS, num_ranks=1).exposed_s == 0
    assert diloco_candidates(BASIS, num_ranks=1) == []


def test_a_verdict_recommends_it_with_the_check_of_the_loss() -> None:
    """If it fails, somebody takes DiLoCo for exact, or never hears of it at a link on which nothing else helps."""
    slow = dataclasses.replace(BASIS, link=dataclasses.replace(LINK, s_per_byte=10.0 / MIB), step_s=40.7)
    metrics = sample_metrics(step_s=40.7, comm_s=40.4, exposed_s=40.0, backward_s=40.4, exposed_wait_s=0.0)
    result = verdict(metrics, world_size=2, comm_hook="none", is_lossy=False, forecasts=forecasts(slow))
    (text,) = (text for text in result.recommendations if "CommOptDiLoCo" in text)
    assert text.startswith("CommOptDiLoCo(sync_every=30), lossy: ")
    assert text.endswith(" Compare the final metric as well.")

"""The verdict: the right cause comes first, settings are named, and bounds follow from the numbers."""

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.operations import Operation
from lightning_commopt.measure.verdict import Verdict, verdict
from support.sample_metrics import sample_metrics

SETTING = re.compile(
    r"self.manual_backward|bucket_cap_mb=|comm_hook=|accumulate_grad_batches=|num_workers=|strategy=|rank \d|batches of"
)

LOSSLESS = ("none", "all_reduce", "NaiveDP", "InterleavedDP")
FORECASTS = [
    Forecast("bucket_cap_mb=5", False, 0.0, 0.68, 0.65, 0.7),
    Forecast('comm_hook="bf16"', True, 0.008, 0.56, 0.5, 0.6),
    Forecast('comm_hook="int8"', True, 0.02, 0.5, 0.4, 0.56),
    Forecast('comm_hook="int4", bucket_cap_mb=50', True, 0.2, 0.48, 0.4, 0.5),
    Forecast('comm_hook="powersgd"', True, 1.0, 0.42, 0.4, 0.45),
    Forecast("Trainer(accumulate_grad_batches=4)", False, 1.0, 0.5, 0.4, 0.6, "a step takes more"),
]
FORECASTS = [forecast._replace(present_s=0.7) for forecast in FORECASTS]
NO_COMMUNICATION: dict[str, Any] = dict.fromkeys(("comm_s", "wire_s", "exposed_s", "exposed_wait_s", "wait_s"), 0.0)


def judged(
    comm_hook: str = "none", world_size: int = 8, forecasts: Sequence[Forecast] = tuple(FORECASTS), **metrics: float
) -> Verdict:
    is_lossy = comm_hook not in LOSSLESS
    result = verdict(
        sample_metrics(**metrics),
        world_size=world_size,
        comm_hook=comm_hook,
        is_lossy=is_lossy,
        forecasts=forecasts,
    )
    assert all(SETTING.search(text) for text in result.recommendations)
    assert not re.search(r"nan|inf\b|-\d|[{}]", " ".join((result.headline, *result.recommendations)))
    return result


def about(result: Verdict, setting: str) -> str:
    """Returns the one recommendation that names a setting, or an empty text."""
    found = [text for text in result.recommendations if setting in text]
    assert len(found) <= 1
    return found[0] if found else ""


@pytest.mark.parametrize(
    ("exposed_s", "headline", "recommends"),
    [
        (None, "How long the step waits for them is not measured.", True),
        (0.3, "and 45 % of the step waits for them. If all of it were hidden: at most 1.82 times as fast.", True),
        (0.005, "and they are hidden: 0.75 % of the step waits for them. Without any: at most 1.01 times", False),
    ],
)
def test_collectives_of_sharded_models(exposed_s: float | None, headline: str, recommends: bool) -> None:
    """If it fails, who trains with FSDP2 on CUDA is told nothing, or to compress what nobody waits for."""
    sharded = [
        Operation("all_gather", "forward", "", 4, 4e6, 0.2, exposed_s=exposed_s and exposed_s / 2),
        Operation("reduce_scatter", "backward", "", 4, 4e6, 0.2, exposed_s=exposed_s and exposed_s / 2),
    ]
    metrics = sample_metrics(**NO_COMMUNICATION)
    metrics["step_s"] = 2 / 3
    found = verdict(metrics, world_size=2, comm_hook="ModelParallelStrategy", is_lossy=False, operations=sharded)
    assert headline in found.headline
    assert bool(about(found, 'comm_hook="int8"')) == recommends


def bound(text: str) -> float:
    match = re.search(r"at most (\d+\.\d+) times as fast", text)
    assert match is not None
    return float(match[1])


def test_the_headline_says_what_is_exposed_and_what_could_be_won() -> None:
    result = judged()
    assert "43 %" in result.headline
    assert bound(result.headline) == pytest.approx(0.7 / 0.4, abs=0.01)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (
            Operation("broadcast", "data", "lightning", 4.0, 32.0, 0.007),
            "4 broadcasts a step are Lightning's own check for SIGTERM before every batch (1.0 % of the step):"
            " sigterm_every_n_steps=10, of CommOptDDP and CommOptModelParallel, checks every tenth step.",
        ),
        (Operation("broadcast", "data", "lightning", 1.0, 8.0, 0.007), None),
        (Operation("all_reduce", "data", "lightning", 0.1, 0.4, 0.007), None),
        (
            Operation("all_reduce", "forward", "", 12.0, 48.0, 0.07),
            "10 % of the step is all_reduce in forward, 12 a step of 4 bytes: log less often, or without sync_dist,"
            " if it is metrics.",
        ),
        (
            Operation("broadcast", "forward", "", 2.0, 72.0, 0.07),
            "10 % of the step is broadcast in forward, 2 a step of 36 bytes: broadcast_buffers=False, if these are"
            " DDP's buffers and ranks may keep their own.",
        ),
        (Operation("all_reduce", "forward", "", 12.0, 48.0, 0.007), None),
        (Operation("all_reduce", "forward", "", 12.0, 48e6, 0.07), None),
        (Operation("all_reduce", "backward", "", 12.0, 48.0, 0.07), None),
        (Operation("all_reduce", "forward", "", 12.0, 48.0, None), None),
        (Operation("send", "forward", "int8 all-gather", 12.0, 48.0, 0.07), None),
    ],
)
def test_collectives_that_are_not_gradient_sync(operation: Operation, text: str | None) -> None:
    """If it fails, gradients or rare checks are taken for metrics, or what costs a tenth of a step is not mentioned."""
    settings: dict[str, Any] = {"world_size": 8, "comm_hook": "none", "is_lossy": False}
    usual = verdict(sample_metrics(), **settings).recommendations
    found = verdict(sample_metrics(), **settings, operations=[operation]).recommendations
    assert found == (*usual, *([text] if text else []))


def test_hidden_communication_needs_nothing() -> None:
    result = judged(exposed_s=0.02, exposed_wait_s=0.005)
    assert result.headline.startswith("Communication is hidden: 2.9 %")
    assert bound(result.headline) == pytest.approx(0.7 / 0.68, abs=0.01)
    assert result.recommendations == ()


def test_a_compressor_that_hides_nothing_could_be_off() -> None:
    """If it fails, a lossy plan stays where an exact one is as fast."""
    exact = Forecast('comm_hook="none"', False, 0.0, 0.7, 0.68, 0.72, present_s=0.7)
    hidden: dict[str, Any] = {"exposed_s": 0.02, "exposed_wait_s": 0.0}
    for forecast, expected in (
        (exact, "about as fast"),
        (exact._replace(step_s=0.6, low_s=0.55, high_s=0.65), "faster"),
    ):
        assert judged(comm_hook="bf16", forecasts=[forecast], **hidden).recommendations == (
            f'comm_hook="none", lossless: expected to be {expected}, and "bf16" is lossy.',
        )
    slower = exact._replace(step_s=0.75, high_s=0.8)
    assert judged(comm_hook="bf16", forecasts=[slower], **hidden).recommendations == ()
    assert judged(comm_hook="all_reduce", forecasts=[exact], **hidden).recommendations == ()


def test_a_compressor_that_costs_more_than_it_saves_is_named() -> None:
    """If it fails, a user who began with a compressor on a fast link keeps it."""
    exact = Forecast('comm_hook="none"', False, 0.0, 0.5, 0.45, 0.55, present_s=0.7)
    result = judged(comm_hook="int8", forecasts=[exact])
    assert result.recommendations == (
        'comm_hook="int8" takes more time than it saves on this link.',
        'comm_hook="none", lossless: 1.40 (1.27 to 1.56) times as fast.',
    )
    unsure = exact._replace(high_s=0.72)
    assert not about(judged(comm_hook="int8", forecasts=[unsure]), "than it saves")


@pytest.mark.parametrize("seed", range(50))
def test_no_prediction_contradicts_the_headline(seed: int) -> None:
    """If it fails, a plan is said to be faster than a step without any communication would be, or than it may be."""
    drawn = random.Random(seed)
    exposed_s = drawn.uniform(0.04, 0.4)
    predicted = []
    for forecast in FORECASTS:
        step_s = drawn.uniform(0.1, 0.9)
        low_s, high_s = step_s * drawn.uniform(0.3, 1), step_s * drawn.uniform(1, 2)
        predicted.append(forecast._replace(step_s=step_s, low_s=low_s, high_s=high_s, present_s=0.7))
    result = judged(forecasts=predicted, exposed_s=exposed_s, exposed_wait_s=0.0)
    limit = bound(result.headline)
    for text in result.recommendations:
        for expected, low, high in re.findall(r"(\d+\.\d+) \((\d+\.\d+) to (\d+\.\d+)\) times", text):
            assert 1 <= float(low) <= float(expected) <= float(high) <= limit


def test_nothing_is_recommended_that_may_be_slower() -> None:
    """If it fails, users change their plan for what is within the noise."""
    unsure = [forecast._replace(high_s=0.71) for forecast in FORECASTS]
    assert judged(forecasts=unsure).recommendations == (
        "No comm_hook= or bucket_cap_mb= is clearly faster: no predicted speed-up is above 1 with its whole interval.",
    )


def test_a_bucket_size_is_not_lossy() -> None:
    other_buckets = Forecast("bucket_cap_mb=5", False, 0.0, 0.5, 0.45, 0.55, present_s=0.7)
    for comm_hook, text in (("none", "bucket_cap_mb=5, lossless: 1.40"), ("int8", "bucket_cap_mb=5: 1.40")):
        assert judged(comm_hook=comm_hook, forecasts=[other_buckets]).recommendations[0].startswith(text)


def test_a_straggler_comes_first() -> None:
    result = judged(forecasts=(), straggler_rank=3.0, straggler_slowdown=0.25, exposed_s=0.12, exposed_wait_s=0.1)
    assert "rank 3" in result.headline
    assert "25 %" in result.headline
    assert "No compression helps" in result.headline
    assert "rank 3" in result.recommendations[0]
    assert bound(result.recommendations[0]) == pytest.approx(0.7 / (0.7 - 0.25 * 0.58), abs=0.01)
    assert len(result.recommendations) == 1


def test_what_a_straggler_leaves_is_worth_something_as_well() -> None:
    result = judged(straggler_rank=3.0, straggler_slowdown=0.25, exposed_s=0.3, exposed_wait_s=0.1)
    assert "rank 3" in result.recommendations[0]
    assert about(result, '"bf16"')
    assert not about(result, "batches of the same size")


def test_exposed_time_that_is_waiting_is_no_compressors_business() -> None:
    result = judged(forecasts=(), exposed_s=0.1, exposed_wait_s=0.09, wait_s=0.1)
    (text,) = result.recommendations
    assert "batches of the same size" in text
    assert "90 %" in text
    assert bound(text) == pytest.approx(0.7 / 0.61, abs=0.01)


@pytest.mark.parametrize("strategy", ["NaiveDP", "InterleavedDP"])
def test_single_gradients_want_buckets(strategy: str) -> None:
    first = judged(comm_hook=strategy, exposed_s=0.4, exposed_wait_s=0.0).recommendations[0]
    assert first.startswith("strategy=CommOptDDP(), lossless")


def test_other_plans_come_with_a_speed_up_and_its_interval() -> None:
    """If it fails, the verdict has other numbers than the predictions."""
    result = judged()
    assert about(result, '"bf16"') == 'comm_hook="bf16", lossy: 1.25 (1.17 to 1.40) times as fast.'
    assert about(result, '"int8"') == 'comm_hook="int8", lossy: 1.40 (1.25 to 1.75) times as fast.'
    assert about(result, '"powersgd"').endswith("1.67 (1.56 to 1.75) times as fast. Compare the final metric as well.")
    accumulate = "Trainer(accumulate_grad_batches=4), exact: 1.40 (1.17 to 1.75) times as fast; a step takes more."
    assert about(result, "accumulate") == accumulate


def test_what_saves_little_is_left_out() -> None:
    """Buckets would save 3 % of the step, and int4 3 % more than int8, which is more exact."""
    assert not about(judged(), "bucket_cap_mb=5")
    assert not about(judged(), '"int4"')
    hardly_faster = [one._replace(step_s=0.69) for one in FORECASTS]
    assert not any("times as fast" in text for text in judged(forecasts=hardly_faster).recommendations)


def test_the_statistic_that_is_predicted_is_named() -> None:
    """If it fails, readers compare a predicted median with a measured mean."""
    assert judged().note == "Speed-ups are for the median step, now 700 ms, with 95 % intervals."
    assert judged(forecasts=()).note == ""


def test_without_predictions_there_is_only_the_headline() -> None:
    assert judged(forecasts=()).recommendations == ()


def test_data_that_dominates() -> None:
    result = judged(data_s=0.4, step_s=1.0, exposed_s=0.1, exposed_wait_s=0.0)
    assert result.headline == "40 % of the step waits for data, and 10 % for communication."
    assert "num_workers=" in result.recommendations[0]
    assert bound(result.recommendations[0]) == pytest.approx(1 / 0.6, abs=0.01)


def test_data_comes_last_where_communication_takes_more() -> None:
    result = judged(data_s=0.2)
    assert "communication" in result.headline
    assert "num_workers=" in result.recommendations[-1]
    assert not about(judged(data_s=0.1), "num_workers=")


@pytest.mark.parametrize(("data_s", "num_recommendations"), [(0.01, 0), (0.3, 1)])
def test_one_rank(data_s: float, num_recommendations: int) -> None:
    result = judged(world_size=1, data_s=data_s, **NO_COMMUNICATION)
    assert result.headline.startswith("One rank")
    assert len(result.recommendations) == num_recommendations


@pytest.mark.parametrize(
    ("comm_hook", "advice"), [("none", "self.manual_backward(loss)"), ("MyStrategy", 'strategy="commopt_ddp"')]
)
def test_a_sync_that_is_not_observed(comm_hook: str, advice: str) -> None:
    """If it fails, ranks with weights of their own are advised to use the strategy that they have."""
    result = judged(comm_hook=comm_hook, data_s=0.3, **NO_COMMUNICATION)
    assert "No gradient sync was observed on 8 ranks" in result.headline
    assert advice in result.recommendations[0]
    assert "num_workers=" in result.recommendations[1]


def test_reduce_scatters_of_accumulated_batches() -> None:
    """If it fails, nobody hears that Lightning reduce-scatters the gradients of every batch."""
    nothing = {name: 0.0 for name in sample_metrics() if name in ("comm_s", "exposed_s", "exposed_wait_s")}
    scattered = Operation("reduce_scatter", "backward", "", 12.0, 8e6, 0.1, num_phases=4.0)
    for comm_hook, operation, is_named in (
        ("ModelParallelStrategy", scattered, True),
        ("ModelParallelStrategy", scattered._replace(num_phases=1.0), False),
        ("CommOptModelParallel", scattered, False),
    ):
        found = verdict(
            {**sample_metrics(), **nothing}, world_size=8, comm_hook=comm_hook, is_lossy=False, operations=[operation]
        )
        named = [text for text in found.recommendations if "12 reduce-scatters a step" in text and "become 3;" in text]
        assert len(named) == is_named


def test_collectives_of_sharded_training() -> None:
    """FSDP2's gradient sync is no bucket of ours; its collectives are counted all the same."""
    operations = [
        Operation("all_gather", "forward", "", 2.0, 8e6, 0.01),
        Operation("reduce_scatter", "backward", "", 2.0, 8e6, None),
        Operation("broadcast", "data", "lightning", 1.0, 8.0, 0.001),
    ]
    nothing = {name: 0.0 for name in sample_metrics() if name in ("comm_s", "exposed_s", "exposed_wait_s")}
    settings: dict[str, Any] = {"world_size": 8, "comm_hook": "none", "is_lossy": False}
    uncompressed_part = Operation("reduce_scatter", "backward", "uncompressed reduce-scatter", 2.0, 8e6, None)
    found, compressed, unseen = (
        verdict({**sample_metrics(), **nothing}, **settings, operations=some)
        for some in (operations, [operations[0], uncompressed_part], operations[2:])
    )
    assert "4 collectives a step, of 16.0 MB in all." in found.headline
    assert 'CommOptModelParallel(comm_hook="int8")' in found.recommendations[0]
    assert "8.00 MB" in found.recommendations[0]
    assert not any("strategy=" in text or "ModelParallel" in text for text in compressed.recommendations)
    assert "No gradient sync" in unseen.headline


def test_before_the_first_step() -> None:
    """All of it is NaN then; there are no recommendations, and no error."""
    nothing = {name: float("nan") for name in sample_metrics() if "straggler" not in name}
    result = verdict({**sample_metrics(), **nothing}, world_size=8, comm_hook="none", is_lossy=False)
    assert "No gradient sync" in result.headline
    assert len(result.recommendations) == 1


def test_no_promise_without_numbers() -> None:
    """Marks that do not fit together, as more exposed time than step, make no bound."""
    assert "unknown" in judged(exposed_s=0.8, comm_s=0.8).headline


def test_a_verdict_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        judged().headline = ""  # type: ignore[misc]


def test_a_missing_metric_is_an_error() -> None:
    metrics = sample_metrics()
    del metrics["exposed_s"]
    with pytest.raises(KeyError, match="exposed_s"):
        verdict(metrics, world_size=2, comm_hook="none", is_lossy=False)

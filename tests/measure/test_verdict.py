"""The verdict: the right cause comes first, settings are named, and bounds follow from the numbers."""

import dataclasses
import re
from typing import Any

import pytest

from lightning_commopt.compressors.catalog import example_compressors, recommendations
from lightning_commopt.measure.operations import Operation
from lightning_commopt.measure.verdict import Verdict, verdict
from support.sample_metrics import sample_metrics

SETTING = re.compile(r"bucket_cap_mb=|comm_hook=|accumulate_grad_batches=|num_workers=|strategy=|rank \d|batches of")

LOSSLESS = ("none", "all_reduce", "NaiveDP", "InterleavedDP")
NO_COMMUNICATION: dict[str, Any] = dict.fromkeys(("comm_s", "wire_s", "exposed_s", "exposed_wait_s", "wait_s"), 0.0)


def judged(num_buckets: int = 12, comm_hook: str = "none", world_size: int = 8, **metrics: float) -> Verdict:
    is_lossy = comm_hook not in LOSSLESS
    result = verdict(
        sample_metrics(**metrics),
        world_size=world_size,
        num_buckets=num_buckets,
        comm_hook=comm_hook,
        is_lossy=is_lossy,
        **recommendations(example_compressors().get(comm_hook), is_lossy=is_lossy),
    )
    assert all(SETTING.search(text) for text in result.recommendations)
    assert not re.search(r"nan|inf\b|-\d|[{}]", " ".join((result.headline, *result.recommendations)))
    return result


def about(result: Verdict, setting: str) -> str:
    """Returns the one recommendation that names a setting, or an empty text."""
    found = [text for text in result.recommendations if setting in text]
    assert len(found) <= 1
    return found[0] if found else ""


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
            " CommOptDDP(sigterm_every_n_steps=10) checks every tenth step.",
        ),
        (Operation("broadcast", "data", "lightning", 1.0, 8.0, 0.007), None),
        (Operation("all_reduce", "data", "lightning", 0.1, 0.4, 0.007), None),
        (
            Operation("all_reduce", "forward", "", 12.0, 48.0, 0.07),
            "10 % of the step is all_reduce of 4 bytes in forward, 12 times: log less often, or without sync_dist,"
            " if it is metrics.",
        ),
        (Operation("all_reduce", "forward", "", 12.0, 48.0, 0.007), None),
        (Operation("all_reduce", "forward", "", 12.0, 48e6, 0.07), None),
        (Operation("all_reduce", "backward", "", 12.0, 48.0, 0.07), None),
        (Operation("all_reduce", "forward", "", 12.0, 48.0, None), None),
    ],
)
def test_collectives_that_are_not_gradient_sync(operation: Operation, text: str | None) -> None:
    """If it fails, gradients or rare checks are taken for metrics, or what costs a tenth of a step is not mentioned."""
    settings: dict[str, Any] = {"world_size": 8, "num_buckets": 12, "comm_hook": "none", "is_lossy": False}
    usual = verdict(sample_metrics(), **settings).recommendations
    found = verdict(sample_metrics(), **settings, operations=[operation]).recommendations
    assert found == (*usual, *([text] if text else []))


def test_hidden_communication_needs_nothing() -> None:
    result = judged(exposed_s=0.02, exposed_wait_s=0.005)
    assert result.headline.startswith("Communication is hidden: 2.9 %")
    assert bound(result.headline) == pytest.approx(0.7 / 0.68, abs=0.01)
    assert result.recommendations == ()


def test_a_compressor_that_hides_nothing_could_be_off() -> None:
    result = judged(comm_hook="bf16", exposed_s=0.02, exposed_wait_s=0.0, compression_s=0.05, compression_ratio=2.0)
    (text,) = result.recommendations
    assert 'comm_hook="none"' in text
    assert "lossy" in text
    assert "50.0 ms" in text
    assert "2.0 times the bytes" in text
    assert judged(comm_hook="all_reduce", exposed_s=0.02, exposed_wait_s=0.0).recommendations == ()


def test_a_straggler_comes_first() -> None:
    result = judged(straggler_rank=3.0, straggler_slowdown=0.25, exposed_s=0.12, exposed_wait_s=0.1)
    assert "rank 3" in result.headline
    assert "25 %" in result.headline
    assert "No compression helps" in result.headline
    assert "rank 3" in result.recommendations[0]
    assert bound(result.recommendations[0]) == pytest.approx(0.7 / (0.7 - 0.25 * 0.58), abs=0.01)
    assert len(result.recommendations) == 1  # what is left when all have come is too little to do something about


def test_what_a_straggler_leaves_is_worth_something_as_well() -> None:
    result = judged(straggler_rank=3.0, straggler_slowdown=0.25, exposed_s=0.3, exposed_wait_s=0.1)
    assert "rank 3" in result.recommendations[0]
    assert about(result, '"bf16"')
    assert not about(result, "batches of the same size")


def test_exposed_time_that_is_waiting_is_no_compressors_business() -> None:
    result = judged(exposed_s=0.1, exposed_wait_s=0.09, wait_s=0.1)
    (text,) = result.recommendations
    assert "batches of the same size" in text
    assert "90 %" in text
    assert bound(text) == pytest.approx(0.7 / 0.61, abs=0.01)


def test_one_bucket() -> None:
    result = judged(num_buckets=1)
    text = about(result, "bucket_cap_mb=100")
    assert result.recommendations[0] == text
    assert "lossless" in text
    assert "about 12" in text
    # Backward computes for 200 ms, and hides 20 ms of communication now.
    assert "180 ms" in text
    assert bound(text) == pytest.approx(0.7 / 0.52, abs=0.01)


@pytest.mark.parametrize(
    ("gradient_bytes", "num_buckets", "cap"),
    [(1.22e9, 1, 100), (1.22e9, 4, 100), (100e6, 1, 10), (5e6, 1, 1), (8e9, 2, 200)],
)
def test_the_size_makes_about_ten_buckets(gradient_bytes: float, num_buckets: int, cap: int) -> None:
    assert about(judged(num_buckets=num_buckets, gradient_bytes=gradient_bytes), f"bucket_cap_mb={cap},")


def test_no_bucket_size_helps() -> None:
    assert not about(judged(num_buckets=1, gradient_bytes=0.5e6), "bucket_cap_mb")  # too small to cut
    assert not about(judged(num_buckets=1, backward_s=0.31, comm_s=0.3), "bucket_cap_mb")  # nothing to hide behind
    assert not about(judged(num_buckets=12), "bucket_cap_mb")
    assert not about(judged(num_buckets=0), "bucket_cap_mb")  # nobody sees them


def test_tiny_buckets() -> None:
    text = about(judged(num_buckets=400, gradient_bytes=40e6), "bucket_cap_mb")
    assert text.startswith("bucket_cap_mb=2, lossless")
    assert "400 buckets of 0.095 MiB" in text
    assert "about 20" in text


@pytest.mark.parametrize("strategy", ["NaiveDP", "InterleavedDP"])
def test_single_gradients_want_buckets(strategy: str) -> None:
    first = judged(comm_hook=strategy, exposed_s=0.4, exposed_wait_s=0.0).recommendations[0]
    assert first.startswith("strategy=CommOptDDP(), lossless")


def test_compressors_are_lossy_and_bounded() -> None:
    result = judged()
    bf16, int8 = about(result, '"bf16"'), about(result, '"int8"')
    assert "lossy" in bf16
    assert "lossy" in int8
    # 300 ms are on the wire without waiting; half of them, and three quarters.
    assert bound(bf16) == pytest.approx(0.7 / 0.55, abs=0.01)
    assert bound(int8) == pytest.approx(0.7 / 0.475, abs=0.01)
    assert "half the bytes" in bf16
    assert "a quarter of the bytes" in int8
    assert not about(judged(step_s=0.8), '"int4"')  # an eighth of 300 ms is too little


def test_int4_where_an_eighth_more_is_worth_it() -> None:
    text = about(judged(backward_s=0.4, exposed_s=0.35, comm_s=0.37), '"int4"')
    assert "lossy" in text
    assert bound(text) == pytest.approx(0.7 / (0.7 - 0.86 * 0.35), abs=0.02)


def test_powersgd_only_where_backward_is_far_too_short() -> None:
    assert not about(judged(), '"powersgd"')
    text = about(judged(backward_s=0.4, exposed_s=0.35, comm_s=0.37), '"powersgd"')
    assert "lossy" in text
    assert "350 ms" in text
    assert "50.0 ms" in text
    assert bound(text) == pytest.approx(0.7 / 0.36, abs=0.01)


@pytest.mark.parametrize(
    ("comm_hook", "expected"),
    [
        ("bf16", ["int8", "powersgd", "accumulate"]),
        ("fp16", ["int8", "powersgd", "accumulate"]),
        ("int8", ["int4", "powersgd", "accumulate"]),
        ("int4", ["powersgd", "accumulate"]),
        ("hierarchical", ["powersgd", "accumulate"]),
        ("powersgd", ["accumulate"]),
        ("a hook of a user", ["powersgd", "accumulate"]),
        ("alternating_powersgd", ["accumulate"]),
    ],
)
def test_what_comes_after_a_compressor(comm_hook: str, expected: list[str]) -> None:
    result = judged(comm_hook=comm_hook, compression_ratio=2.0, backward_s=0.4, exposed_s=0.35, comm_s=0.37)
    assert len(result.recommendations) == len(expected)
    assert all(name in text for name, text in zip(expected, result.recommendations, strict=True))


@pytest.mark.parametrize(
    ("comm_hook", "cheaper"),
    [
        ("bf16", 'comm_hook="none", lossless'),
        ("powersgd", "a smaller matrix_rank"),
        ("int8", 'comm_hook="bf16", lossy'),
    ],
)
def test_compression_that_takes_longer_than_the_wire(comm_hook: str, cheaper: str) -> None:
    result = judged(comm_hook=comm_hook, compression_s=0.25, compression_ratio=100.0)
    assert cheaper in result.recommendations[0]
    assert "of 320 ms of communication 250 ms are compression" in result.recommendations[0]


def test_fewer_syncs_change_training() -> None:
    text = about(judged(), "accumulate_grad_batches=4")
    assert "changes training" in text
    assert bound(text) == pytest.approx(0.7 / (0.7 - 0.75 * 0.29), abs=0.01)


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
    result = judged(num_buckets=0, world_size=1, data_s=data_s, **NO_COMMUNICATION)
    assert result.headline.startswith("One rank")
    assert len(result.recommendations) == num_recommendations


def test_a_sync_that_is_not_observed() -> None:
    result = judged(num_buckets=0, data_s=0.3, **NO_COMMUNICATION)
    assert "No gradient sync was observed on 8 ranks" in result.headline
    assert 'strategy="commopt_ddp"' in result.recommendations[0]
    assert "num_workers=" in result.recommendations[1]


def test_collectives_of_sharded_training() -> None:
    """FSDP2's gradient sync is no bucket of ours; its collectives are counted all the same."""
    operations = [
        Operation("all_gather", "forward", "", 2.0, 8e6, 0.01),
        Operation("reduce_scatter", "backward", "", 2.0, 8e6, None),
        Operation("broadcast", "data", "lightning", 1.0, 8.0, 0.001),
    ]
    nothing = {name: 0.0 for name in sample_metrics() if name in ("comm_s", "exposed_s", "exposed_wait_s")}
    settings: dict[str, Any] = {"world_size": 8, "num_buckets": 0, "comm_hook": "none", "is_lossy": False}
    found = verdict({**sample_metrics(), **nothing}, **settings, operations=operations).headline
    assert "4 collectives a step, of 16.0 MB in all." in found
    assert (
        "No gradient sync" in verdict({**sample_metrics(), **nothing}, **settings, operations=operations[2:]).headline
    )


def test_before_the_first_step() -> None:
    """All of it is NaN then; there are no recommendations, and no error."""
    nothing = {name: float("nan") for name in sample_metrics() if "straggler" not in name}
    result = verdict({**sample_metrics(), **nothing}, world_size=8, num_buckets=0, comm_hook="none", is_lossy=False)
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
    del metrics["wait_s"]
    with pytest.raises(KeyError, match="wait_s"):
        verdict(metrics, world_size=2, num_buckets=1, comm_hook="none", is_lossy=False)

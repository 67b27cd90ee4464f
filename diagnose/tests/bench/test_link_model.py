"""The link model finds the latency, the bandwidth and the breaks that made the data, and says how far it is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from commopt_diagnose.bench.fit import Point, Segment, fit_segments, time_at
from commopt_diagnose.bench.model import Curve, LinkModel
from commopt_diagnose.bench.result import BenchResult
from diagnose_support.sample_bench import SIZES, result_of, sample


def _line(size: int) -> float:
    return 2e-3 + size / 1e8


def _broken(size: int) -> float:
    return 1e-4 + size / 1e8 if size <= 2**16 else 5e-3 + size / 1e9


def test_latency_and_bandwidth_are_found_through_noise() -> None:
    """If it fails, predictions on a plain link are off."""
    curve = Curve.fit(sample(_line, noise=0.03))
    assert len(curve.segments) == 1
    assert curve.segments[0].latency_s == pytest.approx(2e-3, rel=0.02)
    assert 1 / curve.segments[0].s_per_byte == pytest.approx(1e8, rel=0.02)
    assert curve.median_error is not None
    assert 0 < curve.median_error < 0.03


def test_between_two_segments_the_time_is_interpolated() -> None:
    """If it fails, a size between those that were measured has the time of the largest messages."""
    segments = Segment(8, 100, 1.0, 0.0), Segment(200, 400, 2.0, 0.005)
    sizes = {1: 1.0, 100: 1.0, 150: 2.0, 200: 3.0, 400: 4.0, 600: 5.0}
    assert {size: time_at(segments, size) for size in sizes} == pytest.approx(sizes)


def test_a_break_is_found_where_it_is_and_nowhere_else() -> None:
    """If it fails, a change of algorithm is smeared over its neighbours, or noise makes segments."""
    curve = Curve.fit(sample(_broken, noise=0.02))
    assert [(segment.first_bytes, segment.last_bytes) for segment in curve.segments] == [(8, 2**16), (2**17, 2**26)]
    assert curve.predict(3 * 2**20).time_s == pytest.approx(_broken(3 * 2**20), rel=0.03)
    assert curve.predict(5000).time_s == pytest.approx(_broken(5000), rel=0.03)


@pytest.mark.parametrize("truth", [_line, _broken])
def test_held_out_sizes_are_predicted_and_intervals_hold_them(truth: object) -> None:
    """If it fails, the interval of a prediction promises more than it keeps."""
    assert callable(truth)
    curve = Curve.fit(sample(truth, noise=0.05))
    held_out = [row for size in SIZES[3:-1] if size != 2**16 for row in sample(truth, [size * 3 // 2], noise=0.05)]
    errors = [abs(curve.predict(row.case.size_bytes).time_s / truth(row.case.size_bytes) - 1) for row in held_out]
    assert sorted(errors)[len(errors) // 2] < 0.03
    inside = [
        prediction.low_s <= time_s <= prediction.high_s
        for row in held_out
        for prediction in [curve.predict(row.case.size_bytes)]
        for time_s in row.times_s
    ]
    assert sum(inside) / len(inside) > 0.9


def test_few_points_and_falling_times_make_sense() -> None:
    """If it fails, a short bench crashes the fit, or predicts times below 0."""
    (one,) = fit_segments([Point(1000, 1e-3)])
    assert one.time_s(2000) == pytest.approx(2e-3)
    falling = fit_segments([Point(1000, 2e-3), Point(2000, 1.9e-3), Point(4000, 1.8e-3)])
    assert falling[0].s_per_byte == 0
    assert time_at(falling, 10**9) == pytest.approx(1.9e-3, rel=0.05)
    above = fit_segments([Point(1000, 1e-4), Point(2000, 3e-4)])  # a line through both would begin below 0
    assert above[0].latency_s == 0


def test_a_size_beyond_those_measured_is_marked() -> None:
    curve = Curve.fit(sample(_line))
    assert [curve.predict(size).is_extrapolated for size in (4, 8, 2**26, 2**27)] == [True, False, False, True]
    with pytest.raises(ValueError, match="size_bytes must be at least 1"):
        curve.predict(0)


def test_scopes_have_curves_of_their_own() -> None:
    """If it fails, nodes of several ranks are predicted as if every rank had the whole link."""
    rows = [
        *sample(lambda size: size / 1e9, operation="reduce_scatter", scope="node", num_ranks=4),
        *sample(lambda size: size / 1e8, scope="across", num_ranks=2),
        *sample(lambda size: size / 3e7, num_ranks=8),
    ]
    model = LinkModel.fit(result_of(rows))
    assert model.predict("all_reduce", 4e6, scope="all").time_s == pytest.approx(4e6 / 3e7, rel=0.02)
    assert model.predict("all_reduce", 4e6, scope="across").time_s == pytest.approx(4e6 / 1e8, rel=0.02)
    with pytest.raises(KeyError, match="no curve of 'broadcast'; there are: reduce_scatter, within a node"):
        model.predict("broadcast", 8)


def test_a_model_survives_its_file_and_others_are_refused(tmp_path: Path) -> None:
    """If it fails, a model cannot be kept, or a damaged one predicts."""
    model = LinkModel.fit(result_of(sample(_broken)))
    path = tmp_path / "model.json"
    model.save(path)
    assert LinkModel.load(path) == model
    whole = path.read_text()
    for text in (whole[:400], whole.replace("commopt link model", "commopt bench"), whole.replace("latency_s", "x")):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"model\.json"):
            LinkModel.load(path)
    with pytest.raises(ValueError, match="no case was measured"):
        LinkModel.fit(BenchResult(rows=(), where={}, settings={}))

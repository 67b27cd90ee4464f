"""The table at the end of a fit: whole numbers in 80 columns, and what each cell says."""

import dataclasses
import io

import pytest
from rich.console import Console

from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.operations import OperationTotals
from lightning_commopt.measure.record import Collective, Phase, StepRecord
from lightning_commopt.measure.statistics import TIMES
from lightning_commopt.measure.summary import FitSummary
from lightning_commopt.measure.verdict import Verdict, verdict
from support.narrow import check_numbers_are_whole
from support.sample_metrics import NAN, sample_metrics

FORECASTS = [Forecast("bucket_cap_mb=100", False, 0.0, 0.5, 0.4, 0.6, present_s=0.7)]


def rendered(metrics: dict[str, float], width: int = 80, result: Verdict | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    result = result or verdict(metrics, world_size=8, comm_hook="none", is_lossy=False, forecasts=FORECASTS)
    console.print(FitSummary(metrics=metrics, verdict=result).table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def cells(lines: list[str], label: str) -> list[list[str]]:
    return [line.split(label)[1].replace(" %", "%").split() for line in lines if line.strip().startswith(label)]


def test_rows() -> None:
    lines = rendered(sample_metrics())
    assert cells(lines, "ms") == [["mean", "p50", "p95", "max", "of", "step"]]
    assert cells(lines, "step ") == [["700", "686", "1050", "14000", "100.0%"]]
    assert cells(lines, "data") == [["10.0", "9.80", "15.0", "200", "1.4%"]]
    assert cells(lines, "forward") == [["100", "98.0", "150", "2000", "14.3%"]]
    assert cells(lines, "backward, with exposed") == [["500", "490", "750", "10000", "71.4%"]]
    assert cells(lines, "optimizer") == [["50.0", "49.0", "75.0", "1000", "7.1%"]]
    assert cells(lines, "communication ") == [["320", "314", "480", "6400", "45.7%"]]
    assert cells(lines, "queue") == [["0", "0", "0", "0", "0.0%"]]
    assert cells(lines, "collectives")[0][0] == "320"
    assert cells(lines, "compression") == [["0", "0", "0", "0", "0.0%"]]
    assert cells(lines, "exposed") == [["300", "294", "450", "6000", "42.9%"]]
    assert [row[0] for row in cells(lines, "waiting for others")] == ["20.0", "10.0"]


def test_what_is_below() -> None:
    text = "\n".join(rendered(sample_metrics()))
    assert "1.43 steps/s, 366 samples/s over all ranks" in text
    assert "1.22 GB of gradients per step and rank, 1.22 GB on the wire: ratio 1.00" in text
    assert "4.07 GB/s algorithm bandwidth, 7.12 GB/s bus bandwidth" in text
    assert "43 % of the step waits for communication" in text
    assert " - bucket_cap_mb=100, lossless: 1.40 (1.17 to 1.75) times as fast." in text


@pytest.mark.parametrize("are_known", [True, False])
def test_what_computation_waits_for_has_a_column(are_known: bool) -> None:
    """If it fails, FSDP2's exposed collectives are not shown on CUDA, or a column of dashes is everywhere else."""
    gather = Collective("all_gather", "forward", "", 1000, start_s=0.010, end_s=0.030)
    step = StepRecord(
        step=0,
        num_samples=4,
        phases=(Phase("forward", 0.0, 0.1),),
        buckets=(),
        collectives=(gather, Collective("barrier", "forward", "", 0, None, None)),
        waits=((0.025, 0.050),) if are_known else (),
    )
    totals = OperationTotals()
    totals.add([step, dataclasses.replace(step, collectives=(), waits=())])
    metrics = sample_metrics(step_s=0.1)
    console = Console(file=io.StringIO(), width=80)
    summary = FitSummary(
        metrics=metrics, verdict=Verdict(headline="", recommendations=()), operations=totals.operations()
    )
    console.print(summary.table())
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert f"phase operation calls bytes ms of step{' exposed, ms' if are_known else ''}" in lines
    assert f"forward all_gather 0.5 500 B 10.0 10.0 %{' 2.50' if are_known else ''}" in lines
    assert f"forward barrier 0.5 0 B - -{' -' if are_known else ''}" in lines


EXTREMES = [
    sample_metrics(),
    sample_metrics(step_s=12_345.678, comm_s=4_000.0, exposed_s=3_999.0, backward_s=10_000.0),
    sample_metrics(**{name: value * 1e-4 for name, value in sample_metrics().items() if name in TIMES}),
    sample_metrics(wait_s=1e-9, exposed_wait_s=0.0),
    sample_metrics(gradient_bytes=3.4e12, wire_bytes=12.0, compression_ratio=2.83e11, algorithm_bandwidth=4.2e2),
    sample_metrics(straggler_rank=1023.0, straggler_slowdown=12.5, algorithm_bandwidth=NAN, bus_bandwidth=NAN),
]


@pytest.mark.parametrize("metrics", EXTREMES)
def test_it_fits_into_80_columns(metrics: dict[str, float]) -> None:
    lines, wide = rendered(metrics), rendered(metrics, width=400)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert " ".join(" ".join(lines).split()).replace("─", "") == " ".join(" ".join(wide).split()).replace("─", "")


@pytest.mark.parametrize("metrics", EXTREMES)
def test_no_number_is_cut(metrics: dict[str, float]) -> None:
    """If it fails, the table at the end of a fit loses digits in a narrow terminal."""
    result = verdict(metrics, world_size=8, comm_hook="none", is_lossy=False)
    check_numbers_are_whole(lambda console: console.print(FitSummary(metrics=metrics, verdict=result).table()))


def test_no_rows_of_communication_that_was_not_observed() -> None:
    nothing = dict.fromkeys(("comm_s", "exposed_s", "exposed_wait_s", "wait_s"), 0.0)
    lines = rendered(sample_metrics(**nothing))
    assert cells(lines, "forward")
    assert not cells(lines, "communication")
    assert not any("GB" in line for line in lines)


def test_what_cannot_be_told_is_a_dash() -> None:
    lines = rendered(dict.fromkeys(sample_metrics(), NAN) | {"straggler_rank": -1.0})
    assert cells(lines, "forward") == [["-", "-", "-", "-", "-"]]
    assert " - steps/s, - samples/s over all ranks" in lines


def test_brackets_are_text() -> None:
    """Rich takes [...] in plain strings for markup."""
    result = Verdict(headline="[red]headline[/red]", recommendations=("bucket_cap_mb=[1, 25]",))
    text = "\n".join(rendered(sample_metrics(), result=result))
    assert "[red]headline[/red]" in text
    assert "- bucket_cap_mb=[1, 25]" in text

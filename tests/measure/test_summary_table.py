"""The table at the end of a fit: whole numbers in 80 columns, and what each cell says."""

import dataclasses
import io
from collections.abc import Callable

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


TABLES: dict[str, tuple[dict[str, float], Verdict | None]] = {
    "as usual": (sample_metrics(), None),
    "no communication that was observed": (
        sample_metrics(**dict.fromkeys(("comm_s", "exposed_s", "exposed_wait_s", "wait_s"), 0.0)),
        None,
    ),
    "nothing that can be told": (dict.fromkeys(sample_metrics(), NAN) | {"straggler_rank": -1.0}, None),
    "brackets, which rich takes for markup": (
        sample_metrics(),
        Verdict(headline="[red]headline[/red]", recommendations=("bucket_cap_mb=[1, 25]",)),
    ),
}


def test_tables(golden: Callable[[str, str], None]) -> None:
    """If it fails, a cell shows another number than was measured, or a row that was not measured."""
    blocks = {name: rendered(metrics, result=result) for name, (metrics, result) in TABLES.items()}
    (step,) = (line.split() for line in blocks["as usual"] if line.startswith(("step ", " step ")))
    assert step[1:5] == ["700", "686", "1050", "14000"]
    golden("summary_tables", "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in blocks.items()))


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

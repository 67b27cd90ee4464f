"""What a fit cost: numbers, a verdict and a table, from statistics or from the files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group

from lightning_commopt.measure.files import RankRecords, notices, read_run
from lightning_commopt.measure.statistics import Steps, row
from lightning_commopt.measure.summary_table import summary_table
from lightning_commopt.measure.verdict import Verdict, verdict
from lightning_commopt.text.formatting import count

DEFAULT_NUM_WARMUP_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """What a fit cost.

    Attributes:
        metrics: what `Steps.statistics` gives.
        verdict: on them.
        scope: the steps and ranks that they are of, in words.
    """

    metrics: Mapping[str, float]
    verdict: Verdict
    scope: str

    @classmethod
    def of(cls, steps: Steps, *, world_size: int, num_buckets: int, comm_hook: str, is_lossy: bool) -> FitSummary:
        """Summarizes a fit; for the arguments see `verdict`."""
        metrics = steps.statistics(world_size)
        num_seen = steps.num_ranks
        ranks = count(world_size, "rank") if num_seen == world_size else f"{num_seen} of {world_size} ranks"
        return cls(
            metrics=metrics,
            verdict=verdict(
                metrics, world_size=world_size, num_buckets=num_buckets, comm_hook=comm_hook, is_lossy=is_lossy
            ),
            scope=f"{count(steps.num_steps, 'step')} and {ranks}",
        )

    def table(self) -> Group:
        """Returns the numbers and the verdict, to be printed."""
        return summary_table(self.metrics, self.verdict, scope=self.scope)


def summarize_run(run_dir: str | Path, num_warmup_steps: int | None = None) -> tuple[FitSummary, list[str]]:
    """Summarizes the last fit of a run from ``comm_time/*.jsonl``, whether it has ended or not.

    Only steps of which all ranks have written a record count.

    Args:
        run_dir: the directory that has ``comm_time``.
        num_warmup_steps: first steps of the fit that are left out; None for as many as `CommTimeMonitor` leaves out.

    Returns:
        The summary, and what is missing in the files.

    Raises:
        FileNotFoundError: the run has no records.
        ValueError: it has no steps after the warm-up, or its files cannot be read.
    """
    ranks = read_run(run_dir)
    header = ranks[0].header
    if num_warmup_steps is None:
        num_warmup_steps = int(header.get("num_warmup_steps", DEFAULT_NUM_WARMUP_STEPS))
    common = sorted(set.intersection(*({record.step for record in records.steps} for records in ranks)))
    steps = common[num_warmup_steps:]
    if not steps:
        recorded = f"{run_dir} has {count(len(common), 'step')} that all ranks have recorded"
        raise ValueError(f"{recorded}, and num_warmup_steps={num_warmup_steps} are left out")
    summary = FitSummary.of(
        Steps.of([_rows(records, steps) for records in ranks]).sampled(),
        world_size=ranks[0].world_size,
        num_buckets=len(ranks[0].layouts[-1]),
        **_method(header),
    )
    return summary, notices(ranks)


def _rows(records: RankRecords, steps: Sequence[int]) -> list[list[float]]:
    by_step = {record.step: record for record in records.steps}
    return [row(by_step[step]) for step in steps]


def _method(header: Mapping[str, Any]) -> dict[str, Any]:
    comm_hook = str(header.get("comm_hook", "none"))
    return {"comm_hook": comm_hook, "is_lossy": bool(header.get("is_lossy", comm_hook != "none"))}

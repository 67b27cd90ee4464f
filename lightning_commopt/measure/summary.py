"""The summary of a fit: statistics, verdict and table, from `Steps` or from the files of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_commopt.measure.files import common_steps, notices, read_run
from lightning_commopt.measure.forecasts import read_forecasts
from lightning_commopt.measure.operations import (
    MAX_DECIMALS,
    Operation,
    OperationTotals,
    operation_columns,
    operation_rows,
    size_text,
)
from lightning_commopt.measure.record import is_diloco
from lightning_commopt.measure.statistics import Steps, ratio, row
from lightning_commopt.measure.verdict import Verdict, verdict
from lightning_commopt.text.formatting import count, number, percent
from lightning_commopt.text.terminal import TextTable

DEFAULT_NUM_WARMUP_STEPS = 10  # DDP rebuilds its buckets after the first step; caches and allocators need some more
_PHASES = (
    ("data", "data_s"),
    ("forward", "forward_s"),
    ("backward, with exposed", "backward_s"),
    ("optimizer", "optimizer_s"),
)
_COMMUNICATION = (
    ("communication", "comm_s"),
    ("  queue", "queue_s"),
    ("  compression", "compression_s"),
    ("  collectives", "wire_s"),
    ("    waiting for others", "wait_s"),
    ("exposed", "exposed_s"),
    ("  waiting for others", "exposed_wait_s"),
)
_COLUMNS = {"mean": "", "p50": "_p50", "p95": "_p95", "max": "_max"}
_MIN_SHOWN_SHARE = 0.1  # the share of backward that waits for the host is shown if it is at least this
# rich's padding: lines above, columns to the right, lines below, columns to the left.
_INDENT = (0, 0, 0, 1)
_INDENT_BELOW = (1, 0, 0, 1)  # below an empty line


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """What the steps of a fit cost."""

    metrics: Mapping[str, float]  # the result of `Steps.statistics`
    verdict: Verdict
    scope: str = "steps and ranks"  # how many steps and ranks were measured, in words
    operations: Sequence[Operation] = ()  # what the first rank's collectives cost; empty if none were observed
    host_bound_share: float = math.nan  # `OperationTotals.host_bound_share` of the first rank
    sent: str = "gradients"  # what the ranks send each other

    @classmethod
    def of(
        cls,
        steps: Steps,
        *,
        world_size: int,
        operations: Sequence[Operation] = (),
        host_bound_share: float = math.nan,
        **method: Any,
    ) -> FitSummary:
        """Summarizes a fit; for the arguments see `verdict`."""
        metrics = steps.statistics(world_size)
        num_seen = steps.num_ranks
        ranks = count(world_size, "rank") if num_seen == world_size else f"{num_seen} of {world_size} ranks"
        return cls(
            metrics=metrics,
            verdict=verdict(metrics, world_size=world_size, operations=operations, **method),
            scope=f"{count(steps.num_steps, 'step')} and {ranks}",
            operations=operations,
            host_bound_share=host_bound_share,
            sent="differences" if is_diloco(str(method.get("comm_hook"))) else "gradients",
        )

    def table(self) -> Group:
        """Returns a table for printing, or a list in a narrow terminal, with bandwidths and the verdict below.

        Times are in milliseconds and shares of the step. An unknown number is a dash.
        """
        metrics = self.metrics
        has_comm = metrics["comm_s"] > 0
        rates = [number(metrics[name]) for name in ("steps_per_s", "samples_per_s")]
        lines = [f"{rates[0]} steps/s, {rates[1]} samples/s over all ranks"]
        if has_comm:
            gradients, wire, algorithm, bus = (
                size_text(metrics[name])
                for name in ("gradient_bytes", "wire_bytes", "algorithm_bandwidth", "bus_bandwidth")
            )
            compression = number(metrics["compression_ratio"])
            lines += [
                f"{gradients} of {self.sent} per step and rank, {wire} on the wire: ratio {compression}",
                f"{algorithm}/s algorithm bandwidth, {bus}/s bus bandwidth",
            ]
        rows = operation_rows(self.operations, metrics["step_s"])
        columns = operation_columns(rows)
        if self.host_bound_share >= _MIN_SHOWN_SHARE:
            lines.append(
                f"for {percent(self.host_bound_share)} of backward the first rank's device waited for its host"
            )
        collectives = TextTable(*columns, numbers=columns[2:], title=" Collectives of a step on the first rank")
        for cells in rows:
            collectives.add_row(*cells)
        recommendations = Table.grid(padding=(0, 1))
        for text in self.verdict.recommendations:
            recommendations.add_row("-", Text(text))
        sections = [(("step", "step_s"),), _PHASES, *([_COMMUNICATION] if has_comm else [])]
        return Group(
            _times(metrics, sections, f" Time of a step, over {self.scope}"),
            *([collectives] if self.operations else []),
            Padding(Text("\n".join(lines)), _INDENT),
            Padding(Text(self.verdict.headline, style="bold"), _INDENT_BELOW),
            *([Padding(recommendations, _INDENT)] if self.verdict.recommendations else []),
            *([Padding(Text(self.verdict.note), _INDENT)] if self.verdict.note else []),
        )


def summarize_run(run_dir: str | Path, num_warmup_steps: int | None = None) -> tuple[FitSummary, list[str]]:
    """Summarizes the last fit of a run from ``comm_time/*.jsonl``, also while it trains.

    Only steps that all ranks have recorded count, without the first ``num_warmup_steps``; None for the number that
    `CommTimeMonitor` left out. The second result has a sentence for each part of the run that the files lack.

    Raises:
        FileNotFoundError: the run has no records.
        ValueError: it has no steps after the warm-up, or its files cannot be read.
    """
    ranks = read_run(run_dir)
    header = ranks[0].header
    if num_warmup_steps is None:
        num_warmup_steps = int(header.get("num_warmup_steps", DEFAULT_NUM_WARMUP_STEPS))
    common = common_steps(ranks)
    steps = list(common.values())[num_warmup_steps:]
    if not steps:
        recorded = f"{run_dir} has {count(len(common), 'step')} that all ranks have recorded"
        raise ValueError(f"{recorded}, and all of them are warm-up (num_warmup_steps={num_warmup_steps})")
    comm_hook = str(header.get("comm_hook", "none"))
    operations = OperationTotals()
    operations.add(first for first, *_ in steps)
    summary = FitSummary.of(
        Steps.of([list(map(row, records)) for records in zip(*steps, strict=True)]).sampled(),
        world_size=ranks[0].world_size,
        comm_hook=comm_hook,
        is_lossy=bool(header.get("is_lossy", comm_hook != "none")),
        operations=operations.operations(),
        host_bound_share=operations.host_bound_share,
        forecasts=read_forecasts(Path(run_dir)),
    )
    return summary, notices(ranks)


def _times(metrics: Mapping[str, float], sections: Sequence[Sequence[tuple[str, str]]], title: str) -> TextTable:
    table = TextTable("ms", *_COLUMNS, "of step", numbers=(*_COLUMNS, "of step"), title=title)
    for rows in sections:
        for label, name in rows:
            times = [
                number(1e3 * metrics[f"{name}{suffix}"], max_decimals=MAX_DECIMALS) for suffix in _COLUMNS.values()
            ]
            table.add_row(label, *times, percent(ratio(metrics[name], metrics["step_s"])))
        table.add_section()
    return table

"""Outlook: predictions of a run's plan and its alternatives, for given ranks and link, with a table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from lightning_commopt.compressors import Compressor, compressor_from_config
from lightning_commopt.cost.basis import Basis, basis_of_run, recommended_compressors
from lightning_commopt.cost.candidates import Candidate, best_of_each
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs
from lightning_commopt.cost.diloco import CHECK_LOSS, DiLoCoCandidate, diloco_candidates
from lightning_commopt.cost.predict import Prediction
from lightning_commopt.launch.lab import parse_rate
from lightning_commopt.text.formatting import count, number
from lightning_commopt.text.terminal import TextTable

_MAX_BUCKETS_IN_NAME = 4  # more sizes would fill a terminal's width


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Predictions for one world."""

    title: str  # title of the table, with the run, the ranks and the link
    present: Candidate  # the run's own plan
    others: tuple[Candidate, ...]  # the best plan with each compressor, the fastest first
    diloco: tuple[DiLoCoCandidate, ...] = ()  # plans with fewer exchanges

    def table(self) -> Group:
        columns = ("median step, s", "95 %", "exposed, s", "times as fast", "lossy")
        table = TextTable("plan", *columns, numbers=columns[:-1], title=self.title)
        candidates, now_s = (self.present, *self.others), self.present.prediction.step_s
        for candidate in candidates:
            hook = candidate.plan.comm_hook
            is_lossy = hook is not None and hook.claims.is_lossy
            text = plan_text(candidate)
            if candidate is self.present:
                _add_row(table, f"{text} (as it ran)", candidate.prediction, now_s, is_lossy=is_lossy, speedup="1")
            else:
                _add_row(table, text, candidate.prediction, now_s, is_lossy=is_lossy)
        for plan, prediction in self.diloco:
            _add_row(table, plan.name, prediction, now_s, is_lossy=True)
        predictions = [prediction for _, prediction in (*candidates, *self.diloco)]
        reasons = dict.fromkeys(reason for prediction in predictions for reason in prediction.reasons)
        shown = "\n".join(f"{'' if reason == CHECK_LOSS else 'Assumes: '}{reason}." for reason in reasons)
        return Group(table, Padding(Text(shown), (0, 0, 0, 1)))

    def to_plain(self) -> dict[str, Any]:
        """Returns it in JSON types, times in seconds."""
        return {
            key: [
                {"plan": plan.to_dict(), "name": plan.name, **dataclasses.asdict(prediction)}
                for plan, prediction in predicted
            ]
            for key, predicted in (("plans", (self.present, *self.others)), ("diloco", self.diloco))
        }


def _add_row(
    table: TextTable, text: str, prediction: Prediction, now_s: float, *, is_lossy: bool, speedup: str | None = None
) -> None:
    speedup = speedup or (
        f"{now_s / prediction.step_s:.2f} ({now_s / prediction.high_s:.2f} to {now_s / prediction.low_s:.2f})"
    )
    table.add_row(
        text,
        number(prediction.step_s),
        f"{number(prediction.low_s)} to {number(prediction.high_s)}",
        number(prediction.exposed_s),
        speedup,
        "yes" if is_lossy else "no",
    )


def outlook(
    run_dir: Path,
    *,
    num_ranks: int | None = None,
    link: str | None = None,
    num_batches: int | None = None,
    comm_hooks: Sequence[str] | None = None,
) -> Outlook:
    """Predicts the plan of a run, the best plan with each compressor, and DiLoCo.

    Args:
        run_dir: directory of the run.
        num_ranks: number of ranks; None for the run's own, as for the next two.
        link: rate in the notation of ``tc``.
        num_batches: batches to accumulate for a step.
        comm_hooks: names of compressors; None for the recommended ones, and DiLoCo.

    Raises:
        OSError: the run has no records.
        ValueError: an argument is out of range, or the run does not show enough.
    """
    wanted = _compressors(comm_hooks)
    basis = basis_of_run(run_dir)
    num_measured = basis.workload.num_ranks
    world = dataclasses.replace(basis, costs=dict(basis.costs) | missing_costs(basis, wanted))
    words = [count(num_ranks or num_measured, "rank")]
    if link is not None:
        bits_per_s = parse_rate(link, "--link")
        if bits_per_s is None:
            raise ValueError(f"--link must be a rate such as 25gbit, got {link!r}")
        world = dataclasses.replace(world, link=basis.link.at_rate(bits_per_s))
        words.append(f"a link of {link}")
    if num_batches is not None:
        world = dataclasses.replace(world, workload=basis.workload.accumulating(num_batches))
        words.append("1 batch per step" if num_batches == 1 else f"{num_batches} batches per step")
    present = Candidate(world.plan, world.predict(world.plan, num_ranks=num_ranks))
    best = best_of_each(world, wanted, num_ranks=num_ranks)
    title = f" The median step of {run_dir} with {', '.join(words)}"
    diloco = diloco_candidates(world, num_ranks=num_ranks) if comm_hooks is None else ()
    return Outlook(title=title, present=present, others=tuple(best), diloco=tuple(diloco))


def plan_text(candidate: Candidate) -> str:
    """Returns the name of a plan; of a long list of buckets only their number."""
    cap = candidate.plan.bucket_cap_mb
    if not isinstance(cap, Sequence) or len(cap) <= _MAX_BUCKETS_IN_NAME:
        return candidate.plan.name
    return f"{dataclasses.replace(candidate.plan, bucket_cap_mb=None).name}, list of {count(len(cap), 'bucket')}"


def _compressors(names: Sequence[str] | None) -> list[Compressor | None]:
    if names is None:
        return recommended_compressors()
    try:
        return [compressor_from_config(name) for name in names]
    except (ValueError, TypeError) as error:
        raise ValueError(f"--comm-hook: {error}") from None


def missing_costs(basis: Basis, wanted: Sequence[Compressor | None]) -> dict[Compressor | None, CompressorCost]:
    """Measures compressors that the run has not measured, on this machine, if the run was on CPU.

    They are assumed to slow down in training by the same factor as the compressors that the run has measured.
    """
    missing = [compressor for compressor in wanted if compressor not in basis.costs]
    if not missing or basis.workload.device != "cpu":
        return {}
    if basis.workload.shares_core:
        torch.set_num_threads(1)
    alone = measure_costs(missing, basis.workload.gradients, torch.device("cpu"), basis.workload.num_ranks)
    return {compressor: cost.slower(basis.arithmetic_factor) for compressor, cost in alone.items()}

"""Outlook: predictions of a run's plan and its alternatives, for given ranks and link, with a table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.compressors.configs import sharded_from_config
from lightning_commopt.compressors.hierarchical import Hierarchical
from lightning_commopt.compressors.registry import (
    Entry,
    compressor_name,
    entry_named,
    registered,
    registered_shards,
    shards_entry_named,
)
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.cost.basis import Basis, basis_of_run, recommended_compressors
from lightning_commopt.cost.candidates import best_of_each
from lightning_commopt.cost.compressor_cost import measure_costs
from lightning_commopt.cost.diloco import CHECK_LOSS, diloco_candidates
from lightning_commopt.cost.fsdp2.arithmetic import measure_shard_costs, predicted_shards
from lightning_commopt.cost.fsdp2.basis import Conditions, ShardedBasis, has_sharded_basis, sharded_candidates
from lightning_commopt.cost.predict import Candidate
from lightning_commopt.launch.lab import parse_rate
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan import CommPlan, Plan
from lightning_commopt.plan.base import option_errors
from lightning_commopt.text.formatting import count, number, time_unit
from lightning_commopt.text.terminal import TextTable
from lightning_commopt.text.validation import did_you_mean, normalize_name

_MAX_BUCKETS_IN_NAME = 4  # more sizes would fill a terminal's width


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Predictions for one world."""

    title: str  # title of the table, with the run, the ranks and the link
    present: Candidate[Any]  # the run's own plan
    others: tuple[Candidate[Any], ...]  # other plans, the fastest first
    diloco: tuple[Candidate[Any], ...] = ()  # plans with fewer exchanges

    def table(self) -> Group:
        rows, now_s = (self.present, *self.others, *self.diloco), self.present.prediction.step_s
        unit = time_unit(max(row.prediction.high_s for row in rows))
        columns = (f"step, {unit.name}", "95 %", f"exposed, {unit.name}", "times as fast", "lossy")
        table = TextTable("plan", *columns, numbers=columns[:-1], title=self.title)
        for plan, prediction in rows:
            step, low, high, exposed = (
                number(time_s / unit.size)
                for time_s in (prediction.step_s, prediction.low_s, prediction.high_s, prediction.exposed_s)
            )
            speedup, least, most = (
                number(now_s / time_s, max_decimals=2)
                for time_s in (prediction.step_s, prediction.high_s, prediction.low_s)
            )
            is_present = plan is self.present.plan
            table.add_row(
                plan_text(plan) + (" (as it ran)" if is_present else ""),
                step,
                f"{low} to {high}",
                exposed,
                "1" if is_present else f"{speedup} ({least} to {most})",
                "yes" if plan.is_lossy else "no",
            )
        reasons = dict.fromkeys(reason for row in rows for reason in row.prediction.reasons)
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


def outlook(
    run_dir: Path,
    *,
    num_ranks: int | None = None,
    link: str | None = None,
    num_batches: int | None = None,
    comm_hooks: Sequence[str] | None = None,
) -> Outlook:
    """Predicts the plan of a run of either strategy, the best plan with each compressor, and for DDP also DiLoCo.

    None stands for the run's own ranks, link and batches, and for the recommended compressors and DiLoCo. A ``link`` is
    a rate in the notation of ``tc``.

    Raises:
        OSError: the run has no records.
        ValueError: an argument is out of range, or the run does not show enough.
    """
    bits_per_s = None
    words = []
    if link is not None:
        bits_per_s = parse_rate(link, "--link", is_elsewhere=True)
        words.append(f"a link of {link}")
    if num_batches is not None:
        words.append("1 batch per step" if num_batches == 1 else f"{num_batches} batches per step")
    conditions = Conditions(num_ranks, bits_per_s, num_batches)
    predicted = _sharded if has_sharded_basis(run_dir) else _in_buckets
    num_measured, (present, *others), diloco = predicted(run_dir, conditions, comm_hooks)
    words.insert(0, count(num_ranks or num_measured, "rank"))
    title = f" The median step of {run_dir} with {', '.join(words)}"
    return Outlook(title=title, present=present, others=tuple(others), diloco=tuple(diloco))


_Predicted = tuple[int, list[Candidate[Any]], list[Candidate[Any]]]
"""The ranks of a run, predictions with that of its own plan first, and those of DiLoCo."""


def _in_buckets(run_dir: Path, conditions: Conditions, comm_hooks: Sequence[str] | None) -> _Predicted:
    """Predicts from a run of DDP."""
    with option_errors("--comm-hook: "):
        for name in comm_hooks or ():
            _check_can_be_named(name, entry_named(name), registered())
        wanted = recommended_compressors() if comm_hooks is None else [compressor_from_config(x) for x in comm_hooks]
    basis = basis_of_run(run_dir)
    world = dataclasses.replace(basis, costs=dict(basis.costs) | missing_costs(basis, wanted))
    if conditions.bits_per_s is not None:
        world = dataclasses.replace(world, link=basis.link.at_rate(conditions.bits_per_s))
    if conditions.num_batches is not None:
        world = dataclasses.replace(world, workload=basis.workload.accumulating(conditions.num_batches))
    present = Candidate(world.plan, world.predict(world.plan, num_ranks=conditions.num_ranks))
    best = best_of_each(world, wanted, num_ranks=conditions.num_ranks)
    diloco = diloco_candidates(world, num_ranks=conditions.num_ranks) if comm_hooks is None else []
    return basis.workload.num_ranks, [present, *best], [*diloco]


def _sharded(run_dir: Path, conditions: Conditions, comm_hooks: Sequence[str] | None) -> _Predicted:
    """Predicts from a run of FSDP2."""
    basis = ShardedBasis.load(run_dir / PREDICTION_FILE)
    with option_errors("--comm-hook: "):
        for name in comm_hooks or ():
            _check_can_be_named(name, shards_entry_named(name), registered_shards())
        wanted = predicted_shards() if comm_hooks is None else [sharded_from_config(name) for name in comm_hooks]
    basis = dataclasses.replace(basis, costs=basis.costs | missing_costs(basis, wanted))
    for hook in wanted if comm_hooks is not None else ():
        if hook is not None and hook not in basis.costs:
            raise ValueError(f"--comm-hook: the arithmetic of {compressor_name(hook)!r} is not known for this run")
    present = Candidate(basis.plan, basis.predict(basis.plan, conditions))
    return basis.workload.num_ranks, [present, *sharded_candidates(basis, wanted, conditions)], []


def _check_can_be_named(name: str, entry: Entry | None, known: Mapping[str, Entry]) -> None:
    """Raises a ValueError if a name is unknown, or if its compressor is not predicted, or not made from a name alone.

    ``entry`` is the compressor of that name among those for the run's strategy, which are ``known``.
    """
    if entry_named(name) is None and "." not in name and normalize_name(name) != "none":
        names = ["none", *sorted(known_name for known_name, other in known.items() if _refusal(other) is None)]
        hint = did_you_mean(name, names)
        raise ValueError(f"{name!r} is unknown; names that can be given here: {', '.join(names)}{hint}")
    if entry is not None and (refusal := _refusal(entry)) is not None:
        raise ValueError(refusal)


def _refusal(entry: Entry) -> str | None:
    """Returns why a registered compressor cannot be given by its name; None if it can."""
    if issubclass(entry.cls, Hierarchical | ShardedHierarchical):
        return f"{entry.name!r} is not predicted: measure it, with CommTimeMonitor in a short fit"
    if needed := [option for option, is_needed in entry.options.items() if is_needed]:
        options = ", ".join(map(repr, needed))
        return f"{entry.name!r} needs the option {options}, and only a name can be given here"
    return None


def plan_text(plan: Plan) -> str:
    """Returns the name of a plan; of a long list of buckets only their number."""
    if not isinstance(plan, CommPlan):
        return plan.name
    cap = plan.bucket_cap_mb
    if not isinstance(cap, Sequence) or len(cap) <= _MAX_BUCKETS_IN_NAME:
        return plan.name
    return f"{dataclasses.replace(plan, bucket_cap_mb=None).name}, list of {count(len(cap), 'bucket')}"


def missing_costs(basis: Basis | ShardedBasis, wanted: Sequence[Any]) -> dict[Any, Any]:
    """Measures compressors that the run has not measured, on this machine, if the run was on CPU.

    They are assumed to slow down in training by the same factor as the compressors that the run has measured, those of
    shards as other programs slowed down the run.
    """
    work, cpu = basis.workload, torch.device("cpu")
    missing = [hook for hook in wanted if hook not in basis.costs]
    if not missing or work.device != "cpu":
        return {}
    if work.shares_core:
        torch.set_num_threads(1)
    if isinstance(basis, Basis):
        alone = measure_costs(missing, basis.workload.gradients, cpu, work.num_ranks)
        return {hook: cost.slower(basis.arithmetic_factor) for hook, cost in alone.items()}
    largest_bytes = max(unit.gradients.num_bytes for unit in basis.workload.units)
    of_shards = measure_shard_costs(filter(None, missing), largest_bytes, cpu, work.num_ranks)
    return {hook: cost.slower(1 + basis.workload.num_others) for hook, cost in of_shards.items()}

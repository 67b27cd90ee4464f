"""ShardedBasis: everything that one fit of FSDP2 shows for predictions of other plans."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_commopt.compressors import ShardedCompressor
from lightning_commopt.compressors.base import Claims
from lightning_commopt.compressors.configs import compressor_to_config, sharded_from_config, without_imports
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.cost.fsdp2.arithmetic import ShardCost, ShardCosts
from lightning_commopt.cost.fsdp2.links import ShardLinks
from lightning_commopt.cost.fsdp2.predict import World, communication_s
from lightning_commopt.cost.fsdp2.workload import AS_INT8, ShardedWorkload
from lightning_commopt.cost.predict import COST_RATIO, Candidate, Prediction, expected_largest, least_s
from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.plain import from_plain, load_json, read_object, write_json
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.text.validation import check_integer

FORMAT = 1
"""Version of the JSON, which it shares with the predictions of DDP; the key "strategy" tells the two apart."""

MODEL_ERROR = 0.1
"""The model's error over a step has this standard deviation, twice that of DDP's model. Chosen on the MLP of
``benchmarks/sharded_prediction.py``, such that 95 % intervals held at least 95 % of its speed-ups."""

COLLECTIVE_SPREAD = 0.1
"""Share of the time of collectives by which it differs between ranks on its own, without a rank that is late. Measured
as 4 to 19 % without compression, see ``docs/evidence/predict.md``. On a faster link it shrinks with them."""

_KIND = "commopt prediction"
_STRATEGY = "CommOptModelParallel"


class Conditions(NamedTuple):
    """The conditions of a predicted step that differ from those of the run; None if one does not."""

    num_ranks: int | None = None
    bits_per_s: float | None = None  # rate of each rank's link in each direction
    num_batches: int | None = None  # batches that are accumulated for a step


AS_IN_RUN = Conditions()


@dataclass(frozen=True, kw_only=True)
class ShardedBasis:
    """The workload, the links and the arithmetic of compressors, of one run.

    A prediction is the measured step, minus the calculated communication of the run's own plan, plus that of another
    plan. So the run's own plan takes what was measured, however wrong the parts are, and an error of a part counts only
    as far as it changes the difference.
    """

    plan: ShardedPlan  # the plan of the run
    workload: ShardedWorkload
    links: ShardLinks
    costs: ShardCosts
    gather_cost: ShardCost

    def __post_init__(self) -> None:
        if self.plan.comm_hook is not None and self.plan.comm_hook not in self.costs:
            raise ValueError(f"the arithmetic of {self.plan.comm_hook!r}, which the run used, was not measured")

    def predict(self, plan: ShardedPlan, conditions: Conditions = AS_IN_RUN) -> Prediction:
        """Predicts the median step.

        Args:
            plan: the plan; of its options only ``comm_hook``, ``param_hook`` and ``accumulate_grads`` count. The
                arithmetic of its compressor must have been measured.
            conditions: what is different from the run.

        Raises:
            ValueError: a field of ``conditions`` is out of range.
        """
        for name in ("num_ranks", "num_batches"):
            if (number := getattr(conditions, name)) is not None:
                check_integer(name, number, at_least=1)
        world = self.world
        low_s, high_s, exposed_s = self._step(plan, world, conditions)
        step_s = (low_s + high_s) / 2
        errors_s = [2 * MODEL_ERROR * step_s, 2 * self.workload.spread_s, (high_s - low_s) / 2]
        changes_s = [sum(self._step(plan, other, conditions)[:2]) / 2 - step_s for other in self._variants(plan, world)]
        less_s = math.hypot(*errors_s, *(min(0.0, change_s) for change_s in changes_s))
        more_s = math.hypot(*errors_s, *(max(0.0, change_s) for change_s in changes_s))
        return Prediction(
            step_s=step_s,
            low_s=max(step_s - less_s, least_s(step_s, step_s - exposed_s)),
            high_s=step_s + more_s,
            exposed_s=exposed_s,
            reasons=self._reasons(conditions),
        )

    @property
    def world(self) -> World:
        """The machines and the number of batches of the run."""
        return World(
            self.links.expected, self.costs, self.gather_cost, self.workload.num_ranks, self.workload.num_batches
        )

    def _step(self, plan: ShardedPlan, world: World, conditions: Conditions) -> tuple[float, float, float]:
        """Returns both ends of a step, and how long its computation waits, if ``world`` describes the run."""
        work = self.workload
        own_s = communication_s(self.plan, work, world).middle_s
        available_s = max(work.step_s - work.once_s, 0.0)
        scale = min(1.0, available_s / own_s) if own_s > 0 else 1.0
        batch_s = (available_s - scale * own_s) / work.num_batches
        links = world.links
        if conditions.bits_per_s is not None:
            links = links.at_rate(conditions.bits_per_s, over_gloo=work.device == "cpu")
        num_ranks = conditions.num_ranks or work.num_ranks
        num_batches = conditions.num_batches or work.num_batches
        predicted_world = world._replace(links=links, num_ranks=num_ranks, num_batches=num_batches)
        waits = communication_s(plan, work, predicted_world)
        rest_s = work.once_s + num_batches * batch_s + self._more_waiting_s(num_ranks)
        if conditions.bits_per_s is not None and own_s > 0:
            # The waits that the model does not explain recur in each batch, and shrink as a batch's collectives do.
            times_batches = num_batches / work.num_batches
            rest_s -= self._shrinking_s(own_s, scale) * max(0.0, times_batches - waits.middle_s / own_s)
        return rest_s + scale * waits.low_s, rest_s + scale * waits.high_s, scale * waits.middle_s

    def _shrinking_s(self, own_s: float, scale: float) -> float:
        """Returns the part of the run's step that shrinks with its collectives on a faster link, besides ``own_s``.

        On CPU the waits were measured. What they exceed ``own_s`` by is the model's error, or a wait for ranks whose
        collectives took longer, except for a wait for ranks that are late.
        """
        straggler_s = self.workload.straggler_s
        if self.workload.waited_s is None:
            return min(straggler_s, COLLECTIVE_SPREAD * own_s)
        more_s = self.workload.waited_s - scale * own_s
        return more_s - min(max(0.0, straggler_s - COLLECTIVE_SPREAD * own_s), max(0.0, more_s))

    def _more_waiting_s(self, num_ranks: int) -> float:
        """Returns how much longer than in the run a step waits for the last of ``num_ranks``."""
        work = self.workload
        if work.num_ranks < 2:
            return 0.0
        return work.straggler_s * (expected_largest(num_ranks) / expected_largest(work.num_ranks) - 1)

    def _variants(self, plan: ShardedPlan, world: World) -> Iterable[World]:
        """Yields other descriptions of the run that are as plausible: one part at one end of its interval."""
        for links in self.links.others:
            yield world._replace(links=links)
        for ratio in (1 / COST_RATIO, COST_RATIO):
            for hook in dict.fromkeys([plan.comm_hook, self.plan.comm_hook]):
                if hook is not None:
                    yield world._replace(costs={**self.costs, hook: self.costs[hook].slower(ratio)})
            yield world._replace(gather_cost=self.gather_cost.slower(ratio))

    def _reasons(self, conditions: Conditions) -> tuple[str, ...]:
        work, reasons = self.workload, []
        source = (
            self.links.source if conditions.bits_per_s is None else f"a rate of {conditions.bits_per_s / 1e9:g} Gbit/s"
        )
        reasons.append(f"link: {source}")
        if conditions.num_ranks not in (None, work.num_ranks):
            reasons.append(
                f"{work.num_ranks} ranks were measured; more hops, and more ranks to wait for, are calculated"
            )
        if work.device != "cpu":
            reasons.append("how much computation hides of a shorter collective is between all of it and its share now")
        return tuple(reasons)

    def save(self, run_dir: Path, forecasts: Iterable[Forecast] = ()) -> None:
        """Writes the basis into the directory of its run, atomically, with the forecasts for verdicts."""
        plain = {
            "kind": _KIND,
            "format": FORMAT,
            "strategy": _STRATEGY,
            "plan": self.plan.to_dict(),
            "workload": asdict(self.workload),
            "links": asdict(self.links),
            "costs": [[compressor_to_config(hook), list(cost)] for hook, cost in self.costs.items()],
            "gather_cost": list(self.gather_cost),
            "forecasts": [list(forecast) for forecast in forecasts],
        }
        write_json(run_dir / PREDICTION_FILE, plain)

    @classmethod
    def load(cls, path: Path) -> ShardedBasis:
        """Reads a file of `save`; for errors see `load_json`. It imports nothing, see `without_imports`."""

        def read(plain: dict[str, Any]) -> ShardedBasis:
            costs: dict[ShardedCompressor, ShardCost] = {}
            for config, cost in plain["costs"]:
                hook = sharded_from_config(config)
                if hook is not None:
                    costs[hook] = from_plain(ShardCost, cost)
            return cls(
                plan=ShardedPlan.from_dict(plain["plan"]),
                workload=from_plain(ShardedWorkload, plain["workload"]),
                links=from_plain(ShardLinks, plain["links"]),
                costs=costs,
                gather_cost=from_plain(ShardCost, plain["gather_cost"]),
            )

        with without_imports():
            return load_json(path, _KIND, FORMAT, read)


def has_sharded_basis(run_dir: Path) -> bool:
    """Returns whether a run has a prediction, and was one of FSDP2; a ValueError if its file is no JSON object."""
    path = run_dir / PREDICTION_FILE
    return path.exists() and read_object(path, "result of commopt prediction").get("strategy") == _STRATEGY


def sharded_candidates(
    basis: ShardedBasis, hooks: Iterable[ShardedCompressor | None], conditions: Conditions = AS_IN_RUN
) -> list[Candidate[ShardedPlan]]:
    """Returns other plans than that of ``basis``, by predicted time.

    These have each of ``hooks`` whose arithmetic is known, with and without ``param_hook``; and, if gradients are
    accumulated, the other value of ``accumulate_grads``.
    """
    own = basis.plan
    plans = [
        own.replaced(comm_hook=hook, param_hook=param_hook)
        for hook in hooks
        if hook is None or hook in basis.costs
        for param_hook in (None, "int8")
    ]
    if (conditions.num_batches or basis.workload.num_batches) > 1:
        plans.append(_with_other_accumulation(own))
    unique = [plan for plan in dict.fromkeys(plans) if plan != own]
    predicted = [Candidate(plan, basis.predict(plan, conditions)) for plan in unique]
    return sorted(predicted, key=lambda candidate: candidate.prediction.step_s)


def _with_other_accumulation(plan: ShardedPlan) -> ShardedPlan:
    return plan.replaced(accumulate_grads="unsharded" if plan.accumulate_grads == "sharded" else "sharded")


def sharded_forecasts(basis: ShardedBasis, hooks: Iterable[ShardedCompressor | None]) -> list[Forecast]:
    """Returns the forecasts for a verdict, the most exact first: another compressor, ``param_hook``, accumulation.

    Each changes one option of the run's plan.
    """
    own = basis.plan
    forecasts = []
    for hook in hooks:
        if hook != own.comm_hook and (hook is None or hook in basis.costs):
            name = "none" if hook is None else compressor_name(hook)
            claims = Claims() if hook is None else hook.claims
            forecasts.append(
                _forecast(basis, own.replaced(comm_hook=hook), f'comm_hook="{name}"', claims.error_bound or 0.0)
            )
    if own.param_hook is None:
        bound = AS_INT8.claims.error_bound or 0.0
        forecasts.append(_forecast(basis, own.replaced(param_hook="int8"), 'param_hook="int8"', bound))
    if basis.workload.num_batches > 1 and own.accumulate_grads == "sharded":
        other = _forecast(basis, _with_other_accumulation(own), 'accumulate_grads="unsharded"', 0.0)
        forecasts.append(other._replace(note="each rank then holds gradients as large as the model"))
    return sorted(forecasts, key=lambda forecast: forecast.error_bound)


def _forecast(basis: ShardedBasis, plan: ShardedPlan, setting: str, error_bound: float) -> Forecast:
    predicted = basis.predict(plan)
    return Forecast(
        setting=setting,
        is_lossy=error_bound > 0,
        error_bound=error_bound,
        step_s=predicted.step_s,
        low_s=predicted.low_s,
        high_s=predicted.high_s,
        present_s=basis.workload.step_s,
    )

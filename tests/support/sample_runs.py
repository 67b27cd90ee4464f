"""Directories of runs as commopt-train leaves them, with times and losses that follow from what a plan sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.record import BucketSpan, Collective, Phase, StepRecord
from lightning_commopt.measure.runs.losses import LossPoint, write_losses
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import Settings, flat, settings_of
from lightning_commopt.measure.statistics import Steps, row
from lightning_commopt.report.build import build_report
from lightning_commopt.report.model import Report

NUM_STEPS = 3
BATCH_SIZE = 32
VERSIONS = {"python": "3.11.7", "lightning_commopt": "0.1.0", "torch": "2.15.0", "lightning": "2.6.6", "hydra": "1.3.8"}
CPU = {"kind": "cpu", "name": "AMD EPYC", "memory_bytes": 8 * 2**30, "num_cores": 2}

PLANS: dict[str, Any] = {
    "none": {},
    **{name: {"comm_hook": {"name": name}} for name in ("bf16", "int8", "powersgd")},
}
LOSSES = {"none": 2.0, "bf16": 2.001, "int8": 2.004, "powersgd": 2.11}
WIRE_SHARES = {"none": 1.0, "bf16": 0.5, "int8": 0.26, "powersgd": 0.015}
COMPRESSION_S = {"none": 0.0, "bf16": 0.012, "int8": 0.03, "powersgd": 0.02}


@dataclass(frozen=True, kw_only=True)
class SampleRun:
    """What a run was.

    Attributes:
        overrides: of the command line.
        plan: options of the plan; None for strategies without one.
        compute_s: of a step, forward and backward on one rank.
        wire_s: of a step, all buckets.
        compression_s: of a step, all buckets.
        noise: standard deviation of the step's time, as a share of it.
        collectives: of each step.
        changed: fields of the record that are to be something else.
    """

    overrides: tuple[str, ...] = ()
    sync_method: str = "none"
    strategy: str = "CommOptDDP"
    plan: Mapping[str, Any] | None = field(default_factory=dict)
    world_size: int = 2
    compute_s: float = 0.06
    wire_s: float = 0.32
    compression_s: float = 0.0
    num_buckets: int = 1
    gradient_bytes: int = 40_000_000
    wire_bytes: int = 40_000_000
    batch_size: int = BATCH_SIZE
    loss: float = 2.0
    noise: float = 0.01
    num_parameters: int = 10_000_000
    config: Mapping[str, Any] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    changed: Mapping[str, Any] = field(default_factory=dict)


def write_run(folder: Path, run: SampleRun) -> RunRecord:
    """Writes ``run.json``, ``loss.jsonl`` and the steps of all ranks; returns the record."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(" ".join(run.overrides) or str(folder.name))
    slowness = 1 + random.gauss(0, run.noise)
    ranks = [[_step(run, step, slowness) for step in range(NUM_STEPS)] for _ in range(run.world_size)]
    for rank, steps in enumerate(ranks):
        header = {"rank": rank, "world_size": run.world_size, "origin_unix_s": 1.7e9, "device": "cpu"}
        StepWriter(rank_file(folder, rank), header).write(steps)
    comm_time = Steps.of([[row(step) for step in steps] for steps in ranks]).statistics()
    loss = run.loss * (1 + random.gauss(0, 0.004))
    write_losses(folder, _losses(loss, comm_time["step_s"], random))
    record = RunRecord(
        status="finished",
        sync_method=run.sync_method,
        is_lossy=run.sync_method not in ("none", "all_reduce") if run.plan is not None else None,
        settings=described(run.overrides, {"seed": 0, "repetition": 0, **run.config}, run.plan),
        strategy=run.strategy,
        device="cpu",
        world_size=run.world_size,
        started_at="2026-11-21T12:00:00+00:00",
        seconds=200 * comm_time["step_s"] + 10,
        steps_per_s=comm_time["steps_per_s"],
        samples_per_s=comm_time["samples_per_s"],
        num_timed_steps=190,
        wire_bytes_per_step=comm_time["wire_bytes"],
        comm_time=comm_time,
        peak_memory_bytes=4.0 * run.num_parameters * 4 + 3e8,
        num_parameters=run.num_parameters,
        metrics={"val_loss": loss, "val_accuracy": 0.9 - loss / 10},
        versions=VERSIONS,
        hardware=(CPU,),
        git={"commit": "0123456789abcdef", "has_changes": False},
    )
    record = replace(record, **run.changed)
    record.save(folder)
    return record


def plan_run(comm_hook: str, bucket_cap_mb: int, repetition: int) -> SampleRun:
    """A job of a sweep over comm hooks and bucket sizes, 40 MB of gradients on a link of 1 Gbit/s."""
    overrides = (f"strategy/comm_hook={comm_hook}", f"strategy.bucket_cap_mb={bucket_cap_mb}")
    return SampleRun(
        overrides=(*overrides, f"repetition={repetition}"),
        sync_method=comm_hook,
        plan={"bucket_cap_mb": bucket_cap_mb} | PLANS[comm_hook],
        num_buckets=-(-40 // bucket_cap_mb),
        **_costs(comm_hook),
    )


def _costs(comm_hook: str) -> dict[str, Any]:
    """Returns what follows from what a comm hook sends."""
    return {
        "wire_s": 0.32 * WIRE_SHARES[comm_hook],
        "compression_s": COMPRESSION_S[comm_hook],
        "wire_bytes": int(40e6 * WIRE_SHARES[comm_hook]),
        "loss": LOSSES[comm_hook],
    }


def write_sweep(folder: Path, num_repetitions: int = 3) -> Path:
    """Writes a sweep of 4 plans x 2 bucket sizes, repetition by repetition; returns its directory."""
    jobs = [
        plan_run(comm_hook, bucket_cap_mb, repetition)
        for repetition in range(num_repetitions)
        for comm_hook in PLANS
        for bucket_cap_mb in (25, 100)
    ]
    return _write_jobs(folder, jobs)


_GRAPH = {"bucket_cap_mb": 2000, "static_graph": True}
_VARIANTS: dict[str, dict[str, Any]] = {
    "one_process": {"strategy": "SingleDeviceStrategy", "sync_method": "SingleDeviceStrategy", "plan": None},
    "ddp_one_process": {"strategy": "DDPStrategy", "sync_method": "DDPStrategy", "plan": None, "compute_s": 0.063},
    "one_bucket": {"plan": {"bucket_cap_mb": 2000}},
    "static_graph": {"plan": _GRAPH},
    "bucket_view": {"plan": {**_GRAPH, "gradient_as_bucket_view": True}},
    "bf16": {"sync_method": "bf16", "plan": _GRAPH | PLANS["bf16"]},
    "powersgd": {"sync_method": "powersgd", "plan": _GRAPH | PLANS["powersgd"]},
    "several_buckets": {"sync_method": "bf16", "plan": {"bucket_cap_mb": 10} | PLANS["bf16"], "num_buckets": 4},
}


def ladder_report(folder: Path) -> Report:
    """Reports three runs of each variant of the experiment ``ladder``, with published figures, and one that failed."""
    jobs = [
        SampleRun(
            overrides=("experiment=ladder", f"variant={variant}", f"repetition={repetition}"),
            world_size=1 if variant.endswith("one_process") else 2,
            **_costs(name if (name := options.get("sync_method", "none")) in PLANS else "none"),
            **options,
        )
        for repetition in range(3)
        for variant, options in _VARIANTS.items()
    ]
    sweep = _write_jobs(folder / "ladder", jobs)
    failed = {"status": "failed", "error": "ValueError: x", "plan": None, "world_size": None, "is_lossy": None}
    save_run(sweep / "99", "experiment=ladder", "variant=bf16", **failed)
    return build_report([sweep])


_NUMEL = {"small": 1.5e6, "large": 35.2e6}


def four_methods_report(folder: Path) -> Report:
    """Reports the experiment ``four_methods`` with a global batch of 1024, for two sizes: groups with scaling."""
    methods = [("one_process", 1), *((method, n) for method in ("naive", "interleaved", "ddp") for n in (2, 4))]
    jobs = [
        _method(size, method, ranks, repetition)
        for repetition in range(3)
        for size in _NUMEL
        for method, ranks in methods
    ]
    return build_report([_write_jobs(folder / "four_methods", jobs)])


def _method(size: str, method: str, ranks: int, repetition: int) -> SampleRun:
    strategies = {"one_process": "SingleDeviceStrategy", "naive": "NaiveDP", "interleaved": "InterleavedDP"}
    strategy = strategies.get(method, "CommOptDDP")
    gradient_bytes = int(4 * _NUMEL[size])
    return SampleRun(
        overrides=(
            "experiment=four_methods",
            f"model.size={size}",
            f"method={method}",
            f"ranks={ranks}",
            f"repetition={repetition}",
        ),
        sync_method="none" if method == "ddp" else strategy,
        strategy=strategy,
        plan={} if method == "ddp" else None,
        world_size=ranks,
        compute_s=(0.02 + 6e-9 * _NUMEL[size]) / ranks,
        wire_s=2 * (ranks - 1) / ranks * gradient_bytes / 2e9,
        num_buckets={"one_process": 1, "naive": 1, "interleaved": 8, "ddp": 3}[method],
        gradient_bytes=gradient_bytes,
        wire_bytes=gradient_bytes,
        batch_size=1024 // ranks,
        num_parameters=int(_NUMEL[size]),
        loss=2.0,
    )


def save_run(folder: Path, *overrides: str, **fields: Any) -> Path:
    """Writes nothing but ``run.json``, of a finished run on the ranks of its overrides, or 2; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = fields.pop("config", {})
    ranks = [int(each.partition("=")[2]) for each in overrides if each.startswith(("ranks=", "trainer.devices="))]
    ranks = [1] if "method=one_process" in overrides else [*ranks, 2]
    plan, plan_type = fields.pop("plan", {}), fields.pop("plan_type", "CommPlan")
    loss = fields.pop("val_loss", None)
    known = {"status": "finished", "sync_method": "none", "world_size": ranks[0], **fields}
    known["metrics"] = {**fields.get("metrics", {}), **({} if loss is None else {"val_loss": loss})}
    known.setdefault("is_lossy", known["sync_method"] in WIRE_SHARES and known["sync_method"] != "none")
    RunRecord(**known, settings=described(overrides, config, plan, plan_type)).save(folder)
    return folder


def described(
    overrides: Sequence[str],
    config: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
    plan_type: str = "CommPlan",
) -> Settings:
    """Returns the settings of a run, as the recorder makes them."""
    settings = settings_of(Path("run"), config, overrides)
    return settings if plan is None else settings.with_plan(flat(plan), {}, plan_type)


def save_rates(
    folder: Path, rates: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]] | None = None
) -> Path:
    """Writes a sweep over comm hooks with these samples per second in its repetitions; returns its directory."""
    for comm_hook, of_hook in rates.items():
        plan = PLANS.get(comm_hook, {})
        for repetition, rate in enumerate(of_hook):
            loss = None if losses is None else losses[comm_hook][repetition]
            overrides = (f"strategy/comm_hook={comm_hook}", f"repetition={repetition}")
            run = folder / f"{comm_hook}_{repetition}"
            save_run(run, *overrides, sync_method=comm_hook, plan=plan, samples_per_s=rate, val_loss=loss)
    return folder


def sample_report(folder: Path) -> Report:
    """Returns the report of `write_sweep`, one group without scaling."""
    return build_report([write_sweep(folder / "sweep")])


def _write_jobs(folder: Path, jobs: Sequence[SampleRun]) -> Path:
    for number, job in enumerate(jobs):
        write_run(folder / str(number), job)
    return folder


def _layout(run: SampleRun) -> dict[int, BucketInfo]:
    each = run.gradient_bytes // run.num_buckets
    return {
        index: BucketInfo(
            index=index, gradient_bytes=each, names=(f"layer{index}.weight",), is_last=index == run.num_buckets - 1
        )
        for index in range(run.num_buckets if run.world_size > 1 else 0)
    }


def _step(run: SampleRun, step: int, slowness: float) -> StepRecord:
    """A step whose buckets become ready in even distances, and travel one after another."""
    forward_s, backward_s = run.compute_s / 3 * slowness, run.compute_s * 2 / 3 * slowness
    began = step * 1.0
    backward = began + 0.002 + forward_s
    computed = done = backward + backward_s
    buckets = []
    end_s = 0.0
    for index in range(run.num_buckets if run.world_size > 1 else 0):
        ready_s = backward + backward_s * (index + 1) / run.num_buckets
        start_s = max(ready_s, end_s)
        sent_s = start_s + run.compression_s / run.num_buckets * slowness
        done = end_s = sent_s + run.wire_s / run.num_buckets * slowness
        buckets.append(
            BucketSpan(
                index=index,
                backward=0,
                gradient_bytes=run.gradient_bytes // run.num_buckets,
                wire_bytes=run.wire_bytes // run.num_buckets,
                ready_s=ready_s,
                start_s=start_s,
                end_s=end_s,
                wire=((sent_s, end_s),),
            )
        )
    ends = [began, began + 0.002, backward, max(computed, done)]
    ends += [ends[-1] + 0.005, ends[-1] + 0.006]
    names = ("data", "forward", "backward", "optimizer", "other")
    phases = tuple(Phase(*phase) for phase in zip(names, ends[:-1], ends[1:], strict=True))
    known: dict[str, Any] = {"phases": phases, "buckets": tuple(buckets), "collectives": run.collectives}
    return StepRecord(step=step, num_samples=run.batch_size, layout=_layout(run), **known)


def _losses(final: float, step_s: float, random: Random) -> list[LossPoint]:
    points: list[LossPoint] = []
    for step in range(5, 205, 5):
        loss = final + 3 * 0.97**step + random.gauss(0, 0.02)
        points.append(LossPoint(kind="train", step=step, seconds=step * step_s, loss=loss))
        if step % 100 == 0:
            points.append(LossPoint(kind="val", step=step, seconds=step * step_s, loss=final + 3 * 0.97**step))
    return points

"""FSDP2's collectives as they are seen through the objects that issue them, where torch has no hooks of its own."""

import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_commopt import CommOptModelParallel, ShardedPlan
from lightning_commopt.callbacks import CommTimeMonitor, publisher
from lightning_commopt.compat import fsdp_calls
from lightning_commopt.compat.collectives import CollectiveHooks, has_collective_hooks
from lightning_commopt.compat.fsdp import comm_objects
from lightning_commopt.compat.fsdp_calls import ComputationWaits, ObservedUnits, around_calls
from lightning_commopt.compat.torch import default_store
from lightning_commopt.compressors.configs import sharded_from_config
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.marks import IssuedCollective
from lightning_commopt.measure.operations import OperationTotals
from lightning_commopt.measure.recorder import StepRecorder, parts_of_one
from lightning_commopt.sync.ddp import observed
from lightning_commopt.sync.fsdp2.gradients import ShardedSync
from lightning_commopt.sync.fsdp2.model_sync import ShardedModelSync
from lightning_commopt.sync.fsdp2.parameters import GatheredParameters
from support.collectives import fsdp2_runs_on_cpu, needs_hooks, takes_collectives
from support.cross_section import sampled
from support.lightnings import Callback
from support.strategy_models import Tiny, loader, trainer
from support.warm_ranks import run_ranks

_NUM_BACKWARDS = 3
_DELAY_S = 0.5


class _Log:
    """Collectives that were issued, and how many of them have ended."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, int]] = []
        self.num_ended = 0

    def __call__(self, operation: str, num_bytes: int) -> "_Log":
        self.issued.append((operation, num_bytes))
        return self

    def end(self) -> None:
        self.num_ended += 1


def _model(asynchronous: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
        module._set_unshard_async_op(asynchronous)
    return model


def _train(model: Any) -> list[Tensor]:
    for number in range(_NUM_BACKWARDS):
        torch.manual_seed(10 * number + dist.get_rank())
        model(torch.randn(4, 33)).square().mean().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _classes(model: Any) -> list[str]:
    return [type(comm).__qualname__ for _, comm in comm_objects(model)][:2]


def _plain(asynchronous: bool, by_functions: bool) -> dict[str, Any]:
    """Trains, observed by comm objects, or by functions that FSDP2 calls where torch has no comm objects."""
    names = vars(dist) if by_functions else ()
    functions = {
        name: operation
        for name, operation in {
            **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), "all_gather"),
            **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), "reduce_scatter"),
        }.items()
        if name in names
    }
    with (
        patch.object(fsdp_calls, "_FUNCTIONS", functions),
        patch.object(fsdp_calls, "_has_comm_objects", lambda: not by_functions),
    ):
        return _train_observed(asynchronous)


def _train_observed(asynchronous: bool) -> dict[str, Any]:
    expected = _train(_model(asynchronous))
    model, seen, by_hooks = _model(asynchronous), _Log(), _Log()
    hooks = CollectiveHooks(by_hooks, sees_end=True) if has_collective_hooks() else None
    observed = ObservedUnits(model, seen, sees_end=True)
    found = _train(model)
    observed.close()
    if hooks is not None:
        hooks.close()
    num_issued = len(seen.issued)
    classes = _classes(model)
    _train(model)
    return {
        "is_equal": all(map(torch.equal, found, expected)),
        "seen": seen.issued[:num_issued],
        "num_ended": seen.num_ended,
        "num_later": len(seen.issued) - num_issued,
        "by_hooks": None if hooks is None else by_hooks.issued,
        "classes": classes,
    }


@takes_collectives  # with older torch FSDP2 does not run on CPU
@pytest.mark.parametrize(
    ("asynchronous", "by_functions"),
    sampled([(False, False), (False, True), (True, False), (True, True)], by_default=[(False, False), (True, True)]),
)
def test_what_fsdp2_issues(asynchronous: bool, by_functions: bool) -> None:
    """If it fails, FSDP2 computes something else when it is observed, or a collective is missing or has other bytes."""
    for one in run_ranks(_plain, asynchronous, by_functions, world_size=3):
        assert one["is_equal"]
        assert Counter(name for name, _ in one["seen"]) == {
            "all_gather": 3 * _NUM_BACKWARDS,  # the outer unit stays gathered from forward to backward
            "reduce_scatter": 2 * _NUM_BACKWARDS,
        }
        first = 4 * 3 * (6 * 33 + 6)  # 17 rows in three shards of 6
        second = 4 * 3 * (2 * 17 + 2)
        assert {size for name, size in one["seen"] if name == "all_gather"} == {first, second}
        assert one["by_hooks"] in (None, one["seen"])
        assert one["num_ended"] == len(one["seen"])
        assert one["num_later"] == 0
        assert one["classes"] in ([], ["DefaultAllGather", "DefaultReduceScatter"])


class _Own:
    """A comm object of somebody's own, whose class cannot be replaced or whose calls are counted."""

    num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        _Own.num_calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Fixed(_Own):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("fixed")


def _somebodys(comm: Any) -> tuple[int, int]:
    model, seen, _Own.num_calls = _model(), _Log(), 0
    for module in (model[0], model):
        module.set_custom_all_gather(comm)
    observed = ObservedUnits(model, seen, ["all_gather"], sees_end=True)
    _train(model)
    observed.close()
    return len(seen.issued), _Own.num_calls


@takes_collectives
@pytest.mark.parametrize("comm", [_Own(), _Fixed()])
def test_comm_objects_of_somebodys_own(comm: Any) -> None:
    """If it fails, one that all units share is observed twice, or one that cannot be observed ends training."""
    for num_seen, num_calls in run_ranks(_somebodys, comm):
        assert num_calls == 3 * _NUM_BACKWARDS
        assert num_seen == (0 if isinstance(comm, _Fixed) else num_calls)


def _timed_scatters() -> tuple[list[float], float]:
    """Returns when the reduce-scatters of a backward have ended, and when it has returned."""
    model, clock = _model(), HostClock()
    recorder = StepRecorder(clock)
    recorder.enter("backward")
    hooks = CollectiveHooks(recorder.issue, sees_end=True)
    observed = ObservedUnits(model, recorder.call, sees_end=True)
    model(torch.randn(4, 33)).square().mean().backward()
    returned = clock.mark()
    time.sleep(0.1)
    recorder.end_step(0, 4)
    observed.close()
    hooks.close()
    (record,) = recorder.take(1)
    ends_s = [one.end_s for one in record.collectives if one.operation == "reduce_scatter"]
    return [end_s for end_s in ends_s if end_s is not None], clock.seconds(returned)


@needs_hooks
def test_end_of_reduce_scatters() -> None:
    """If it fails, gloo's reduce-scatters last until something else happens on the rank."""
    for ends_s, returned_s in run_ranks(_timed_scatters):
        assert len(ends_s) == 2
        assert max(ends_s) <= returned_s


def _waited_for_the_other(hook: str | None) -> tuple[float, float]:
    """Returns how long the records say that a backward waits for collectives, and for how long its thread may have.

    Rank 1 begins its own half a second after rank 0 waits for a collective.
    """
    model, recorder, store = _model(), StepRecorder(HostClock()), default_store()
    sync = None if hook is None else ShardedSync(sharded_from_config(hook))  # type: ignore[arg-type]
    if sync is not None:
        sync.attach(model)
        sync.allow_overlap()
    loss = model(torch.randn(4, 33)).square().mean()
    dist.barrier()
    thread, waits_s = threading.get_ident(), list[float]()

    def issue(operation: str, num_bytes: int) -> IssuedCollective | None:
        issued = recorder.issue(operation, num_bytes)
        store.set("issued", "")
        return issued

    @contextmanager
    def waiting() -> Iterator[None]:
        began = time.perf_counter()
        with recorder.waiting():
            if threading.get_ident() == thread:
                store.set("waits", "")
            yield
        if threading.get_ident() == thread:
            waits_s.append(time.perf_counter() - began)

    hooks = CollectiveHooks(issue, sees_end=True)
    observed = ObservedUnits(model, recorder.call, sees_end=True, around=waiting)
    if dist.get_rank() == 1:
        store.wait(["issued", "waits"])
        time.sleep(_DELAY_S)
    recorder.enter("backward")
    loss.backward()
    recorder.end_step(0, 4)
    observed.close()
    hooks.close()
    if sync is not None:
        sync.detach()
    totals = OperationTotals()
    totals.add(recorder.take(1))
    return sum(one.exposed_s or 0.0 for one in totals.operations()), sum(waits_s)


@needs_hooks
@pytest.mark.parametrize("hook", [None, "int8"])
def test_the_wait_for_collectives_is_known_on_cpu(hook: str | None) -> None:
    """If it fails, nobody learns how long FSDP2's step on CPU waits, or what runs beside backward counts as waiting."""
    (first_s, first_limit_s), (second_s, second_limit_s) = run_ranks(_waited_for_the_other, hook)
    assert _DELAY_S <= first_s <= first_limit_s
    assert 0 < second_s <= second_limit_s


def _in_a_stream(hook: str | None) -> list[tuple[str, str, bool]]:
    """Returns what is recorded if the issuing stream stands for the device, with torch's hooks beside it."""
    model, recorder = _model(), StepRecorder(HostClock())
    sync = None if hook is None else ShardedSync(sharded_from_config(hook))  # type: ignore[arg-type]
    if sync is not None:
        sync.attach(model)
    hooks = CollectiveHooks(recorder.issue, sees_end=False)
    observed = ObservedUnits(model, recorder.issue_in_stream, sees_end=True, around=parts_of_one)
    recorder.enter("backward")
    _train(model)
    dist.barrier()
    recorder.end_step(0, 4)
    observed.close()
    hooks.close()
    if sync is not None:
        sync.detach()
    (record,) = recorder.take(1)
    return [(one.operation, one.source, one.end_s is not None) for one in record.collectives]


@needs_hooks
@pytest.mark.parametrize(("hook", "source"), [(None, ""), ("int8", "int8 reduce-scatter")])
def test_each_collective_is_recorded_once_where_streams_show_its_time(hook: str | None, source: str) -> None:
    """If it fails, FSDP2's collectives count twice on CUDA, or compressed ones have times in parts."""
    for found in run_ranks(_in_a_stream, hook):
        assert Counter(found) == {
            ("all_gather", "", True): 3 * _NUM_BACKWARDS,
            ("reduce_scatter", source, True): 2 * _NUM_BACKWARDS,
            ("barrier", "", True): 1,
        }


def test_waits_of_computation_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, what FSDP2's steps wait for on CUDA is not known, or waits of other streams count."""
    happened: list[str] = []
    computing, other = "the stream of computation", "another stream"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    event = SimpleNamespace(wait=lambda stream: happened.append(f"{stream} waits"))
    inner = torch.cuda.Stream.wait_event

    def begin() -> Any:
        happened.append("begins")
        return SimpleNamespace(end=lambda: happened.append("ends"))

    waits = ComputationWaits(torch.device("cuda", 0), begin)
    for stream in (computing, other):
        torch.cuda.Stream.wait_event(stream, event)  # type: ignore[arg-type]
    waits.close()
    torch.cuda.Stream.wait_event(computing, event)  # type: ignore[arg-type]
    assert happened == ["begins", f"{computing} waits", "ends", f"{other} waits", f"{computing} waits"]
    assert torch.cuda.Stream.wait_event is inner


def _compressed(hook: str, compresses_parameters: bool) -> tuple[list[tuple[str, int]], int, int, int]:
    model, seen = _model(), _Log()
    sync, gathered = ShardedSync(sharded_from_config(hook)), GatheredParameters()  # type: ignore[arg-type]
    sync.attach(model)
    sync.allow_overlap()
    if compresses_parameters:
        gathered.attach(model)
    observed = ObservedUnits(model, seen, sees_end=True)
    before = sync.wire_bytes, gathered.wire_bytes
    _train(model)
    sent = sync.wire_bytes - before[0], gathered.wire_bytes - before[1]
    observed.close()
    num_issued = len(seen.issued)
    _train(model)
    sync.detach()
    gathered.detach()
    assert len(seen.issued) == num_issued
    return seen.issued, seen.num_ended, *sent


@takes_collectives
@pytest.mark.parametrize(
    ("hook", "compresses_parameters"),
    sampled([("bf16", False), ("int8", True), ("int4", False)], by_default=[("int8", True)]),
)
def test_what_compressed_units_send(hook: str, compresses_parameters: bool) -> None:
    """If it fails, a compressed collective is missing, counted as more than one, or has bytes that were not sent."""
    for seen, num_ended, scattered, gathered in run_ranks(_compressed, hook, compresses_parameters, world_size=3):
        counted: Counter[str] = Counter()
        for name, num_bytes in seen:
            counted[name] += num_bytes
        assert Counter(name for name, _ in seen) == {
            "all_gather": 3 * _NUM_BACKWARDS,
            "reduce_scatter": 2 * _NUM_BACKWARDS,
        }
        assert counted["reduce_scatter"] // 2 == scattered  # which counts half of it, see Channel.bytes_sent
        if compresses_parameters:
            assert counted["all_gather"] // 2 == gathered
        assert num_ended == len(seen)


def _changing() -> tuple[list[Counter[str]], list[str]]:
    """Trains under three plans, and counts what is seen of each; calls are timed as in predictions."""
    model, found = _model(), []
    sync, seen = ShardedModelSync(ShardedPlan()), _Log()
    sync.attach(model, ranks_per_node=2, timeout=None)
    observed = ObservedUnits(model, seen, sees_end=True)
    stop = around_calls(model, lambda *_: nullcontext())
    for hook in ("none", "int8", "none"):
        sync.change_plan(ShardedPlan.from_dict({"comm_hook": hook}))
        observed.update()
        stop()
        stop = around_calls(model, lambda *_: nullcontext())
        seen.issued.clear()
        _train(model)
        found.append(Counter(name for name, _ in seen.issued))
    stop()
    observed.close()
    return found, _classes(model)


@takes_collectives
def test_units_are_observed_after_a_change_of_plan() -> None:
    """If it fails, CommTimeMonitor loses sight of gradients when a plan changes, or counts them twice."""
    expected = {"all_gather": 3 * _NUM_BACKWARDS, "reduce_scatter": 2 * _NUM_BACKWARDS}
    for found, classes in run_ranks(_changing):
        assert found == [expected] * 3
        assert classes == ["DefaultAllGather", "DefaultReduceScatter"]


class _Sharded(Tiny):
    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            for module in (self.layers[2], self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class _Change(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.apply_plan("int8")


def _fit(folder: Path, options: dict[str, Any], changes: bool) -> list[str]:
    """Returns the warnings."""
    monitor = CommTimeMonitor(every_n_steps=2, dirpath=folder, num_warmup_steps=0, print_summary=False)
    callbacks = [monitor, _Change()] if changes else [monitor]
    run = trainer(CommOptModelParallel(2, 1, **options), callbacks=callbacks, max_epochs=1)
    with (
        patch.object(publisher, "has_collective_hooks", lambda: False),
        patch.object(observed, "has_collective_hooks", lambda: False),
        warnings.catch_warnings(record=True) as caught,
    ):
        run.fit(_Sharded(), loader(8 * 4))
    return [str(warning.message) for warning in caught]


@fsdp2_runs_on_cpu
@pytest.mark.parametrize(
    ("options", "changes", "source"),
    [
        ({}, False, ""),
        pytest.param({"comm_hook": "bf16"}, True, "int8 reduce-scatter", marks=takes_collectives),
        pytest.param(
            {"comm_hook": "int8"}, False, "int8 reduce-scatter", marks=[takes_collectives, pytest.mark.exhaustive]
        ),
    ],
    ids=["plain", "changed", "int8"],
)
def test_monitor_without_hooks_of_torch(options: dict[str, Any], changes: bool, source: str, tmp_path: Path) -> None:
    """If it fails, CommTimeMonitor does not see FSDP2 with torch before 2.14, or in the wrong phase."""
    for texts in run_ranks(_fit, tmp_path, options, changes):
        assert not any("only the phases of steps are timed" in text for text in texts)
    ranks = read_run(tmp_path)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert len(rank.steps) == 4
        for step in rank.steps:
            counted = Counter((one.operation, one.phase, one.source) for one in step.collectives)
            counted.pop(("broadcast", "data", "lightning"), None)  # which Lightning issues from 2.5.2 on
            assert counted == {
                ("all_gather", "forward", ""): 2,
                ("all_gather", "backward", ""): 1,
                ("reduce_scatter", "backward", source): 2,
            }
            for one in step.collectives:
                assert one.start_s is not None
                assert one.end_s is not None
                assert step.start_s <= one.start_s <= one.end_s <= step.end_s

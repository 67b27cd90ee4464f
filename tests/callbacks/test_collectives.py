"""Every collective of a step, as CommTimeMonitor records it, beside torch's Flight Recorder."""

import io
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_commopt import CommOptDDP, CommOptModelParallel
from lightning_commopt.callbacks import CommTimeMonitor, publisher
from lightning_commopt.compat.torch import flight_records
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.record import Collective, StepRecord
from lightning_commopt.measure.summary import summarize_run
from lightning_commopt.measure.trace import write_trace
from support.collectives import needs_hooks
from support.cross_section import sampled
from support.known import known
from support.lightnings import Callback, DDPStrategy, needs_sigterm_broadcast
from support.ranks import run_ranks
from support.strategy_models import Tiny, loader, trainer

_BYTES = {"Float": 4, "Double": 8, "Int": 4, "Long": 8, "Byte": 1}
_NUM_STEPS, _ACCUMULATED = 4, 2
_STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "int8": lambda: CommOptDDP(comm_hook="int8"),
    "every_2_steps": lambda: CommOptDDP(sigterm_every_n_steps=2),
    "fsdp2": lambda: CommOptModelParallel(2, 1),
    "fsdp2_int8": lambda: CommOptModelParallel(comm_hook="int8"),
    "fsdp2_int8_parameters": lambda: CommOptModelParallel(2, 1, param_hook="int8"),
}


class _Chatty(Tiny):
    """Issues collectives of many kinds, in forward and after the step."""

    def configure_model(self) -> None:
        if type(self.trainer.strategy).__name__ == "CommOptModelParallel" and not isinstance(self, FSDPModule):
            for module in (self.layers[2], self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, sync_dist=True)
        self.all_gather(torch.ones(10))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gathered = [torch.empty(3, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(gathered, torch.ones(3, dtype=torch.float64), group=self.own_group)

    def on_train_epoch_start(self) -> None:
        self.own_group: Any = dist.new_group()  # made after the monitor has started


class _Count(Callback):
    """Counts what the Flight Recorder has when training starts, after the monitor."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_before = len(flight_records()["entries"])


def _fit(folder: Path, name: str) -> list[tuple[str, int]]:
    """Returns the Flight Recorder's operations since training has started, with their bytes."""
    count = _Count()
    monitor = CommTimeMonitor(
        every_n_steps=1, dirpath=folder, num_warmup_steps=0, print_summary=False, fit_link_model=False
    )
    run = trainer(
        _STRATEGIES[name](),
        callbacks=[monitor, count],
        max_epochs=1,
        accumulate_grad_batches=_ACCUMULATED,
    )
    run.fit(_Chatty(), loader(8 * _NUM_STEPS * _ACCUMULATED))
    assert "_broadcast_sigterm_tensor" not in vars(run.fit_loop.epoch_loop)
    return [_recorded(entry) for entry in flight_records()["entries"][count.num_before :]]


_PREFIXES = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
}


def _recorded(entry: dict[str, Any]) -> tuple[str, int]:
    """Returns the operation and the bytes of an entry of the Flight Recorder."""
    name = entry["profiling_name"].partition(":")[2].lstrip("_")
    name = next((ours for prefix, ours in _PREFIXES.items() if name.replace("_", "").startswith(prefix)), name)
    sizes = [
        sum(
            math.prod(size) * _BYTES[dtype]
            for size, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
        )
        for side in ("input", "output")
    ]
    return name, max(sizes)


_COMPRESSED = {
    "fsdp2_int8": {("reduce-scatter", "backward"): 2},
    "fsdp2_int8_parameters": {("all-gather", "forward"): 2, ("all-gather", "backward"): 1},
}
"""What consists of messages between two ranks, and how many there are of each batch."""


def _as_gloo_records(one: Collective) -> tuple[str, int]:
    """Gloo's Flight Recorder has a reduce-scatter as the all-reduce that gloo makes of it."""
    return one.operation.replace("reduce_scatter", "all_reduce"), one.num_bytes


@needs_hooks
@pytest.mark.parametrize(
    "name", sampled(["ddp", "int8", "fsdp2", "fsdp2_int8", "fsdp2_int8_parameters"], by_default=["ddp"])
)
def test_collectives_of_steps(name: str, tmp_path: Path) -> None:
    """If it fails, collectives are missing or counted twice, or have another phase or size than torch has recorded."""
    recorded = run_ranks(_fit, tmp_path, name)
    for rank, expected in zip(read_run(tmp_path), recorded, strict=True):
        assert len(rank.steps) == _NUM_STEPS
        seen = [one for step in rank.steps for one in step.collectives]
        # Gloo's Flight Recorder does not have messages between two ranks, which int8 consists of.
        got = [_as_gloo_records(one) for one in seen if one.operation not in ("send", "recv")]
        assert got == expected[: len(got)]
        for step in rank.steps[2:]:  # DDP rebuilds its buckets in the second
            _check_step(name, step)
        check_table(tmp_path, name)


def _check_step(name: str, step: StepRecord) -> None:
    counted = Counter((one.operation, one.phase, one.source) for one in step.collectives)
    num = _ACCUMULATED
    expected = {
        ("broadcast", "data", "lightning"): num,
        ("all_reduce", "forward", ""): num,  # self.log(sync_dist=True), with a barrier before it
        ("barrier", "forward", ""): num,
        ("all_gather", "forward", ""): num,
        ("all_gather", "data", ""): num,  # the callback's hook has ended the batch before that of the module
    }
    expected["all_gather", "pause", "CommTimeMonitor"] = 1  # of the step before
    if name in ("fsdp2", "fsdp2_int8"):  # two units; the outer one stays gathered from forward to backward
        expected["all_gather", "forward", ""] += 2 * num
        expected["all_gather", "backward", ""] = num
    if name in ("fsdp2", "fsdp2_int8_parameters"):
        expected["reduce_scatter", "backward", ""] = 2 * num
    if name == "ddp":
        expected[("all_reduce", "backward", "")] = 1
    if name == "int8":
        expected |= {(direction, "backward", ""): 2 for direction in ("send", "recv")}
    for (operation, phase), calls in _COMPRESSED.get(name, {}).items():
        for kind in ("int8", "uncompressed"):  # of matrices and of vectors, with one other rank
            expected |= {(way, phase, f"{kind} {operation}"): calls * num for way in ("send", "recv")}
    assert counted == expected
    for one in step.collectives:
        assert one.start_s is not None
        assert one.end_s is not None
        # Gloo's thread may run the callback that reads the clock after the rank has gone on.
        assert one.phase == "pause" or step.start_s <= one.start_s <= min(one.end_s, step.end_s)


def check_table(folder: Path, name: str) -> None:
    """The table and the verdict of a run, and its trace, show the same."""
    summary, _ = summarize_run(folder, num_warmup_steps=2)
    own = {(one.phase, one.label): one for one in summary.operations}
    assert own["data", "broadcast (Lightning's own)"].num_calls == _ACCUMULATED
    assert own["data", "broadcast (Lightning's own)"].num_bytes == 8 * _ACCUMULATED
    assert own["forward", "all_reduce"].num_bytes == 4 * _ACCUMULATED
    # On CPU the step waits for FSDP2's calls, which are observed; whether for others is unknown.
    assert (own["forward", "all_gather"].exposed_s is not None) == (name in ("fsdp2", "fsdp2_int8"))
    assert own["data", "broadcast (Lightning's own)"].exposed_s is None
    console = Console(width=120, file=io.StringIO())
    console.print(summary.table())
    labels = ["broadcast (Lightning's own)", "all_gather (CommTimeMonitor)"]
    labels += [f"send (int8 {operation})" for operation, _ in _COMPRESSED.get(name, ())]
    assert [label for label in labels if label not in console.file.getvalue()] == []  # type: ignore[attr-defined]
    assert any("sigterm_every_n_steps" in text for text in summary.verdict.recommendations)
    write_trace(folder)
    trace = json.loads((folder / "comm_time" / "trace.json").read_text())
    shown = [event for event in trace["traceEvents"] if event.get("cat") == "collectives"]
    (first, second) = read_run(folder)
    assert len(shown) == sum(len(step.collectives) for rank in (first, second) for step in rank.steps)


def _fit_without_hooks(folder: Path, strategy: str) -> None:
    monitor = CommTimeMonitor(every_n_steps=1, dirpath=folder, num_warmup_steps=0, print_summary=False)
    run = trainer(_STRATEGIES[strategy](), callbacks=[monitor], max_epochs=1, accumulate_grad_batches=2)
    with patch.object(publisher, "has_collective_hooks", lambda: False):
        run.fit(Tiny(), loader(8 * _NUM_STEPS * 2))
    assert "_broadcast_sigterm_tensor" not in vars(run.fit_loop.epoch_loop)


@needs_sigterm_broadcast
def test_the_broadcast_is_observed_without_hooks_of_torch(tmp_path: Path) -> None:
    """If it fails, with torch before 2.14 the wait for other ranks before a batch is taken for a slow dataloader."""
    for strategy in ("ddp", "every_2_steps"):
        run_ranks(_fit_without_hooks, tmp_path / strategy, strategy)
    for rank in read_run(tmp_path / "ddp"):
        for step in rank.steps:
            own = [one for one in step.collectives if one.source == "lightning"]
            assert [(one.operation, one.phase, one.num_bytes) for one in own] == [("broadcast", "data", 8)] * 2
            assert all(known(one.end_s) > known(one.start_s) for one in own)
    summary, _ = summarize_run(tmp_path / "ddp", num_warmup_steps=0)
    assert any("sigterm_every_n_steps" in text for text in summary.verdict.recommendations)
    others, _ = summarize_run(tmp_path / "every_2_steps", num_warmup_steps=0)
    assert not any(one.operation == "broadcast" for one in others.operations)


@needs_hooks
@pytest.mark.exhaustive
def test_without_the_broadcast(tmp_path: Path) -> None:
    """If it fails, sigterm_every_n_steps does not change what is shown, or is recommended although it is set."""
    run_ranks(_fit, tmp_path, "every_2_steps")
    summary, _ = summarize_run(tmp_path, num_warmup_steps=0)
    (own,) = [one for one in summary.operations if one.source == "lightning"]
    assert (own.operation, own.num_calls, own.num_bytes) == ("all_reduce", 0.5, 2.0)
    assert not any("sigterm_every_n_steps" in text for text in summary.verdict.recommendations)

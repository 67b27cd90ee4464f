import time
import warnings
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from lightning_commopt.callbacks import CommTimeMonitor, RunRecorder, SpeedMonitor, run_recorder
from lightning_commopt.compressors.all_reduce import AllReduce
from lightning_commopt.measure.runs.losses import read_losses
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.report.build import build_report
from support.collectives import takes_collectives
from support.lightnings import Callback, CSVLogger, LightningModule, ModelParallelStrategy
from support.ranks import run_ranks_or_raise
from support.strategy_models import trainer
from support.warm_ranks import run_ranks

BATCH_SIZE = 4


class RankLoss(LightningModule):
    """Its loss is the number of the batch, plus ten times the rank; nothing is learnt."""

    def __init__(self, fails_at=None, failing_rank=0, loss_name="val_loss"):
        super().__init__()
        self.loss_name = loss_name
        self.layer = torch.nn.Linear(3, 2)
        self.fails_at = fails_at
        self.failing_rank = failing_rank

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at and self.global_rank == self.failing_rank:
            raise RuntimeError("no such luck")
        return 0 * self.layer(batch[0]).sum() + batch_idx + 10 * self.global_rank

    def validation_step(self, batch, batch_idx):
        self.log(self.loss_name, 5.0 + self.global_step, sync_dist=True)
        self.log("val/acc", 0.25, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, *, strategy="auto", devices=1, callbacks=(), recorder=None, model=None, ckpt_path=None, **settings):
    loader = DataLoader(TensorDataset(torch.ones(6 * devices * BATCH_SIZE, 3)), batch_size=BATCH_SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"devices": devices, "max_epochs": 1, "num_sanity_val_steps": 2, **settings}
        run = trainer(strategy, callbacks=[*callbacks, recorder or RunRecorder(dirpath=folder)], **options)
        run.fit(model or RankLoss(), loader, loader, ckpt_path=ckpt_path)


def _monitor():
    """Returns one that makes no predictions."""
    return CommTimeMonitor(num_warmup_steps=2, print_summary=False, save_records=False)


def two_ranks(folder):
    callbacks = [SpeedMonitor(num_warmup_steps=2), _monitor()]
    fit(folder, strategy=CommOptDDP(comm_hook="bf16"), devices=2, callbacks=callbacks)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    run_ranks(two_ranks, folder)
    return folder


def test_what_a_run_was_and_what_came_out_is_recorded(recorded):
    record = RunRecord.load(recorded)
    assert (record.status, record.sync_method, record.strategy, record.device) == (
        "finished",
        "bf16",
        "CommOptDDP",
        "cpu",
    )
    assert record.settings.plan == {"comm_hook.name": "bf16"}
    assert record.settings.plan_defaults == {"comm_hook.accumulate": None}
    assert (record.settings.plan_type, record.settings.values) == ("CommPlan", {})
    assert record.is_lossy
    assert (record.world_size, record.num_parameters, record.num_timed_steps) == (2, 8, 4)
    assert record.wire_bytes_per_step == 2 * 8
    assert record.comm_time.keys().isdisjoint(["wire_bytes", "steps_per_s", "samples_per_s"]), "those are above"
    assert record.comm_time["exposed_share"] == record.exposed_share
    assert record.val_loss == 5.0 + 6
    assert record.metrics["val/acc"] == 0.25
    assert not any(name.startswith("comm_time/") for name in record.metrics), "those are in comm_time already"
    assert all(load is not None and load >= 0 for load in (record.load_at_start, record.load_at_end))
    assert record.peak_memory_bytes is not None
    assert record.peak_memory_bytes > 1e7  # no Python with torch in it holds less
    assert record.seconds is not None
    assert set(record.versions) >= {"torch", "lightning"}


@dataclass(frozen=True, kw_only=True)
class OwnCompressor(AllReduce):  # type: ignore[misc]
    """A user's, with an option that no configuration can hold."""

    dtype: torch.dtype = torch.float16


def own_compressor(folder):
    fit(folder, strategy=CommOptDDP(comm_hook=OwnCompressor(), bucket_cap_mb=5), devices=2)


def test_a_compressor_without_a_name_is_described_by_its_repr(tmp_path):
    """If it fails, recording ends the training of those who write a compressor."""
    run_ranks(own_compressor, tmp_path)
    record = RunRecord.load(tmp_path)
    assert (record.status, record.sync_method) == ("finished", "OwnCompressor")
    assert record.settings.plan == {"bucket_cap_mb": 5, "comm_hook": "OwnCompressor(dtype=torch.float16)"}
    assert record.is_lossy is False
    lines = build_report([tmp_path]).groups[0].settings[0].config_lines
    assert lines == ("# in Python: CommOptDDP(bucket_cap_mb=5, comm_hook=OwnCompressor(dtype=torch.float16))",)


class Sharded(RankLoss):
    def configure_model(self):
        shard(self, self.device_mesh, blocks=150)


def two_ranks_sharded(folder):
    options: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    speed = SpeedMonitor(num_warmup_steps=2)
    for number, strategy in enumerate(
        [ModelParallelStrategy(**options), CommOptModelParallel(**options, accumulate_grads="unsharded")]
    ):
        recorder = RunRecorder(dirpath=folder / str(number))
        settings = {"devices": 2, "callbacks": [speed], "accumulate_grad_batches": 2}
        fit(folder, strategy=strategy, model=Sharded(), recorder=recorder, **settings)


@takes_collectives
def test_a_plan_of_fsdp2_is_reported_beside_lightnings(tmp_path):
    """If it fails, reports call FSDP2 DDP, and paste lines that make two ranks share one model."""
    run_ranks(two_ranks_sharded, tmp_path)
    record = RunRecord.load(tmp_path / "1")
    assert (record.sync_method, record.strategy, record.is_lossy) == ("none", "CommOptModelParallel", False)
    assert record.settings.plan == {"accumulate_grads": "unsharded"}
    (group,) = build_report([tmp_path]).groups
    stock, ours = group.settings
    assert (stock.name, ours.name) == ("Lightning's FSDP2", "CommOptModelParallel, uncompressed, accumulate unsharded")
    assert group.baseline is stock
    arguments = "accumulate_grads='unsharded', data_parallel_size=2, tensor_parallel_size=1"
    assert ours.config_lines[-1] == f"# in Python: CommOptModelParallel({arguments})"


def test_losses_are_averaged_over_ranks(recorded):
    points = read_losses(recorded)
    train = [point for point in points if point.kind == "train"]
    assert [(point.step, point.loss) for point in train] == [(step + 1, step + 5.0) for step in range(6)]
    seconds = [point.seconds for point in train]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert [(point.step, point.loss) for point in points if point.kind == "val"] == [(6, 11.0)]


class SomeLosses(RankLoss):
    """Rank 0 has a loss in even batches, rank 1 in those that 3 divides; nothing is learnt."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().step()  # type: ignore[union-attr]
        if batch_idx % (2 + self.global_rank) == 0:
            return {"loss": torch.tensor(batch_idx + 10.0 * self.global_rank)}
        return None


def ranks_with_different_losses(folder):
    fit(folder, strategy=CommOptDDP(), devices=2, model=SomeLosses())


def test_ranks_may_have_different_numbers_of_losses(tmp_path):
    """If it fails, the end of a fit hangs or writes garbage where some ranks have batches without a loss."""
    run_ranks(ranks_with_different_losses, tmp_path, group_timeout_s=20)
    points = [point for point in read_losses(tmp_path) if point.kind == "train"]
    assert [(point.step, point.loss) for point in points] == [(1, 5), (3, 2), (4, 13), (5, 4)]


class Uploading(Callback):
    """Rank 1 works on when training has ended, until rank 0 has ended its fit."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        while trainer.global_rank == 1 and not (self.folder / "ended").exists():
            time.sleep(0.01)


def rank_that_ends_late(folder):
    with patch.object(run_recorder, "_PATIENCE_S", 0.1):
        fit(folder, strategy=CommOptDDP(), devices=2, callbacks=[Uploading(folder)])
    if dist.get_rank() == 0:
        (folder / "ended").touch()


def test_a_rank_that_works_on_after_training_does_not_fail_the_run(tmp_path):
    """If it fails, an upload that takes longer than the timeout of a collective ends a healthy job with an error."""
    run_ranks(rank_that_ends_late, tmp_path, limit_s=60)
    assert RunRecord.load(tmp_path).status == "finished"
    assert [point.loss for point in read_losses(tmp_path) if point.kind == "train"] == [0, 1, 2, 3, 4, 5]


def two_ranks_without_speed(folder):
    monitor = _monitor()
    fit(folder, strategy=CommOptDDP(comm_hook="bf16"), devices=2, callbacks=[monitor])
    return monitor.summary


def test_rates_of_the_communication_monitor_where_no_other_has_any(tmp_path):
    """If it fails, reports have no throughput of runs without SpeedMonitor."""
    summary, _ = run_ranks(two_ranks_without_speed, tmp_path)
    record = RunRecord.load(tmp_path)
    assert (record.steps_per_s, record.samples_per_s) == (summary["steps_per_s"], summary["samples_per_s"])
    assert record.wire_bytes_per_step == 2 * 8
    assert record.comm_time.keys().isdisjoint(["wire_bytes", "steps_per_s", "samples_per_s"])


def test_names_of_metrics_are_the_projects_own(tmp_path):
    fit(tmp_path, recorder=RunRecorder(dirpath=tmp_path, val_accuracy="val/acc"), val_check_interval=3)
    record = RunRecord.load(tmp_path)
    assert (record.val_loss, record.val_accuracy) == (11.0, 0.25)
    assert [point.step for point in read_losses(tmp_path) if point.kind == "val"] == [3, 6]


def test_a_validation_loss_of_another_spelling_is_found(tmp_path):
    fit(tmp_path, model=RankLoss(loss_name="Valid Loss"))
    record = RunRecord.load(tmp_path)
    assert (record.val_loss, record.val_accuracy) == (11.0, 0.25)
    assert record.metric_names == {"val_loss": "Valid Loss", "val_accuracy": "val/acc"}
    assert [point.loss for point in read_losses(tmp_path) if point.kind == "val"] == [11.0]


def test_without_a_final_loss_the_option_is_named(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr(run_recorder, "info", messages.append)
        fit(tmp_path, model=RankLoss(loss_name="val/nll"), recorder=RunRecorder(dirpath=tmp_path, val_loss="val/nl"))
    assert RunRecord.load(tmp_path).val_loss is None
    assert len(messages) == 1
    assert "no metric is named 'val/nl' (logged: " in messages[0]
    assert "val/nll" in messages[0]
    assert "RunRecorder(val_loss=NAME)" in messages[0]


def test_without_a_place_it_is_the_trainers(tmp_path):
    fit(tmp_path, recorder=RunRecorder(), default_root_dir=tmp_path)
    assert RunRecord.load(tmp_path).status == "finished"


def test_two_runs_with_a_logger_have_a_directory_each(tmp_path):
    """If it fails, the second run overwrites the first one's record, and a report compares nothing."""
    for _ in range(2):
        fit(tmp_path, recorder=RunRecorder(), default_root_dir=tmp_path, logger=CSVLogger(tmp_path))
    assert [folder.name for folder in sorted(tmp_path.glob("*/*")) if RunRecord.load(folder).status == "finished"] == [
        "version_0",
        "version_1",
    ]


def test_accumulation_does_not_change_the_loss(tmp_path):
    fit(tmp_path, accumulate_grad_batches=2)
    assert [point.loss for point in read_losses(tmp_path) if point.kind == "train"] == [0, 1, 2, 3, 4, 5]


def test_a_fit_that_is_resumed_goes_on_with_its_curve(tmp_path):
    fit(tmp_path, model=RankLoss(), max_steps=4, enable_checkpointing=True, default_root_dir=tmp_path)
    seconds = read_losses(tmp_path)[-1].seconds
    (checkpoint,) = tmp_path.glob("**/*.ckpt")
    fit(tmp_path, max_epochs=2, ckpt_path=checkpoint)
    points = [point for point in read_losses(tmp_path) if point.kind == "train"]
    assert [point.step for point in points] == list(range(1, len(points) + 1))
    assert len(points) >= 10
    assert points[4].seconds > seconds


def fails_on_rank_1(folder):
    fit(folder, strategy=CommOptDDP(), devices=2, model=RankLoss(fails_at=2, failing_rank=1))


def test_the_rank_that_failed_first_is_named(tmp_path):
    answers = run_ranks_or_raise(fails_on_rank_1, tmp_path, world_size=2, limit_s=60)
    assert answers[1][1] is not None
    assert RunRecord.load(tmp_path).error == "rank 1: RuntimeError: no such luck"


def test_who_goes_on_after_the_fit_ends_the_run(tmp_path):
    fit(tmp_path, recorder=RunRecorder(dirpath=tmp_path, ends_run=False))
    record = RunRecord.load(tmp_path)
    assert (record.status, record.val_loss) == ("running", 11.0)


def test_a_failed_run_keeps_its_error(tmp_path):
    with pytest.raises(RuntimeError, match="no such luck"):
        fit(tmp_path, model=RankLoss(fails_at=2))
    record = RunRecord.load(tmp_path)
    assert (record.status, record.error) == ("failed", "RuntimeError: no such luck")
    assert record.seconds is not None
    assert (record.strategy, record.world_size, record.num_parameters) == ("SingleDeviceStrategy", 1, 8)
    assert [point.loss for point in read_losses(tmp_path)] == [0, 1]


def test_a_run_without_a_loss_does_not_have_that_of_an_earlier_run(tmp_path):
    fit(tmp_path, limit_train_batches=1)
    assert read_losses(tmp_path)
    with pytest.raises(RuntimeError, match="no such luck"):
        fit(tmp_path, model=RankLoss(fails_at=0))
    assert read_losses(tmp_path) == []


def test_fast_dev_run_leaves_nothing(tmp_path):
    fit(tmp_path, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_does_not_end_training(tmp_path):
    (tmp_path / "file").write_text("")
    model = RankLoss()
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr(run_recorder, "warn", messages.append)
        fit(tmp_path / "file", model=model)
    assert model.trainer.global_step == 6
    assert len(messages) == 2
    assert "the run cannot be recorded" in messages[0]


class Lazy(RankLoss):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(2)


class Configured(RankLoss):
    def __init__(self):
        super().__init__()
        del self.layer

    def configure_model(self):
        self.layer = torch.nn.Linear(3, 2)


@pytest.mark.parametrize("model", [Lazy, Configured])
def test_parameters_that_the_fit_makes(model, tmp_path):
    """If it fails, a monitor ends a fit whose first forward makes parameters, or a record counts none."""
    fit(
        tmp_path,
        model=model(),
        callbacks=[SpeedMonitor(), CommTimeMonitor()],
        default_root_dir=tmp_path,
        num_sanity_val_steps=0,
    )
    assert RunRecord.load(tmp_path).num_parameters == 8


class BadTest(RankLoss):
    def test_step(self, batch, batch_idx):
        raise RuntimeError("no such test")


@pytest.mark.parametrize("has_fitted", [True, False])
def test_what_fails_beside_the_fit_is_no_failure_of_the_run(has_fitted, tmp_path):
    """If it fails, a finished run is reported as failed: its own after a bad test, or that of an earlier program."""
    recorder, loader = RunRecorder(dirpath=tmp_path), DataLoader(TensorDataset(torch.ones(4, 3)))
    fit(tmp_path, recorder=recorder if has_fitted else None)
    tester = trainer("auto", callbacks=[recorder])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="no such test"):
            tester.test(BadTest(), loader)
    assert RunRecord.load(tmp_path).status == "finished"

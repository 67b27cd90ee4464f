import warnings
from importlib import import_module
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from line import Line
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor, SpeedMonitor
from lightning_commopt.callbacks import speed as speed_module
from support.cross_section import sampled
from support.lightnings import PACKAGE, Callback, CSVLogger, DDPStrategy, ModelParallelStrategy, ThroughputMonitor
from support.strategy_models import trainer
from support.warm_ranks import run_ranks

NUMEL = 3 * 2 + 2


class Ignoring(Line):
    """Has a parameter that DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored = torch.nn.Linear(3, 2)
        names = [name for name, _ in self.named_parameters() if name.startswith("ignored")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)


class Twice(Line):
    """Synchronizes gradients twice in a step, with a parameter frozen the second time that is in DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for is_trained in (True, False):
            self.layer.bias.requires_grad_(is_trained)
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()  # type: ignore[union-attr]
        self.layer.bias.requires_grad_(True)


class Opaque(Line):
    """Its batches show no size."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return SimpleNamespace(x=batch[0])

    def training_step(self, batch, batch_idx):
        return self.layer(batch.x).sum()


class Failing(Line):
    def training_step(self, batch, batch_idx):
        if batch_idx == 8:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


class Reading(Callback):
    """Reads numbers of the Trainer's first callback after every batch."""

    def __init__(self, *names):
        self.names, self.values = names, []

    def on_train_batch_end(self, trainer, *args):
        self.values.append(tuple(getattr(trainer.callbacks[0], name) for name in self.names))


def lightnings_warnings():
    """Returns what Lightning's data utilities have warned of in this process."""
    return import_module(f"{PACKAGE}.utilities.data").warning_cache


def every_other(samples):
    return None if samples[0][0][0] % 2 else default_collate(samples)


def fit(strategy="auto", devices=1, num_warmup_steps=2, model=Line, collate_fn=None, others=(), **settings):
    speed = SpeedMonitor(num_warmup_steps=num_warmup_steps)
    batch_numbers = torch.arange(10).repeat_interleave(4 * devices)
    data = TensorDataset(batch_numbers[:, None].expand(-1, 3).float())
    loader = DataLoader(data, batch_size=4, collate_fn=collate_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(strategy, callbacks=[speed, *others], **settings).fit(model(), loader, loader)
    return speed


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({}, 18),
        ({"num_warmup_steps": 0}, 20),
        ({"val_check_interval": 3}, 18),
        ({"accumulate_grad_batches": 5}, 2),
        ({"num_warmup_steps": 20}, 0),
    ],
)
def test_every_step_after_the_warm_up_counts(settings, num_steps):
    speed = fit(**settings)
    assert speed.num_steps == num_steps
    if not num_steps:
        assert (speed.steps_per_s, speed.samples_per_s, speed.wire_bytes_per_step) == (None,) * 3
        return
    batches = settings.get("accumulate_grad_batches", 1)
    assert speed.samples_per_s == pytest.approx(4 * batches * speed.steps_per_s)
    assert speed.steps_per_s == pytest.approx(num_steps / speed.seconds)
    assert speed.wire_bytes_per_step == 0


def test_numbers_in_the_middle_of_a_fit(monkeypatch):
    """If it fails, a callback that reads the speed ends the fit, or a validation counts as training."""
    ticks = count()
    monkeypatch.setattr(speed_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    reading = Reading("num_steps", "seconds", "steps_per_s", "samples_per_s")
    fit(num_warmup_steps=0, val_check_interval=3, max_epochs=1, others=[reading])
    seconds = [1, 2, 3, 5, 6, 7, 9, 10, 11, 13]  # three validations synchronize the device, which takes a tick
    assert reading.values == [(n, s, n / s, 4 * n / s) for n, s in enumerate(seconds, 1)]


def test_an_exception_stops_the_clock():
    """If it fails, a validation after a fit that an exception has ended counts the time between the two."""
    speed = SpeedMonitor(num_warmup_steps=0)
    assert (speed.num_steps, speed.wire_bytes_per_step) == (0, None), "before a fit"
    run, loader = trainer("auto", callbacks=[speed]), DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ArithmeticError):
            run.fit(Failing(), loader)
        seconds = speed.seconds
        run.validate(Line(), loader, verbose=False)
    assert (speed.num_steps, speed.seconds) == (8, seconds)
    assert speed.steps_per_s == 8 / seconds


def test_a_fit_that_trains_nothing_has_no_speed():
    """If it fails, the record of a fit that resumes at its end has the speed of the fit before."""
    speed = SpeedMonitor(num_warmup_steps=0)
    run = trainer("auto", callbacks=[speed], max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for num_steps in (10, 0):
            run.fit(Line(), DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=4))
            assert speed.num_steps == num_steps


def two_ranks(kind):
    strategies = {
        "ddp": DDPStrategy(find_unused_parameters=kind.startswith("twice")),
        "none": CommOptDDP(),
        "bf16": CommOptDDP(comm_hook="bf16"),
        "torch_hook": DDPStrategy(ddp_comm_hook=print),
    }
    prefix, _, strategy = kind.rpartition("_") if kind != "torch_hook" else ("", "", kind)
    settings = {"accumulate_grad_batches": 2} if prefix == "accumulating" else {}
    model = {"ignoring": Ignoring, "twice": Twice}.get(prefix, Line)
    reading = Reading("wire_bytes_per_step")
    speed = fit(strategies[strategy], devices=2, model=model, others=[reading], **settings)
    return speed.num_steps, speed.wire_bytes_per_step, {value for (value,) in reading.values} - {None}


@pytest.mark.parametrize(
    ("kind", "wire_bytes"),
    sampled(
        [
            *(("ddp", 4 * NUMEL), ("none", 4 * NUMEL), ("bf16", 2 * NUMEL)),
            *(("torch_hook", None), ("ignoring_ddp", 4 * NUMEL)),
            *(("twice_ddp", 8 * NUMEL), ("accumulating_ddp", 4 * NUMEL)),
        ],
        by_default=[("bf16", 2 * NUMEL), ("torch_hook", None), ("twice_ddp", 8 * NUMEL)],
    ),
)
def test_bytes_on_the_wire(kind, wire_bytes):
    num_steps = 8 if kind == "accumulating_ddp" else 18
    assert run_ranks(two_ranks, kind) == [(num_steps, wire_bytes, {wire_bytes} - {None})] * 2


def test_batches_that_do_not_show_their_size():
    speed = fit(model=Opaque)
    assert speed.num_steps == 18
    assert speed.samples_per_s is None


def with_two_sizes(samples):
    return [*default_collate(samples), torch.ones(3)]


def test_batches_whose_tensors_have_different_sizes():
    """If it fails, counting a batch makes Lightning advise a batch_size for a value that nobody logs."""
    lightnings_warnings().clear()
    speed = fit(collate_fn=with_two_sizes, num_warmup_steps=0)
    assert speed.samples_per_s == pytest.approx(4 * speed.steps_per_s)
    assert not lightnings_warnings()


def test_batches_that_lightning_skips():
    """If it fails, a collate_fn that returns None ends training, or the batches that it drops are counted."""
    speed = fit(collate_fn=every_other, num_warmup_steps=0)
    assert speed.num_steps == 10
    assert speed.samples_per_s == pytest.approx(4 * speed.steps_per_s)


@pytest.mark.exhaustive
def test_it_stands_beside_lightnings_throughput_monitor(tmp_path):
    """If it fails, the two overwrite each other's numbers or states."""
    logger = CSVLogger(str(tmp_path), name="", version="")
    speed, lightnings = SpeedMonitor(num_warmup_steps=0), ThroughputMonitor(batch_size_fn=len, window_size=3)
    assert speed.state_key != lightnings.state_key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [speed, lightnings, CommTimeMonitor(every_n_steps=5, log="all")]
        run = trainer("auto", callbacks=callbacks, logger=logger, log_every_n_steps=5, max_steps=20)
        run.fit(Line(), DataLoader(TensorDataset(torch.ones(80, 3)), batch_size=4))
    logged = set((tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")) - {"step", "epoch"}
    ours = {name for name in logged if name.startswith("comm_time/")}
    theirs = {name for name in logged if name.startswith("train")}
    assert ours | theirs == logged
    assert ours
    assert theirs
    assert speed.num_steps == 20


class Unsharded(Line):
    """All its parameters are on every rank."""

    def configure_model(self):
        pass


def samples_per_step(*sizes):
    comm_time = CommTimeMonitor(num_warmup_steps=0, save_records=False, print_summary=False)
    speed = fit(ModelParallelStrategy(*sizes), devices=2, model=Unsharded, others=[comm_time])
    summary = comm_time.summary
    return [summary["samples_per_s"] / summary["steps_per_s"], speed.samples_per_s / speed.steps_per_s]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sizes", "num_samples"), [((2, 1), 8), ((1, 2), 4)])
def test_ranks_of_tensor_parallelism_count_their_common_batches_once(sizes, num_samples):
    """If it fails, tensor parallelism, Lightning's default, seems to train as many samples as data parallelism."""
    for found in run_ranks(samples_per_step, *sizes):
        assert found == pytest.approx([num_samples] * 2)


def test_samples_are_those_of_all_ranks_with_batches_of_their_own() -> None:
    """If it fails, a report compares the throughput of one rank, or counts batches of tensor parallelism twice."""
    mesh = SimpleNamespace(mesh_dim_names=("data_parallel", "tensor_parallel"), shape=(3, 2), size=lambda: 6)
    for strategy, num_samples in ((SimpleNamespace(), 24), (SimpleNamespace(device_mesh=mesh), 12)):
        clock = speed_module.StepClock()
        clock.start_clock()
        fit = SimpleNamespace(world_size=6, strategy=strategy)
        clock.count_batch(fit, torch.zeros(4, 3), has_stepped=True)  # type: ignore[arg-type]
        assert clock.num_samples == num_samples

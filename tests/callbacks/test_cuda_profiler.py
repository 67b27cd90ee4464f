import logging
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import nvtx  # type: ignore[import-untyped]
import pytest
import torch
from line import Line, trainer_for
from recorded_domain import RecordedDomain
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import cuda_profiler, speed
from lightning_commopt.callbacks.cuda_profiler import CUDAProfilerWindow
from lightning_commopt.callbacks.nvtx_ranges import NVTXRanges
from lightning_commopt.text import validation
from support.lightnings import (
    Callback,
    LightningOptimizer,
    MisconfigurationException,
    ModelCheckpoint,
)
from support.warm_ranks import run_ranks

START, STOP = ["wait", "start"], ["wait", "stop"]


class ByHand(Line):
    """Steps twice in every other batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        for _ in range(2 * (batch_idx % 2)):
            optimizer.step()


class Events(Callback):
    """Writes down what happens, beside what the profiler is told."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.events.append(batch_idx)

    def on_validation_start(self, trainer, module):
        self.events.append("validation")


def fake_cuda(events):
    """Lets the callback think that it trains on CUDA, and writes down what it asks of it."""
    cudart = SimpleNamespace(
        cudaProfilerStart=lambda: events.append("start"), cudaProfilerStop=lambda: events.append("stop")
    )
    vars(torch.cuda).update(cudart=lambda: cudart, synchronize=lambda device: events.append("wait"))
    vars(cuda_profiler).update(_uses_cuda=lambda trainer: True)


@pytest.fixture
def events(monkeypatch):
    for owner, name in [(torch.cuda, "cudart"), (torch.cuda, "synchronize"), (cuda_profiler, "_uses_cuda")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # for the undoing
    recorded: list[Any] = []
    fake_cuda(recorded)
    return recorded


def loader(num_batches=4, num_ranks=1):
    return DataLoader(TensorDataset(torch.ones(4 * num_batches * num_ranks, 3)), batch_size=4)


def fit(window, events, model=None, data=None, ckpt_path=None, callbacks=(), trainer=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"limit_val_batches": 0, **settings}
        trainer = trainer or trainer_for([window, *callbacks, Events(events)], **settings)
        data = loader() if data is None else data
        trainer.fit(model or Line(), data, data, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("window", "settings", "expected"),
    [
        ({"start_step": 1, "num_steps": 2}, {}, [0, *START, 1, 2, *STOP, 3]),
        ({"start_step": 0, "num_steps": 4}, {}, [*START, 0, 1, 2, 3, *STOP]),
        (
            {"start_step": 1, "num_steps": 1},
            {"accumulate_grad_batches": 2, "data": loader(5)},
            [0, 1, *START, 2, 3, *STOP, 4],
        ),
        (
            {"start_step": 2, "num_steps": 1},
            {"accumulate_grad_batches": 2, "data": loader(5)},
            [0, 1, 2, 3, *START, 4, *STOP],
        ),
        ({"start_step": (2, 0), "num_steps": 1}, {}, [*START, 0, *STOP, 1, *START, 2, *STOP, 3]),
        ({"start_step": [0, 2], "num_steps": 2}, {}, [*START, 0, 1, *STOP, *START, 2, 3, *STOP]),
        ({"start_step": 3, "num_steps": 2}, {"max_epochs": 2}, [0, 1, 2, *START, 3, 0, *STOP, 1, 2, 3]),
        ({"start_step": 4, "num_steps": 1}, {"max_epochs": 2}, [0, 1, 2, 3, *START, 0, *STOP, 1, 2, 3]),
        (
            {"start_step": 2, "num_steps": 2},
            {"limit_val_batches": 1, "val_check_interval": 2, "max_epochs": 1},
            [0, 1, "validation", *START, 2, 3, *STOP, "validation"],
        ),
        (
            {"start_step": 1, "num_steps": 2},
            {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 1},
            ["validation", 0, *START, 1, "validation", 2, *STOP, 3, "validation"],
        ),
        ({"start_step": 1, "num_steps": 2}, {"model": ByHand()}, [0, *START, 1, 2, *STOP, 3]),
    ],
)
def test_a_window_holds_whole_steps_and_nothing_else_is_synchronised(events, window, settings, expected):
    callback = CUDAProfilerWindow(**window)
    fit(callback, events, **settings)
    assert events == expected
    starts = window["start_step"]
    assert [result.start_step for result in callback.results] == sorted([starts] if isinstance(starts, int) else starts)
    for result in callback.results:
        assert result.num_steps == window["num_steps"]


def test_what_a_window_reports(events, caplog, monkeypatch):
    clock = iter([10.0, 10.5, 11.0, 11.25, 11.75, 12.0])  # start, four batches, stop
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    callback = CUDAProfilerWindow(start_step=1, num_steps=2)
    with caplog.at_level(logging.INFO):
        fit(callback, events, data=loader(6), accumulate_grad_batches=2)
    (found,) = callback.results
    assert (found.start_step, found.num_steps, found.num_samples, found.seconds) == (1, 2, 16, 2.0)
    assert (found.steps_per_s, found.samples_per_s) == (1.0, 8.0)
    messages = [record.getMessage() for record in caplog.records if "CUDA profiler" in record.getMessage()]
    assert messages == ["CUDA profiler: steps 1 to 2 took 2 s: 1 steps/s, 8 samples/s"]


def test_a_window_of_batches_that_do_not_show_their_size():
    window = cuda_profiler.ProfiledWindow(3)
    window.num_steps, window.seconds, window.num_samples = 2, 4.0, None
    assert str(window) == "steps 3 to 4 took 4 s: 0.5 steps/s"


def test_training_that_ends_inside_a_window(events):
    callback = CUDAProfilerWindow(start_step=2, num_steps=5)
    fit(callback, events)
    assert events == [0, 1, *START, 2, 3, *STOP]
    assert [(result.start_step, result.num_steps) for result in callback.results] == [(2, 2)]


def test_an_exception_inside_a_window_stops_the_profiler_and_waits_for_nothing(events):
    class Failing(Line):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    callback = CUDAProfilerWindow(start_step=1, num_steps=3)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(callback, events, model=Failing())
    assert events == [0, *START, 1, 2, "stop"]
    assert callback.results == []
    events.clear()
    fit(callback, events)
    assert events == [0, *START, 1, 2, 3, *STOP]


def test_a_trainer_that_goes_on(events):
    """A window that was captured in the first fit is no mistake in the second."""
    callback = CUDAProfilerWindow(start_step=[1, 5], num_steps=1)
    trainer = fit(callback, events)
    assert [result.start_step for result in callback.results] == [1]
    trainer.fit_loop.max_epochs = 2
    fit(callback, events, trainer=trainer)
    assert events == [0, *START, 1, *STOP, 2, 3, 0, *START, 1, *STOP, 2, 3]
    assert [result.start_step for result in callback.results] == [5]
    (copied,) = pickle.loads(pickle.dumps(callback)).results
    assert vars(copied) == vars(callback.results[0])
    assert callback.state_dict() == {}


@pytest.mark.parametrize("saved_after", [2, 4])
def test_resuming(events, tmp_path, saved_after):
    """In the middle of an epoch and at its end: Lightning corrects its count of steps after the first hooks."""
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(CUDAProfilerWindow(start_step=0), events, callbacks=[saves], max_steps=saved_after)
    resumed = {"ckpt_path": tmp_path / f"step={saved_after}.ckpt", "max_epochs": 2}
    left = [0, 1, 2, 3, 0, 1, 2, 3][saved_after:]
    for skipped in range(3):
        events.clear()
        window = CUDAProfilerWindow(start_step=saved_after + skipped, num_steps=1)
        fit(window, events, **resumed)
        assert events == [*left[:skipped], *START, left[skipped], *STOP, *left[skipped + 1 :]]
        assert [(result.start_step, result.num_steps) for result in window.results] == [(saved_after + skipped, 1)]
    events.clear()
    fit(CUDAProfilerWindow(start_step=[saved_after - 1, saved_after + 1], num_steps=1), events, **resumed)
    assert events == [left[0], *START, left[1], *STOP, *left[2:]]


def test_a_window_that_is_left_out_is_warned_of_once(events, tmp_path):
    """If it fails, a job that is preempted ends at every restart, because of a callback that only looks on."""
    fit(CUDAProfilerWindow(start_step=0), [], max_steps=4).save_checkpoint(tmp_path / "a.ckpt")
    events.clear()
    trainer = trainer_for([CUDAProfilerWindow(start_step=[0, 2, 5, 9], num_steps=1), Events(events)])
    messages = []
    for num_epochs in (2, 3):
        trainer.fit_loop.max_epochs = num_epochs
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Line(), loader(), ckpt_path=tmp_path / "a.ckpt" if num_epochs == 2 else None)
        messages.append([str(warning.message) for warning in caught if "start_step" in str(warning.message)])
    assert events == [0, *START, 1, *STOP, 2, 3] * 2
    assert messages == [
        [
            "start_step: this training begins at step 4, so the CUDA profiler is not started at step 0, 2.",
            "start_step: training ended after 8 steps, so the CUDA profiler was not started at step 9.",
        ],
        [],
    ]


def on_two_ranks():
    events: list[Any] = []
    fake_cuda(events)
    window, models = CUDAProfilerWindow(start_step=1, num_steps=1, ranks=[1]), (Line(), Line())
    for callback, model, log in zip((window, Callback()), models, (events, []), strict=True):
        fit(callback, log, model=model, data=loader(num_ranks=2), devices=2, strategy=CommOptDDP())
    return events, [model.layer.weight.detach().numpy() for model in models], window.results


def test_the_ranks_that_are_named_profile_and_all_are_timed():
    for rank, (events, (weight, expected), (result,)) in enumerate(run_ranks(on_two_ranks)):
        assert events == ([0, *START, 1, *STOP, 2, 3] if rank == 1 else [0, "wait", 1, "wait", 2, 3])
        assert (result.num_steps, result.num_samples) == (1, 8)
        assert (weight == expected).all()


def test_ranks_that_do_not_exist(events):
    with pytest.raises(MisconfigurationException, match="ranks must be below the number of ranks, 1, got 1, 7"):
        fit(CUDAProfilerWindow(ranks=[0, 1, 7]), events)


def test_without_cuda_it_says_once_that_it_does_nothing(monkeypatch):
    validation.warn_once.cache_clear()
    events: list[Any] = []
    trainer = trainer_for([window := CUDAProfilerWindow(start_step=1), Events(events)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for num_epochs in (1, 2):  # the second fit begins after ``start_step``
            trainer.fit_loop.max_epochs = num_epochs
            trainer.fit(Line(), loader())
    assert sum("has no effect" in str(warning.message) for warning in caught) == 1
    assert events == [0, 1, 2, 3] * 2
    assert window.results == []


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("window", [{"start_step": 1, "num_steps": 2}, {"start_step": 0, "num_steps": 2}])
def test_the_captured_range_holds_whole_nvtx_ranges(events, monkeypatch, is_first, window):
    """A tool that sees one end of a range only does not show it; the order of the callbacks must not matter."""
    domain = RecordedDomain()
    domain.events = events
    monkeypatch.setattr(nvtx, "get_domain", lambda name: domain)
    callbacks = [CUDAProfilerWindow(**window), NVTXRanges()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_for(callbacks if is_first else callbacks[::-1]).fit(Line(), loader())
    captured = events[events.index("start") + 1 : events.index("stop")]
    batches = [event for event in captured if event[1].startswith("Batch")]
    first = window["start_step"]
    assert batches == [(what, f"Batch {index}") for index in (first, first + 1) for what in ("push", "pop")]
    assert captured[0] == ("push", f"Batch {first}")
    assert captured[1] == ("push", "get batch")
    assert captured[-2:] == [("pop", f"Batch {first + 1}"), "wait"]

"""A watch that fails because of a bug in it logs that once, and training continues."""

import logging

import pytest
import torch.distributed as dist

from lightning_commopt import CommOptDDP
from lightning_commopt.watch import fit_watch, own_errors, times
from lightning_commopt.watch.fit_watch import FitWatch
from lightning_commopt.watch.join_watch import JoinWatch
from support.ranks import run_ranks
from support.strategy_models import SelfFed, trainer

_ERROR = "an error of the watch"


class Records(logging.Handler):
    """Keeps what our own loggers log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("lightning_commopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def _raise(*_: object) -> None:
    raise KeyError(_ERROR)


def _fit() -> tuple[list[str], int]:
    records = Records()
    times.FIT_LOOK_S = times.JOIN_LOOK_S = 0.01
    ended = []
    run = FitWatch._run

    def run_and_note(watch: FitWatch) -> None:
        run(watch)
        ended.append(True)

    FitWatch._run, FitWatch._reason_to_end = run_and_note, _raise  # type: ignore[method-assign, assignment]
    fit_watch.Lifelines.update = _raise  # type: ignore[method-assign, assignment]
    JoinWatch._look = _raise  # type: ignore[method-assign, assignment]
    job = trainer(CommOptDDP())
    job.fit(SelfFed())
    dist.barrier()
    assert ended
    return records.texts, job.global_step


def test_training_survives_its_watches() -> None:
    """If it fails, an error of a watch ends training or others' training, or nobody learns that nothing is watched."""
    for logged, num_steps in run_ranks(_fit):
        assert num_steps > 0
        assert len([text for text in logged if "training continues without it" in text]) == len(logged) <= 2
        assert any(text.startswith("The watch of a fit failed because of a bug in it") for text in logged)
        assert all(_ERROR in text and "Traceback" in text for text in logged)


def test_an_error_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If it fails, an error of a watch fills the log, or that of another one is not logged."""
    monkeypatch.setattr(own_errors, "_logged", set())
    for watch in ("a", "a", "b"):
        with own_errors.log_own_errors(watch):
            _raise()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["a", "b"]

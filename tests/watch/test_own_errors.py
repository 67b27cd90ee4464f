"""A watch that fails because of a bug in it logs that once, and training continues; no user's error breaks a watch."""

import json
import logging
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import HangMonitor, RunRecorder
from lightning_commopt.watch import fit_watch, own_errors, times
from lightning_commopt.watch.fit_watch import FitWatch
from lightning_commopt.watch.join_watch import JoinWatch
from support.ranks import run_ranks
from support.strategy_models import SelfFed, Tiny, loader, trainer

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


class Unreadable(Exception):  # noqa: N818
    """An exception of a user that has no text."""

    def __str__(self) -> str:
        raise TypeError("a mistake in a user's exception")

    __repr__ = __str__


class Failing(Tiny):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> NoReturn:
        raise self.error


_WITHOUT_A_TEXT = {
    "Unreadable: <str() failed>": Unreadable(),
    "RuntimeError: <str() failed>": RuntimeError(Unreadable()),
    "SystemExit: <str() failed>": SystemExit(Unreadable()),
}


def _fail(folder: Path) -> list[str]:
    records = Records()
    for number, error in enumerate(_WITHOUT_A_TEXT.values()):
        own = folder / str(number)
        run = trainer(CommOptDDP(), callbacks=[HangMonitor(dirpath=own), RunRecorder(dirpath=own)])
        with pytest.raises(type(error)) as raised:
            run.fit(Failing(error), loader())
        assert raised.value is error
    return records.texts


def test_an_exception_without_a_text_ends_a_fit_as_itself(tmp_path: Path) -> None:
    """If it fails, a mistake in a user's exception hides it, and the other ranks never hear of it."""
    assert run_ranks(_fail, tmp_path) == [[], []]
    for number, text in enumerate(_WITHOUT_A_TEXT):
        assert json.loads((tmp_path / str(number) / "run.json").read_text())["error"].endswith(text)

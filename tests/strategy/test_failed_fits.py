"""What a strategy knows of an exception that has ended its fit."""

from __future__ import annotations

import signal
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_commopt.strategy.base import has_failed
from support.lightnings import PACKAGE, Callback
from support.strategy_models import FEATURES, Tiny, trainer

SIGTERMException = import_module(f"{PACKAGE}.utilities.exceptions").SIGTERMException


class _Fails(Callback):
    """Raises in the first batch, and notes whether the fit has failed: before, and where the exception is handled."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.noted = error, list[bool]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.noted.append(has_failed(trainer.strategy))
        raise self._error

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.noted.append(has_failed(trainer.strategy))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "is_failure"),
    [(ValueError(), True), (SystemExit(), True), (SIGTERMException(), False), (KeyboardInterrupt(), False)],
    ids=repr,
)
def test_a_fit_has_failed_while_its_error_is_handled(error: BaseException, is_failure: bool) -> None:
    """If it fails, a repeated fit saves no residuals, or a failed rank waits for others before it saves."""
    callback, batches = _Fails(error), DataLoader([torch.zeros(FEATURES)])  # type: ignore[arg-type,var-annotated]
    run: Any = trainer("auto", callbacks=[callback])
    assert not has_failed(run.strategy)
    before = signal.getsignal(signal.SIGINT)
    try:
        raise MemoryError
    except MemoryError:  # the fit repeats one that has failed
        with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)):
            run.fit(Tiny(), batches, batches)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from Ctrl+C on
    assert callback.noted == [False, is_failure]
    assert not has_failed(run.strategy)

"""Hints at what was meant, and where warnings point."""

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_commopt import CommPlan
from lightning_commopt.text import validation
from lightning_commopt.text.validation import did_you_mean, warn, warn_once


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("bucket_cap", "bucket_cap_mb"),
        ("bucket_size_mb", "bucket_cap_mb"),
        ("gradientAsBucketView", "gradient_as_bucket_view"),
        ("unused_parameters", "find_unused_parameters"),
        ("hook", "comm_hook"),
        ("zip", None),
        (3, None),
    ],
)
def test_hint(written: object, meant: str | None) -> None:
    """If it fails, a typing error is answered by a list, or by a name that has nothing to do with it."""
    assert did_you_mean(written, CommPlan.options()) == ("" if meant is None else f"; did you mean {meant!r}?")


def test_settings_without_effect_point_at_their_line() -> None:
    """If it fails, the warning shows a line of ours, or of the constructor that dataclasses make."""
    with pytest.warns(UserWarning, match="epsilon") as caught:
        CommPlan.from_dict({"comm_hook": {"name": "powersgd", "matrix_rank": 2, "epsilon": 0.1}})
    line = sys._getframe().f_lineno - 1
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_frames_of_torch_and_lightning_are_left_behind() -> None:
    """If it fails, a warning out of a hook shows a line of torch, which no user can change."""
    code = compile("call()", "elsewhere.py", "exec")
    call: Callable[[], object] = partial(warn, "from within")
    for module in ("lightning_commopt.sync.ddp.hook", "torch.autograd.graph", "lightning.pytorch.trainer.trainer"):
        call = partial(exec, code, {"__name__": module, "call": call})
    with pytest.warns(UserWarning, match="from within") as caught:
        call()
    line = sys._getframe().f_lineno - 1
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_a_thread_of_ours_can_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a warning from a worker thread, below which there is no line of the user's, raises."""
    monkeypatch.setattr(validation, "_SKIPPED_PACKAGES", {*validation._SKIPPED_PACKAGES, __name__})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("from a thread",))
        thread.start()
        thread.join()
    assert [str(warning.message) for warning in caught] == ["from a thread"]


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a warning comes as often as there are ranks, or one that is each rank's own is lost."""
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("for all of them")
        warn("of this rank", on_every_rank=True)
    assert [str(warning.message) for warning in caught] == ["of this rank"]


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a warning comes in every step."""
    validation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_once("once")
    assert len(caught) == 1


def test_checks_import_neither_torch_nor_lightning() -> None:
    """If it fails, commands that only check a name wait for torch."""
    names = vars(sys.modules["lightning_commopt.text.validation"])
    assert not {"torch", "lightning"} & {getattr(value, "__name__", "").partition(".")[0] for value in names.values()}


def test_all_warnings_are_given_here() -> None:
    """If it fails, a warning of ours points at a helper, or comes from every rank."""
    package = Path(validation.__file__).parents[1]
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    calls = ("warnings.warn(", "rank_zero_warn(", "rank_zero_deprecation(")
    assert [name for name, text in sources.items() if any(call in text for call in calls)] == ["text/validation.py"]

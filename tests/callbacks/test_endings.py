"""However a fit ends, its processes end as they do without our callbacks: that status, that error, nobody left."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from ending_fits import Ending, Failing

from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.compat import collectives
from lightning_commopt.measure.recorder import StepRecorder
from support.lightnings import DDPStrategy
from support.marked_processes import Program
from support.ranks import run_ranks
from support.strategy_models import loader, trainer

_SCRIPT = str(Path(__file__).parent / "ending_fits.py")
_LIMIT_S = 540

_WAYS = {
    "step": 1,
    "backward": 1,
    "validation": 1,
    "train_end": 1,
    "on_exception": 1,
    "exit": 3,
    "exit_after": 3,
    "SIGTERM": 0,
    "SIGINT": 1,
    "after": 1,
    "second": 1,
    "none": 0,
}
"""Where a fit ends, and the status of stock Lightning; its SIGTERMException is a SystemExit without a status."""

_WITHOUT_ERROR = ("exit", "exit_after", "SIGTERM", "SIGINT", "none")


def _check(cases: list[str], folder: Path, *, watched: bool = True) -> None:
    names = [f"{case},{watched}" for case in cases]
    program = Program([_SCRIPT, str(folder), *names], folder)
    program.finish(_LIMIT_S)
    ends = dict(line.split(maxsplit=1) for line in program.output.splitlines() if line.startswith(tuple(names)))
    for name in names:
        way = name.split(",")[1]
        said = [(folder / name / rank).read_text() for rank in "01"]
        assert ends[name] == f"{_WAYS[way]} {_WAYS[way]}", (name, ends[name], *said)
        assert ["ValueError: mine" in text for text in said] == [way not in _WITHOUT_ERROR] * 2, (name, *said)


@pytest.mark.exhaustive
def test_statuses_of_stock_lightning(tmp_path: Path) -> None:
    """If it fails, Lightning's statuses have changed, and `_WAYS` must change with them."""
    _check([f"ddp,{way}" for way in ("step", "exit", "SIGTERM", "SIGINT")], tmp_path, watched=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "ways"),
    [("ddp", _WAYS), ("bf16", ["backward", "exit"]), ("fsdp2_bf16", ["step", "SIGTERM", "second"])],
)
def test_every_end_of_a_fit(strategy: str, ways: Iterable[str], tmp_path: Path) -> None:
    """If it fails, a user's exception may be a segmentation fault, and a launcher shows that instead."""
    _check([f"{strategy},{way}" for way in ways], tmp_path)


def _fit_after_a_failure() -> list[int]:
    failing, strategy = Failing(), DDPStrategy()
    monitor = CommTimeMonitor(num_warmup_steps=1, save_records=False, print_summary=False)
    run = trainer(strategy, max_epochs=1, callbacks=[failing, monitor])
    model = Ending("on_exception", is_sharded=False)
    with pytest.raises(ValueError, match="mine"):
        run.fit(model, loader())
    optimizer = run.optimizers[0]
    run.callbacks.remove(failing)  # type: ignore[attr-defined]
    model.way = "none"
    run.fit(model, loader())
    listeners = [listener for hooks in collectives._HOOKS.values() for listener in hooks._listeners]
    return [
        len(optimizer._optimizer_step_post_hooks),
        len(strategy.sync_observers),  # type: ignore[attr-defined]
        sum(isinstance(getattr(listener, "__self__", None), StepRecorder) for listener in listeners),
        sum(bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()),
    ]


def test_the_next_fit_takes_off_what_a_failed_one_left() -> None:
    """If it fails, a fit that is caught and repeated records its steps twice, and the first records grow for ever."""
    assert run_ranks(_fit_after_a_failure) == [[0, 0, 0, 0]] * 2

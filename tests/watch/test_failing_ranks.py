"""A rank that fails in the middle of a fit: the others end, its traceback comes first, no process is left."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.process import is_alive
from lightning_commopt.watch.peers import Peers
from support.lightnings import Callback
from support.marked_processes import Program
from support.ranks import run_ranks, run_ranks_or_raise
from support.strategy_models import BatchNormed, SelfFed, Tiny, loader, trainer
from support.vanishing import Vanishing, check_that_both_end, prepare_rank

_SCRIPT = str(Path(__file__).parent / "failing_script.py")
_TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
_START_S = 180
_LIMIT_S = 60
"""Only against waiting for ever: gloo's own limit is half an hour."""


class _VanishingFed(Vanishing, SelfFed):
    pass


def _vanish(folder: Path) -> None:
    prepare_rank(folder)
    trainer(CommOptDDP()).fit(_VanishingFed())


def _two_nodes() -> dict[str, int]:
    """Lets ranks see each other by lifelines only; returns options of their Trainer."""
    os.environ |= {"NODE_RANK": os.environ["LOCAL_RANK"], "LOCAL_RANK": "0"}
    return {"devices": 1, "num_nodes": 2}


def _vanish_on_another_node(folder: Path) -> None:
    prepare_rank(folder)
    trainer(CommOptDDP(), **_two_nodes()).fit(_VanishingFed())


@pytest.mark.parametrize("fit", [_vanish, _vanish_on_another_node])
def test_rank_that_waits_for_a_dead_one_ends(fit: Callable[[Path], None], tmp_path: Path) -> None:
    """If it fails, ranks hang until somebody looks."""
    check_that_both_end(fit, tmp_path, _LIMIT_S)


class CaughtOnAll(SelfFed):
    """Raises on all ranks, on rank 1 long after the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(40 * times.FIT_GRACE_S * self.global_rank)
        raise ArithmeticError


def _catch(folder: Path) -> None:
    _watch_quickly()
    rank = int(os.environ["LOCAL_RANK"])
    with pytest.raises(ArithmeticError):
        trainer(CommOptDDP(), **_two_nodes()).fit(CaughtOnAll())
    (folder / str(rank)).touch()
    deadline = time.monotonic() + _LIMIT_S / 2
    while not (folder / "1").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_what_all_ranks_raise_may_be_caught(tmp_path: Path) -> None:
    """If it fails, a program that catches an exception on all ranks is ended, as one of them is slow."""
    run_ranks(_catch, tmp_path, limit_s=_LIMIT_S)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "rank", "fault", "others"),
    [
        ("fork", 3, 0, "raise", "stuck"),
        ("torchrun", 2, 1, "exit", "sync"),
        ("popen", 2, 1, "kill", "sleep"),
        ("fork", 2, 0, "launcher", "sync"),
    ],
)
def test_other_ranks_end_on_every_launcher(
    launcher: str, num_ranks: int, rank: int, fault: str, others: str, tmp_path: Path
) -> None:
    """If it fails, a job that is dead keeps its devices, or hides why it is dead."""
    said = _run(launcher, num_ranks, rank, fault, others, tmp_path)
    if fault == "raise":
        errors = [line for line in said.splitlines() if "Error: " in line]
        assert "ArithmeticError: broken on purpose" in errors[0], said


def _run(launcher: str, num_ranks: int, rank: int, fault: str, others: str, tmp_path: Path) -> str:
    """Returns what the script has said, when all its processes have ended."""
    start_method = "popen" if launcher == "torchrun" else launcher
    script = [_SCRIPT, str(tmp_path), start_method, *map(str, (num_ranks, rank, fault, others))]
    torchrun = [*_TORCHRUN, f"--nproc-per-node={num_ranks}"] if launcher == "torchrun" else []
    program = Program([*torchrun, *script], tmp_path)
    try:
        deadline = time.monotonic() + _START_S
        while not (tmp_path / "failed").exists():
            assert time.monotonic() < deadline, program.output
            assert program.process.poll() is None, program.output
            time.sleep(0.1)
        assert program.wait(_LIMIT_S), f"{program.processes()} are left: {program.output}"
    finally:
        program.kill()
    assert program.process.returncode != 0
    return program.output


def _watch_quickly() -> None:
    times.FIT_LOOK_S, times.STALLED_S, times.FIT_GRACE_S = 0.02, 0.05, 0.05


def _compute_gradients() -> None:
    """Takes several times the limits of a quick watch, nearly always in backward, and without a collective."""
    weight = torch.randn(512, 512, requires_grad=True)
    x = torch.randn(512, 512)
    for _ in range(4):
        x = torch.tanh(x @ weight)
    loss, end = x.sum(), time.monotonic() + 10 * times.FIT_GRACE_S
    while time.monotonic() < end:
        loss.backward(retain_graph=True)


class Writer(Callback):
    """Rank 1 dies while rank 0 computes and writes results, in the middle of an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 1:
            os._exit(3)
        if batch_idx == 1:
            peers = trainer.strategy._guards.fit_watch._peers
            deadline = time.monotonic() + _LIMIT_S / 2
            while not peers.has_died() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert peers.has_died()
            _compute_gradients()
            time.sleep(20 * times.FIT_GRACE_S)  # as a write would take
            (self.folder / "written").touch()


def _write(folder: Path) -> None:
    _watch_quickly()
    trainer(CommOptDDP(), callbacks=[Writer(folder)]).fit(SelfFed())


def test_what_a_rank_does_alone_is_not_cut_off(tmp_path: Path) -> None:
    """If it fails, a checkpoint or an upload is lost because another rank has died meanwhile."""
    run_ranks_or_raise(_write, tmp_path, world_size=2, limit_s=_LIMIT_S)
    assert (tmp_path / "written").exists()


class Late(SelfFed):
    """Rank 1 works on, in its last batch and when training has ended, after rank 0's process has ended well."""

    has_worked = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)  # logs nothing, so that no collective keeps rank 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == self.trainer.num_training_batches - 1:
            strategy: Any = self.trainer.strategy
            peers: Peers = strategy._guards.fit_watch._peers
            deadline = time.monotonic() + _LIMIT_S / 2
            while peers.query_store(lambda: True, False) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not peers.query_store(lambda: True, False)
            time.sleep(10 * times.FIT_GRACE_S)

    def on_train_end(self) -> None:
        if self.global_rank == 1:
            _compute_gradients()
            self.has_worked = True
            raise RuntimeError("its own error")


def _end_late() -> tuple[bool, str]:
    _watch_quickly()
    module = Late()
    try:
        trainer(CommOptDDP(), max_epochs=1).fit(module)
    except RuntimeError as error:
        return module.has_worked, str(error)
    return module.has_worked, ""


def test_rank_that_ends_after_rank_0_is_left_alone() -> None:
    """If it fails, what a rank does after the end of rank 0, and of the store with it, is cut off or misexplained."""
    assert run_ranks(_end_late, world_size=2, limit_s=_LIMIT_S) == [(False, ""), (True, "its own error")]


class Saver(Callback):
    """Rank 0 raises, and takes several times the limits of a quick watch to save; `wait_for_rank_1` follows."""

    def __init__(self, folder: Path, at_batch: int = 1) -> None:
        self.folder, self.at_batch = folder, at_batch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # before ranks compare their weights
        if trainer.global_rank == 1:
            (self.folder / "pid").write_text(str(os.getpid()), encoding="ascii")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx == self.at_batch:
            raise ArithmeticError("broken on purpose")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.global_rank == 0:
            time.sleep(40 * times.FIT_GRACE_S)
            (self.folder / f"saved_while_alive={is_alive(self._pid)}").touch()

    def wait_for_rank_1(self) -> None:
        """Returns once the process of rank 1 has ended, while this one lives."""
        deadline = time.monotonic() + _LIMIT_S / 2
        while is_alive(self._pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        (self.folder / f"is_alive={is_alive(self._pid)}").touch()

    def check(self) -> None:
        assert (self.folder / "saved_while_alive=True").exists()
        assert (self.folder / "is_alive=False").exists()

    @property
    def _pid(self) -> int:
        return int((self.folder / "pid").read_text(encoding="ascii"))


def _fit_and_wait(saver: Saver, fit: Callable[[], None]) -> None:
    _watch_quickly()
    with pytest.raises(ArithmeticError, match="broken on purpose"):
        fit()
    saver.wait_for_rank_1()


def _raise_before_buffers(folder: Path) -> None:
    saver = Saver(folder)
    fit = trainer(CommOptDDP(), callbacks=[saver])
    _fit_and_wait(saver, lambda: fit.fit(BatchNormed(), loader()))


class StoppedSaver(Saver):
    """Rank 0 raises after a batch that ends training early, so that rank 1 waits for it at the end of the epoch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == self.at_batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx == self.at_batch:
            raise ArithmeticError("broken on purpose")


def _raise_before_end(folder: Path) -> None:
    saver = StoppedSaver(folder)
    fit = trainer(CommOptDDP(), callbacks=[saver])
    if int(os.environ["LOCAL_RANK"]) == 0:
        _fit_and_wait(saver, lambda: fit.fit(SelfFed()))
    else:
        _watch_quickly()
        fit.fit(SelfFed())


def test_rank_at_the_end_of_an_epoch_raises_after_one_that_saves_on_an_error(tmp_path: Path) -> None:
    """If it fails, a checkpoint on an error is lost, as launchers end all ranks after the first one."""
    answers = run_ranks_or_raise(_raise_before_end, tmp_path, world_size=2, limit_s=_LIMIT_S)
    assert "waits at the end of an epoch, but another rank has failed" in str(answers[1])
    Saver(tmp_path).check()


def test_rank_that_waits_for_buffers_of_one_that_has_raised_ends(tmp_path: Path) -> None:
    """If it fails, a checkpoint on an error is lost, or ranks with BatchNorm then wait half an hour for its rank."""
    run_ranks_or_raise(_raise_before_buffers, tmp_path, world_size=2, limit_s=_LIMIT_S)
    Saver(tmp_path).check()


def _raise_before_exchange(folder: Path, sync_every: int) -> None:
    saver = Saver(folder, at_batch=2)
    strategy = CommOptDiLoCo(sync_every=sync_every)
    fit = trainer(strategy, callbacks=[saver], max_epochs=1, limit_val_batches=0)
    _fit_and_wait(saver, lambda: fit.fit(Tiny(), loader()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync_every", [pytest.param(3, id="in_a_step"), pytest.param(100, id="at_the_end_of_the_fit")])
def test_rank_that_waits_in_an_exchange_for_one_that_has_raised_ends(sync_every: int, tmp_path: Path) -> None:
    """If it fails, a checkpoint on an error is lost, or ranks of DiLoCo then wait half an hour for its rank."""
    run_ranks_or_raise(_raise_before_exchange, tmp_path, sync_every, world_size=2, limit_s=_LIMIT_S)
    Saver(tmp_path).check()


def _train(watch: bool) -> tuple[set[str], float]:
    seen: set[str] = set()

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update(thread.name for thread in threading.enumerate())

    fit = trainer(CommOptDDP(watch=watch), callbacks=[Look()])
    fit.fit(SelfFed())
    return seen, float(fit.callback_metrics["loss"])


def _train_both() -> None:
    (unseen, loss), (seen, watched_loss) = _train(False), _train(True)
    assert not [name for name in unseen if name.startswith(("commopt-fit", "commopt-join"))]
    assert "commopt-fit-watch" in seen
    assert loss == watched_loss


def test_watching_can_be_switched_off() -> None:
    """If it fails, ``watch=False`` still starts threads, or trains something else."""
    run_ranks(_train_both, limit_s=_LIMIT_S)

"""CommOptDiLoCo with ``patience_s``: ranks of a Trainer die or freeze, and the fit goes on."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from lightning_commopt.strategy.living_collectives import _gather_metrics_over_living
from lightning_commopt.sync.diloco.living import LivingRanks
from lightning_commopt.sync.store import poll
from lightning_commopt.watch import times
from support.lightnings import needs_sigterm_broadcast
from support.patient_ranks import Ranks
from support.patient_trainers import FROZEN, KILLED, RAISES, STEPS_PER_EPOCH, TERMINATED, Ended, Fit, fit, free_port
from support.strategy_models import assert_same

_STEPS = 3 * STEPS_PER_EPOCH
_SCRIPT = Path(__file__).parent / "patient_script.py"


def _check_survivors(ended: list[Ended]) -> None:
    """Fails unless the fit of all has ended whole, with the same result, which is the mean of their own."""
    assert [end.steps for end in ended] == [_STEPS] * len(ended)
    last = [loss for end in ended for loss in end.val_losses[-2:]]
    for end in ended:
        assert_same(end.weights, ended[0].weights)
        assert end.metrics["val_loss"] == pytest.approx(sum(last) / len(last), rel=1e-5)
        assert end.metrics["val_metric"] == pytest.approx(sum(last) / len(last), rel=1e-5)
        assert end.metrics["train_loss_epoch"] == ended[0].metrics["train_loss_epoch"]
        assert end.best == ended[0].best != ""


def test_a_fit_goes_on_without_a_dead_rank_and_takes_a_frozen_one_back(tmp_path: Path) -> None:
    """If it fails, a rank that ends or freezes takes the others with it, in an exchange or in the Trainer."""
    job = Fit(tmp_path, {1: (FROZEN, 9), 2: (KILLED, 29)}, patience_s=3.0)
    with Ranks(fit, 3, free_port(), job) as ranks:
        ranks.wait_until(lambda: ranks.is_frozen(1))
        ranks.wait_until(lambda: ranks.store.check(["step/0/13"]))  # after the exchange that rank 1 has missed
        ranks.signal(1, signal.SIGCONT)
        ended = ranks.wait_for([0, 1])
    _check_survivors(ended)
    assert ended[1].num_trained < _STEPS
    texts = "\n".join(line for end in ended for line in end.log)
    assert "rank 1 joins again, from the global weights" in texts
    assert "rank 2, which has left or shown no sign of life for patience_s=3: 2 of 3 ranks continue in " in texts


@needs_sigterm_broadcast
@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 2, "overlap": 1},
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
)
def test_all_ranks_end_together_after_sigterm(tmp_path: Path, options: dict[str, Any]) -> None:
    """If it fails, SIGTERM is acted upon only at the end of an epoch, or leaves the other ranks waiting."""
    job = Fit(tmp_path, {1: (TERMINATED, 17)}, patience_s=60.0, options=options)
    with Ranks(fit, 2, free_port(), job) as ranks:
        ended = ranks.wait_for(range(2))
    assert [(end.error, end.log) for end in ended] == [("SIGTERMException", [])] * 2
    # An exchange begins after the step, which brings word, or with fragments one in the middle of the round.
    assert {end.steps for end in ended} == {19 if options else 20}


@pytest.mark.exhaustive
def test_what_measures_and_watches_a_fit_lets_it_go_on(tmp_path: Path) -> None:
    """If it fails, CommTimeMonitor waits for the numbers of a dead rank, or HangMonitor ends the survivors."""
    # The survivors train for longer than a death stays unreported, as it is not once nobody is left to be told.
    job = Fit(tmp_path, {2: (KILLED, 17)}, pause_s=times.DEATH_S / 8, is_watched=True)
    with Ranks(fit, 3, free_port(), job) as ranks:
        ended = ranks.wait_for([0, 1])
    _check_survivors(ended)
    sentence = json.loads((tmp_path / "hangs" / "report.json").read_text())["sentence"]
    assert sentence.startswith("rank 2 has died in "), sentence


@pytest.mark.exhaustive
def test_a_rank_that_raises_ends_alone(tmp_path: Path) -> None:
    with Ranks(fit, 3, free_port(), Fit(tmp_path, {2: (RAISES, 17)})) as ranks:
        answers = [ranks.outcome(rank) for rank in range(3)]
    assert (tmp_path / "after.ckpt").exists()
    assert "ArithmeticError: broken on purpose" in (answers[2][1] or "")
    _check_survivors([end for end, _ in answers[:2]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_frozen_until_the_others_have_ended(tmp_path: Path, rank: int) -> None:
    """If it fails, it waits for half an hour for ranks that will never come."""
    with Ranks(fit, 3, free_port(), Fit(tmp_path, {rank: (FROZEN, 17)})) as ranks:
        survivors = ranks.wait_for([other for other in range(3) if other != rank])
        ranks.signal(rank, signal.SIGCONT)
        end, trace = ranks.outcome(rank)
    _check_survivors(survivors)
    assert end is None
    assert "MembersError" in (trace or "")


@pytest.mark.exhaustive
def test_the_end_of_rank_0_ends_the_others_with_the_reason(tmp_path: Path) -> None:
    with Ranks(fit, 3, free_port(), Fit(tmp_path, {0: (KILLED, 17)})) as ranks:
        traces = [ranks.outcome(rank)[1] for rank in (1, 2)]
    for trace in traces:
        assert "without torchrun rank 0" in (trace or ""), trace


@pytest.mark.exhaustive
def test_a_host_of_the_store_that_freezes_is_waited_for(tmp_path: Path) -> None:
    """If it fails, the time in which the store itself was frozen counts as if a rank had been late."""
    with Ranks(fit, 3, free_port(), Fit(tmp_path, {0: (FROZEN, 17)})) as ranks:
        ranks.wait_until(lambda: ranks.is_frozen(0))
        ranks.collect(6.0)
        ranks.signal(0, signal.SIGCONT)
        ended = ranks.wait_for(range(3))
    _check_survivors(ended)


@pytest.mark.exhaustive
def test_a_job_that_is_suspended_as_a_whole(tmp_path: Path) -> None:
    """If it fails, a scheduler that suspends a healthy job makes its ranks lose each other."""
    with Ranks(fit, 3, free_port(), Fit(tmp_path, pause_s=0.05)) as ranks:
        ranks.wait_until(lambda: ranks.store.check(["step/0/17"]))
        for rank in range(3):
            ranks.signal(rank, signal.SIGSTOP)
        ranks.collect(6.0)
        for rank in (2, 1, 0):
            ranks.signal(rank, signal.SIGCONT)
        ended = ranks.wait_for(range(3))
    _check_survivors(ended)
    assert [end.num_trained for end in ended] == [_STEPS] * 3
    assert not any(end.log for end in ended)


def _commands(how: str, port: int, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Returns how the ranks are started, of which rank 2 or 1 is killed; each command with its variables."""
    python = [sys.executable, "-W", "ignore"]
    script, address = [str(_SCRIPT), str(folder)], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if how == "lightning":
        return [([*python, *script, "3", "1", "1"], address)]
    if how == "hand":
        return [([*python, *script, "1", "3", "2"], {**address, "NODE_RANK": str(rank)}) for rank in range(3)]
    torchrun = [*python, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1", f"--master-port={port}"]
    return [([*torchrun, f"--node-rank={rank}", *script, "1", "3", "2"], {}) for rank in range(3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["hand", "torchrun", "lightning"])
def test_survivors_of_a_launcher_end_as_if_nothing_had_happened(how: str, tmp_path: Path) -> None:
    """If it fails, a launcher ends the survivors, or threads that wait for a dead peer keep their processes."""
    paths = ":".join(map(str, (_SCRIPT.parents[1], _SCRIPT.parents[2])))
    common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "output").open("ab") as file:
        for command, variables in _commands(how, free_port(), tmp_path):
            options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "env": common | variables}
            started.append(subprocess.Popen(command, **options))
    try:
        assert poll(lambda: len(_ends(tmp_path)) == 2, 240), (tmp_path / "output").read_text()
        # torchrun's agents wait five minutes for that of the rank that was killed.
        statuses = [] if how == "torchrun" else sorted(bool(process.wait(60)) for process in started)
    finally:
        for process in started:
            process.terminate()
            process.wait(60)
    ends = _ends(tmp_path)
    assert ends[0] == ends[1]
    assert ends[0].startswith(f"{_STEPS} ")
    assert statuses == {"lightning": [False], "hand": [False, False, True], "torchrun": []}[how]


def _ends(folder: Path) -> list[str]:
    return re.findall(r"RANK \d ENDED (.*)\n", (folder / "output").read_text())


def test_a_metric_is_copied_and_pickled_while_it_gathers_over_the_living() -> None:
    """If it fails, a MetricTracker or a callback that copies the model breaks with ``patience_s``."""
    module = nn.ModuleDict({"metric": MeanMetric()})
    store = dist.HashStore()
    living = LivingRanks(store, 0, 1, patience_s=60.0, timeout_s=60.0, log=lambda text: None)
    _gather_metrics_over_living(module, living)
    metric = module["metric"]
    assert isinstance(metric, MeanMetric)
    copied, pickled = metric.clone(), pickle.loads(pickle.dumps(metric))
    assert copied.dist_sync_fn is metric.dist_sync_fn is not None
    assert pickled.dist_sync_fn is None
    assert [x.item() for x in copied.dist_sync_fn(torch.tensor(3.0))] == [3.0]
    living.close()

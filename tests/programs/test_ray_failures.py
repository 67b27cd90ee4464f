"""A job of Ray Train in which workers fail: Ray starts it again, and it ends as if nothing had happened."""

import re
from pathlib import Path

import pytest
import torch
from test_ray_train import read, run

from lightning_commopt import CommOptDDP
from support.ranks import run_ranks
from support.strategy_models import Params, assert_same, numbers, trainer

pytestmark = pytest.mark.exhaustive
pytest.importorskip("ray", reason="benchmarks/programs.sh installs and runs this")

from ray_fits import FAULTS, Steady  # noqa: E402


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the job has trained, and what its driver has printed."""
    folder = tmp_path_factory.mktemp("failed")
    return folder, run("faults", folder)


def _train(folder: Path) -> tuple[Params, Params]:
    """Trains without Ray and without a failure; and in two fits, of which the second begins without residuals."""
    whole, first, second = Steady(), Steady(), Steady()
    trainer(CommOptDDP(comm_hook="int8"), max_epochs=6).fit(whole)
    before = trainer(CommOptDDP(comm_hook="int8", save_comm_state=False), max_epochs=3)
    before.fit(first)
    before.save_checkpoint(folder / "first.ckpt")
    trainer(CommOptDDP(comm_hook="int8"), max_epochs=6).fit(second, ckpt_path=folder / "first.ckpt")
    return numbers(whole), numbers(second)


def test_ends_bit_for_bit_as_without_failures(failed: tuple[Path, str], tmp_path: Path) -> None:
    """If it fails, a restarted job has lost its residuals, or needs more restarts than there were failures."""
    folder, _ = failed
    assert all((folder / f"failed-{epoch}").exists() for epoch in FAULTS)
    assert (folder / "attempts").read_text() == "x" * (1 + len(FAULTS))
    for got, (expected, without_residuals) in zip(read(folder, "trained"), run_ranks(_train, tmp_path), strict=True):
        assert_same(got, expected)
        assert any((got[name] != values).any() for name, values in without_residuals.items())


def test_metrics_reach_ray(failed: tuple[Path, str]) -> None:
    """If it fails, Tune cannot search over plans."""
    metrics = torch.load(failed[0] / "metrics.pt", weights_only=False)
    assert metrics["comm_time/step_s"] > 0
    assert 0 <= metrics["comm_time/exposed_share"] <= 1


@pytest.mark.parametrize(
    "message",
    [
        r"HangMonitor: rank 1 has died in forward of step \d+: process \d+ on \S+ was killed by SIGKILL; rank 0 ",
        r"HangMonitor: rank 0 has died in forward of step \d+: process \d+ on \S+ was killed by SIGKILL; rank 1 ",
        r"HangMonitor: rank 1 is still in forward of step \d+ \(.*ray_fits.py:\d+ in fail_once",
    ],
)
def test_driver_shows_who_failed(failed: tuple[Path, str], message: str) -> None:
    """If it fails, nobody sees which worker the others wait for."""
    assert re.search(message, failed[1])


def test_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    """If it fails, an elastic job cannot use a checkpoint of more workers."""
    run("elastic", tmp_path)
    assert not (tmp_path / "of-3-0.pt").exists()
    some, others = read(tmp_path, "of-2")
    assert some["was_resumed"]
    assert_same(some["parameters"], others["parameters"])

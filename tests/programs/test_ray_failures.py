"""A job of Ray Train in which workers fail: Ray starts it again, and it ends as if nothing had happened."""

import re
from pathlib import Path

import pytest
import torch
from test_ray_train import read, run

from lightning_commopt import CommOptDDP, CommOptModelParallel
from support.ranks import run_ranks
from support.strategy_models import Params, assert_same, numbers, trainer

pytestmark = pytest.mark.exhaustive
pytest.importorskip("ray", reason="benchmarks/programs.sh installs and runs this")

from ray_fits import FAULTS, JOBS, Steady, whole_numbers  # noqa: E402


@pytest.fixture(scope="module", params=sorted(JOBS))
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the job has trained, which is also its name, and what its driver has printed."""
    folder = tmp_path_factory.mktemp("failed") / request.param
    folder.mkdir()
    return folder, run("faults", folder)


def _train(folder: Path) -> tuple[Params, Params]:
    """Trains with int8 without Ray and without a failure; and in two fits, the second of which has no residuals."""
    whole, first, second = Steady(), Steady(), Steady()
    trainer(CommOptDDP(comm_hook="int8"), max_epochs=6).fit(whole)
    before = trainer(CommOptDDP(comm_hook="int8", save_comm_state=False), max_epochs=3)
    before.fit(first)
    before.save_checkpoint(folder / "first.ckpt")
    trainer(CommOptDDP(comm_hook="int8"), max_epochs=6).fit(second, ckpt_path=folder / "first.ckpt")
    return numbers(whole), numbers(second)


def _train_sharded(_: Path) -> tuple[Params, Params]:
    """Trains without Ray and without a failure; and for an epoch less."""
    fits = []
    for max_epochs in (6, 5):
        model = JOBS["sharded"][0]()
        strategy = CommOptModelParallel(2, 1, accumulate_grads="unsharded")
        trainer(strategy, max_epochs=max_epochs, accumulate_grad_batches=2).fit(model)
        fits.append(whole_numbers(model))
    return fits[0], fits[1]


def test_ends_bit_for_bit_as_without_failures(failed: tuple[Path, str], tmp_path: Path) -> None:
    """If it fails, a restarted job has lost residuals or shards, or needs more restarts than there were failures."""
    folder, _ = failed
    assert all((folder / f"failed-{epoch}").exists() for epoch in FAULTS)
    assert (folder / "starts").read_text().split() == ["0", *map(str, FAULTS)]
    fits = run_ranks({"int8": _train, "sharded": _train_sharded}[folder.name], tmp_path)
    for got, (expected, other) in zip(read(folder, "trained"), fits, strict=True):
        assert_same(got, expected)
        assert any((got[name] != values).any() for name, values in other.items())


def test_files_of_a_checkpoint(failed: tuple[Path, str]) -> None:
    """If it fails, a worker's shard is where its node alone can see it."""
    folder, _ = failed
    checkpoints = [path / "checkpoint.ckpt" for path in (folder / "storage" / "run").glob("checkpoint_2*")]
    assert len(checkpoints) == 6
    for path in checkpoints:
        if folder.name == "int8":
            assert path.is_file()
        else:
            assert {each.name for each in path.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}


def test_metrics_reach_ray(failed: tuple[Path, str]) -> None:
    """If it fails, Tune cannot search over plans."""
    metrics = torch.load(failed[0] / "metrics.pt", weights_only=False)
    assert metrics["comm_time/step_s"] > 0
    assert 0 <= metrics["comm_time/exposed_share"] <= 1


@pytest.mark.parametrize(
    "message",
    [
        r"HangMonitor: rank 1 has died in forward of step \d+: process \d+ on \S+ (was killed|is gone).*; rank 0 ",
        r"HangMonitor: rank 0 has died in forward of step \d+: process \d+ on \S+ (was killed|is gone).*; rank 1 ",
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

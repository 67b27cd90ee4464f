"""Ray Train with our strategy, on workers of this machine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_array_equal

from support.marked_processes import Program
from support.strategy_models import assert_same

pytestmark = pytest.mark.exhaustive
pytest.importorskip("ray", reason="benchmarks/programs.sh installs and runs this")

LIMIT_S = 580
"""Only against waiting for ever."""
LOSSLESS = ("ours", "all_reduce", "static")
LOSSY = ("int8", "powersgd")


def run(scenario: str, folder: Path) -> str:
    """Runs a scenario of ``ray_fits``, and returns what its driver has printed."""
    program = Program([str(Path(__file__).with_name("ray_fits.py")), scenario, str(folder)], folder)
    assert program.finish(LIMIT_S) == 0, program.output[-5000:]
    return program.output


def read(folder: Path, name: str, num_ranks: int = 2) -> list[Any]:
    """Returns what the ranks have left."""
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where two workers have trained with every strategy, and what the driver has printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run("all", folder)


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_trains_as_rays_own_strategy(trained: tuple[Path, str], name: str) -> None:
    """If it fails, a plan that loses nothing trains another model under Ray, or ranks differ."""
    expected = read(trained[0], "ray")[0]["parameters"]
    ranks = read(trained[0], name)
    for key, values in expected.items():
        assert_array_equal(ranks[0]["parameters"][key], ranks[1]["parameters"][key])
        assert (ranks[0]["parameters"][key] == values).all() == (name in LOSSLESS)


@pytest.mark.parametrize("name", ["ray", *LOSSLESS, *LOSSY])
def test_is_measured(trained: tuple[Path, str], name: str) -> None:
    """If it fails, CommTimeMonitor sees nothing of a worker of Ray."""
    folder, _ = trained
    for rank, found in enumerate(read(folder, name)):
        assert found["summary"]["wire_bytes"] > 0
        assert found["num_processes"] == (1 if name == "ray" else 2)
        assert (folder / name / "comm_time" / f"rank_{rank}.jsonl").exists()


def test_driver_shows_the_table(trained: tuple[Path, str]) -> None:
    """If it fails, the summary is lost in a worker."""
    assert trained[1].count("of the step waits for communication") + trained[1].count("of step") >= 6


def test_shards(tmp_path: Path) -> None:
    """If it fails, workers resume from other parameters, or save their shards where another node does not look."""
    run("shards", tmp_path)
    first, second = read(tmp_path, "epochs-1"), read(tmp_path, "epochs-2")
    assert [resumed for resumed, _ in (*first, *second)] == [False, False, True, True]
    for some, others in (first, second):
        assert_same(some[1], others[1])
    assert any((first[0][1][name] != values).any() for name, values in second[0][1].items())
    own = [{each.name for each in (tmp_path / f"own-{rank}.ckpt").iterdir()} for rank in range(2)]
    assert own == [{".metadata", "meta.pt", "__0_0.distcp"}, {"__1_0.distcp"}]


def test_wrong_uses(tmp_path: Path) -> None:
    """If it fails, a strategy in the wrong place or a single worker gets no clear line."""
    output = run("wrongly", tmp_path)
    (messages,) = read(tmp_path, "messages", num_ranks=1)
    names = [f"lightning_commopt.ray.{name}" for name in ("CommOptDDP", "CommOptModelParallel")]
    assert [message.partition(" ")[0] for message in messages] == ["In", "In", *names]
    assert all(name in message for name, message in zip(names * 2, messages, strict=True))
    assert "CommOptDDP: one process, so there are no gradients to synchronize" in output

"""Ranks that Lightning's launchers and torchrun start, in an environment of their own."""

from pathlib import Path

import numpy as np
import pytest

from lightning_commopt import CommOptDDP
from support.marked_processes import Program
from support.ranks import run_ranks
from support.strategy_models import Params, SelfFed, assert_same, numbers, trainer

_FOLDER = Path(__file__).parent
_SCRIPT = str(_FOLDER / "launched_script.py")
_TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
_LIMIT_S = 200

pytestmark = pytest.mark.exhaustive  # programs that import everything, several times


def _fit() -> Params:
    module = SelfFed()
    trainer(CommOptDDP()).fit(module)
    return numbers(module)


@pytest.mark.parametrize(("launcher", "start_method"), [([], "spawn"), (_TORCHRUN, "popen")], ids=["spawn", "torchrun"])
def test_trains_in_ranks_that_a_launcher_starts(launcher: list[str], start_method: str, tmp_path: Path) -> None:
    """If it fails, the strategy does not train in ranks that Lightning or torchrun starts, or leaves a process."""
    program = Program([*launcher, _SCRIPT, "params.npz", start_method], tmp_path)
    assert program.finish(_LIMIT_S) == 0, program.output
    with np.load(tmp_path / "params.npz") as saved:
        assert_same(dict(saved), run_ranks(_fit)[0], rtol=1e-6)


def test_exception_in_a_launched_rank(tmp_path: Path) -> None:
    """If it fails, an exception in one rank leaves the others hanging, or is not shown."""
    program = Program([_SCRIPT, "params.npz", "popen", "--breaks"], tmp_path)
    assert program.finish(_LIMIT_S) != 0
    assert "ArithmeticError: broken on purpose" in program.output

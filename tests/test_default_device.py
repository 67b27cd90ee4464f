"""Scripts that make every tensor on a device by default, as after ``torch.set_default_device("cuda")``.

Here the default device is "meta", whose tensors have no values: what lands there by mistake is of no use.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_commopt
from lightning_commopt.callbacks.all_ranks import AllRanks
from lightning_commopt.compressors.base import Layout
from lightning_commopt.compressors.sharded import ShardedInt8
from lightning_commopt.measure.runs.losses import LossCurve
from lightning_commopt.sync.warm_up import run_alone
from support.every_compressor import COMPRESSORS

_PACKAGE = Path(lightning_commopt.__file__).parent
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)
# Programs of ours, in which no user's code sets a default: their models and data are made where they train.
_PROGRAMS = ("commands/selftest", "testing", "train")

ALONE: Any = SimpleNamespace(size=1, rank=0, within=None, across=None)
CHANNEL: Any = SimpleNamespace(size=1, rank=0, within=ALONE, across=ALONE)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressors_work_on_the_device_of_the_gradients(name: str) -> None:
    """If it fails, a comm hook raises in such scripts, or compresses tensors without values."""
    parameters = [torch.ones(40, 33), torch.ones(7)]
    layout = Layout.of(parameters, torch.float32)
    flat = torch.randn(layout.numel)
    average = flat.clone()
    with torch.device("meta"):
        run_alone(COMPRESSORS[name], layout, average, CHANNEL)
    assert average.device.type == "cpu"
    assert torch.isfinite(average).all()
    assert float(torch.dot(average, flat)) > 0


def test_times_are_gathered_on_the_host() -> None:
    with torch.device("meta"):
        ranks = AllRanks(None, (2, 3))
        ranks.send(torch.ones(2, 3, dtype=torch.float64, device="cpu"))
    gathered = ranks.take()
    assert gathered is not None
    assert gathered.sum() == 6


def test_losses_are_collected_on_the_host() -> None:
    curve = LossCurve()
    with torch.device("meta"):
        curve.add(torch.ones((), device="cpu"), step=1, seconds=0.5)
        (point,) = curve.points()
    assert (point.step, point.seconds, point.loss) == (1, 0.5, 1.0)


def test_a_seed_is_kept_on_the_host() -> None:
    with torch.device("meta"):
        state = ShardedInt8(stochastic_rounding=True).init(64, 2, torch.device("cpu"), seed=7)
    assert int(state["seed"]) == 7


def _without_device(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FACTORIES:
            is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torchs and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                yield f"{path.relative_to(_PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_new_tensor_names_its_device() -> None:
    """If it fails, a tensor lands on the default device of the user's script."""
    paths = [
        path
        for path in _PACKAGE.rglob("*.py")
        if not any(path.is_relative_to(_PACKAGE / program) for program in _PROGRAMS)
    ]
    assert [line for path in sorted(paths) for line in _without_device(path)] == []

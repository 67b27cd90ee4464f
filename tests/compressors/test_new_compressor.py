"""What a new compressor takes: its file, the line that imports it, and one YAML; everything else asks its class."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from own_compressor import TopK

import lightning_commopt
from lightning_commopt.compat.hydra import allow_targets
from lightning_commopt.compressors import Layout, register_compressor, registry
from lightning_commopt.compressors.catalog import example_compressors, recommended
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.cost.compressor_cost import measure_costs
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.link.link import Link
from lightning_commopt.measure.verdict import verdict
from lightning_commopt.plan import CommPlan
from lightning_commopt.report.names import display_name, setting_name
from lightning_commopt.strategy.adapters import aliases
from lightning_commopt.testing import check_compressor
from lightning_commopt.train.sweep.config import check_config, sync_method
from support.composed import composed
from support.cross_section import sampled
from support.ranks import run_ranks
from support.sample_metrics import sample_metrics

_FILE = '''
from dataclasses import dataclass

import torch

from lightning_commopt import Claims, Compressor, register_compressor


@register_compressor("fp8")
@dataclass(frozen=True, kw_only=True)
class Float8(Compressor):
    """Sends numbers of eight bits to all ranks, and adds them up there."""

    claims = Claims(error_bound=0.12, is_recommended=True)

    def init(self, layout, device, step=0):
        return {}

    def rounds(self, flat, layout, state, channel, residual=None):
        gathered = yield channel.all_gather((flat / channel.size).to(torch.float8_e5m2))
        flat.copy_(gathered.to(flat.dtype).sum(0))

    def wire_bytes(self, layout, world_size):
        return layout.numel * world_size // 2  # an all-gather is half an all-reduce


def is_tried():
    from lightning_commopt.compressors.catalog import example_compressors
    from support.every_compressor import COMPRESSORS

    return COMPRESSORS["fp8"] == example_compressors()["fp8"] == Float8()
'''


@pytest.fixture
def new_compressor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A file with a compressor, imported; the registry is as before afterwards."""
    monkeypatch.setattr(registry, "_BUCKET_ENTRIES", dict(registry._BUCKET_ENTRIES))
    (tmp_path / "new_float8.py").write_text(_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("new_float8")
    sys.modules.pop("new_float8")


@pytest.mark.usefixtures("new_compressor")
def test_its_name_is_known_everywhere() -> None:
    """If it fails, something outside of compressors/ keeps a list of them."""
    assert CommPlan(comm_hook="fp8").name == "fp8"  # type: ignore[arg-type]
    assert display_name("fp8") == setting_name({"strategy.comm_hook.name": "fp8"}) == "fp8"
    assert aliases()["commopt_ddp_fp8_spawn"]["comm_hook"] == "fp8"
    assert "fp8" in example_compressors()


def test_it_is_recommended_by_what_it_claims(new_compressor: ModuleType) -> None:
    """If it fails, recommendations know only the compressors that they were written with."""
    assert recommended() == ["bf16", "int8", "fp8", "int4", "powersgd"]
    gradients = [Gradient("w", (512, 512), 4, 0.01)]
    work = Workload(gradients=tuple(gradients), forward_s=0.01, backward_s=0.01, rest_s=0.0, num_ranks=2)
    link = Link(hop_s=1e-4, s_per_byte=1e-6)
    costs = measure_costs([None, new_compressor.Float8()], gradients, torch.device("cpu"), 2)
    basis = Basis(plan=CommPlan(), workload=work, link=link, costs=costs, step_s=1.0)
    (own,) = (forecast for forecast in forecasts(basis) if '"fp8"' in forecast.setting)
    found = verdict(sample_metrics(), world_size=2, comm_hook="none", is_lossy=False, forecasts=[own])
    (text,) = (text for text in found.recommendations if '"fp8"' in text)
    assert re.match(r'comm_hook="fp8", lossy: .*\d times as fast', text)
    assert text.endswith("Compare the final metric as well.")


@dataclass(frozen=True, kw_only=True)
class _Unready(TopK):
    """Its defaults do not go together, and only training knows its bytes."""

    share: float = 0.0

    def __post_init__(self) -> None:
        if not self.share:
            raise ValueError("share must be given")

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        raise RuntimeError("its bytes are known in training only")


@pytest.mark.usefixtures("new_compressor")
def test_a_class_that_cannot_be_asked_ends_no_fit() -> None:
    """If it fails, the summary of a fit raises because of a class that the fit may not even use."""
    register_compressor("unready")(_Unready)
    assert "unready" not in aliases()
    assert "unready" not in recommended()
    gradients = [Gradient("w", (512, 512), 4, 0.01)]
    with pytest.warns(UserWarning, match="its bytes are known in training only"):
        assert measure_costs([None, _Unready(share=0.1)], gradients, torch.device("cpu"), 2).keys() == {None}


@pytest.mark.usefixtures("new_compressor")
def test_its_yaml_is_an_option_of_commopt_train(tmp_path: Path) -> None:
    """If it fails, a YAML in the group is not enough."""
    folder = tmp_path / "conf" / "strategy" / "comm_hook"
    folder.mkdir(parents=True)
    (folder / "fp8.yaml").write_text("name: fp8\n")
    with allow_targets(["lightning_commopt", "lightning"]):
        config = composed("strategy/comm_hook=fp8", f"hydra.searchpath=[file://{tmp_path / 'conf'}]")
        check_config(config)
    assert sync_method(config) == "fp8"


def test_the_laws_are_checked_for_it(new_compressor: ModuleType) -> None:
    """If it fails, the self-test or the law tests leave it out."""
    assert run_ranks(new_compressor.is_tried, world_size=1) == [True]


@pytest.mark.parametrize("laws", sampled([["averages"], None], by_default=[["averages"]]))
def test_it_obeys_the_laws(laws: list[str] | None, new_compressor: ModuleType) -> None:
    """If it fails, nobody's compressor passes `check_compressor`."""
    check_compressor(new_compressor.Float8(), laws=laws)


_MAY_NAME_THEM = {
    "lightning_commopt/__init__.py",  # the public names, which tests freeze
    "lightning_commopt/cost/diloco.py",  # predicts what the paper of Streaming DiLoCo sends: 4 bits
    "lightning_commopt/report/names.py",  # how PowerSGD is spelled
}


def test_no_other_file_names_compressors() -> None:
    """If it fails, a new compressor needs an edit there as well: ask its class instead, see `Claims`."""
    package = Path(lightning_commopt.__file__).parent
    names = {"bf16", "fp16", "int4", "powersgd", "alternating_powersgd", "Int4", "PowerSGD", "AlternatingPowerSGD"}
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if path.parent.name in ("compressors", "kernels") or not any(f'"{name}"' in text for name in names):
            continue
        if names & {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}:
            found.add(str(path.relative_to(package.parent)))
    assert found == _MAY_NAME_THEM

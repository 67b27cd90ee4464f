"""The public names, freezing what users may rely on."""

import ast
import dataclasses
import inspect
from abc import ABCMeta
from importlib.metadata import version
from pathlib import Path

import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
import pytorch_lightning.strategies
from typer.main import get_command

import lightning_commopt.fabric
import lightning_commopt.lightning
import lightning_commopt.pytorch_lightning
from lightning_commopt import DiLoCoPlan, callbacks, compressors, metrics, testing
from lightning_commopt.commands.app import app
from lightning_commopt.compressors import Compressor, compressor_names
from lightning_commopt.plan import CommPlan

STRATEGIES = [
    (lightning_commopt.lightning.CommOptDDP, lightning.pytorch.strategies.DDPStrategy),
    (lightning_commopt.pytorch_lightning.CommOptDDP, pytorch_lightning.strategies.DDPStrategy),
    (lightning_commopt.fabric.CommOptDDP, lightning.fabric.strategies.DDPStrategy),
]
_DILOCO_OF_FABRIC = lightning_commopt.fabric.CommOptDiLoCo


def test_names() -> None:
    """If it fails, a public name has come or gone: say so in the changelog."""
    assert lightning_commopt.__all__ == [
        "AfterSteps",
        "AllReduce",
        "AlternatingPowerSGD",
        "BySize",
        "Cast",
        "Claims",
        "CommOptDDP",
        "CommOptDiLoCo",
        "CommOptModelParallel",
        "CommPlan",
        "Compressor",
        "DiLoCoPlan",
        "ErrorFeedback",
        "Hierarchical",
        "Int4",
        "Int8",
        "NcclOptions",
        "OptionError",
        "PowerSGD",
        "ShardedCompressor",
        "ShardedPlan",
        "register_compressor",
        "shard",
    ]
    assert all(hasattr(lightning_commopt, name) for name in lightning_commopt.__all__)
    assert set(lightning_commopt.__all__) < set(dir(lightning_commopt))
    assert lightning_commopt.compressors.Int8 is lightning_commopt.Int8
    assert lightning_commopt.__version__ == version("lightning-commopt")
    with pytest.raises(AttributeError, match="no attribute 'Int7'"):
        getattr(lightning_commopt, "Int7")  # noqa: B009 - type checkers know that there is none


def test_type_checkers_see_every_name() -> None:
    """If it fails, an IDE does not know a public name, or mypy takes any name for one."""
    tree = ast.parse(Path(lightning_commopt.__file__).read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(lightning_commopt.__all__)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in branch.orelse)


def test_comm_hook_names() -> None:
    """If it fails, a name that configurations use has gone."""
    algorithms = ["all_reduce", "bf16", "fp16", "powersgd", "alternating_powersgd", "int8", "int4", "hierarchical"]
    parts = ["low_rank", "alternating_low_rank", "block_int8", "block_int4", "error_feedback", "after_steps", "by_size"]
    assert {"none", *algorithms, *parts} <= set(compressor_names())


def test_callbacks() -> None:
    """If it fails, a callback that projects use has come or gone."""
    assert callbacks.__all__ == [
        "CUDAProfilerWindow",
        "CommTimeMonitor",
        "HangMonitor",
        "NVTXRanges",
        "OuterMomentum",
        "RunRecorder",
        "SpeedMonitor",
    ]


def test_metrics() -> None:
    """If it fails, a metric that projects log has come or gone."""
    assert metrics.__all__ == ["QUANTITIES", "ExposedShare", "StepMetric", "StepStatistics"]


def test_testing() -> None:
    """If it fails, a name, an option or a law that tests of users have in them has come or gone."""
    assert testing.__all__ == ["LAWS", "SHARDED_LAWS", "Law", "check_compressor"]
    options = list(inspect.signature(testing.check_compressor).parameters)
    assert options == ["compressor", "num_ranks", "device", "laws"]
    common = ["same_collectives", "averages", "bytes_as_declared", "overflow", "tiny", "resume"]
    of_buckets = ["ranks_agree", "as_reference", "as_ddp", "small_and_unused", "own_randomness"]
    assert sorted(testing.LAWS) == sorted([*common, *of_buckets])
    assert sorted(testing.SHARDED_LAWS) == sorted([*common, "only_matrices", "unbiased"])
    for laws in (testing.LAWS, testing.SHARDED_LAWS):
        assert all(law.name == name and law.statement and law.consequence for name, law in laws.items())


def test_commands() -> None:
    """If it fails, a command of ``commopt`` has come or gone."""
    commands = [
        "bench",
        "doctor",
        "info",
        "nccl-log",
        "nsys",
        "predict",
        "report",
        "run",
        "selftest",
        "summary",
        "topo",
        "trace",
        "tune",
    ]
    assert sorted(get_command(app).commands) == commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(("ours", "stock"), [*STRATEGIES, (_DILOCO_OF_FABRIC, lightning.fabric.strategies.DDPStrategy)])
def test_takes_all_that_lightnings_strategy_takes(ours: type, stock: type) -> None:
    """If it fails, an existing ``DDPStrategy(...)`` call breaks when its name is replaced."""
    of_ours, of_stock = (inspect.signature(cls).parameters for cls in (ours, stock))
    positional = [name for name, parameter in of_stock.items() if parameter.kind is not parameter.VAR_KEYWORD]
    assert list(of_ours)[: len(positional)] == positional
    assert all(of_ours[name].default == of_stock[name].default for name in positional)
    assert issubclass(ours, stock)


@pytest.mark.parametrize("ours", [ours for ours, _ in STRATEGIES])
def test_every_option_of_a_plan_is_a_documented_keyword(ours: type) -> None:
    """If it fails, an option cannot be set, or nobody can read what it does."""
    keywords = inspect.signature(ours).parameters
    documented, described = inspect.getdoc(ours) or "", inspect.getdoc(CommPlan) or ""
    for option in CommPlan.options():
        assert keywords[option].default is None
        assert keywords[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert keywords[option] == inspect.signature(lightning_commopt.fabric.CommOptDDP).parameters[option]
        assert documented.count(f"    {option}: ") == 1
    assert described.partition("Attributes:\n")[2].partition("\n\n")[0] in documented


@pytest.mark.parametrize(
    "ours",
    [lightning_commopt.lightning.CommOptDiLoCo, lightning_commopt.pytorch_lightning.CommOptDiLoCo, _DILOCO_OF_FABRIC],
)
def test_every_option_of_diloco_is_a_documented_keyword(ours: type) -> None:
    """If it fails, an option of a DiLoCoPlan cannot be set, has two defaults, or nobody can read what it does."""
    keywords, documented = inspect.signature(ours).parameters, inspect.getdoc(ours) or ""
    for field in dataclasses.fields(DiLoCoPlan):
        if ours is _DILOCO_OF_FABRIC and field.name in ("eval_weights", "inner"):
            assert field.name not in keywords
            assert f"    {field.name}: " not in documented
            continue
        assert keywords[field.name].default == field.default
        assert keywords[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert documented.count(f"    {field.name}: ") == 1
    described = inspect.getdoc(DiLoCoPlan) or ""
    assert "accumulate_grads: " not in (inspect.getdoc(lightning_commopt.fabric.CommOptModelParallel) or "")
    all_described = described.partition("Attributes:\n")[2].partition("\n\n")[0]
    assert all_described in documented or ours is _DILOCO_OF_FABRIC


def test_compressors_are_frozen_and_keyword_only() -> None:
    """If it fails, a setting can change under a running compressor, or depends on the order of its arguments."""
    for cls in vars(compressors).values():
        # Not isinstance, for which Python 3.10 takes an alias such as Rounds for a class.
        if type(cls) is ABCMeta and issubclass(cls, Compressor) and cls is not Compressor:
            assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
            assert all(field.kw_only for field in dataclasses.fields(cls))  # type: ignore[arg-type]

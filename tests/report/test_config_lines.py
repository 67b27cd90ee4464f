"""Lines to paste must make the plan that was run."""

import pytest
import yaml

from lightning_commopt import (
    CommOptDDP,
    DiLoCoPlan,
    Int4,
    Int8,
    ShardedPlan,
)
from lightning_commopt.plan import CommPlan
from lightning_commopt.report.build import build_report
from lightning_commopt.report.config_lines import config_forms
from support.collectives import takes_collectives
from support.composed import composed
from support.sample_runs import save_run

PLANS = [
    CommPlan(),
    CommPlan(bucket_cap_mb=100, comm_hook="bf16"),  # type: ignore[arg-type]
    CommPlan(static_graph=True, comm_hook={"name": "powersgd", "matrix_rank": 4}),  # type: ignore[arg-type]
    CommPlan(comm_hook={"name": "hierarchical", "inner": {"name": "int8", "block_size": 64}}),  # type: ignore[arg-type]
]
SHARDED = ShardedPlan(comm_hook={"name": "int8", "block_size": 64}, accumulate_grads="unsharded")  # type: ignore[arg-type]
OTHERS = [
    DiLoCoPlan(),
    DiLoCoPlan(sync_every=100, fragments=4, overlap=2, comm_hook=Int4(block_size=64), outer_lr=0.5),
    DiLoCoPlan(inner=CommPlan()),
    DiLoCoPlan(inner=CommPlan(comm_hook=Int8(), bucket_cap_mb=100)),
    pytest.param(SHARDED, marks=takes_collectives),
]
STRATEGIES: dict[type, str] = {CommPlan: "CommOptDDP", DiLoCoPlan: "CommOptDiLoCo", ShardedPlan: "CommOptModelParallel"}


def _lines(folder, *overrides, **fields) -> list[str]:  # type: ignore[no-untyped-def]
    save_run(folder / "0", *overrides, **fields)
    save_run(folder / "1", "strategy=something_else", sync_method="x", plan=None)
    group = build_report([folder]).groups[0]
    return list(group.settings[0].config_lines)


@pytest.mark.parametrize("plan", [*PLANS, *OTHERS])
def test_yaml_and_python_make_the_same_plan(tmp_path, plan):
    """If it fails, who pastes the lines trains with another strategy, or with other options."""
    lines = _lines(tmp_path, plan=plan.to_dict(), plan_type=type(plan).__name__, sync_method=plan.sync_method)
    strategy = yaml.safe_load("\n".join(lines))["strategy"]
    assert yaml.safe_load(config_forms(lines)["YAML"])["strategy"] == strategy
    assert strategy.pop("_target_") == f"lightning_commopt.{STRATEGIES[type(plan)]}"
    assert type(plan).from_dict(strategy) == plan
    assert lines[-1].startswith(f"# in Python: {STRATEGIES[type(plan)]}(")
    names: dict[str, CommOptDDP] = {}
    exec(config_forms(lines)["Python"], names)
    assert names["strategy"].plan == plan


def test_ranks_that_share_a_model_are_pasted(tmp_path):
    """If it fails, who pastes the lines of FSDP2 trains with two ranks that share one model."""
    config = {"strategy": {"data_parallel_size": 2, "save_comm_state": True}}
    lines = _lines(tmp_path, plan=SHARDED.to_dict(), plan_type="ShardedPlan", config=config)
    strategy = yaml.safe_load("\n".join(lines))["strategy"]
    assert strategy == {
        "_target_": "lightning_commopt.CommOptModelParallel",
        **SHARDED.to_dict(),
        "data_parallel_size": 2,
    }


@pytest.mark.parametrize("plan", PLANS[2:])
def test_yaml_is_an_experiment_of_commopt_train(tmp_path, plan):
    lines = _lines(tmp_path, plan=plan.to_dict())
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "pasted.yaml").write_text("\n".join(["# @package _global_", *lines]))
    config = composed(f"hydra.searchpath=[file://{tmp_path}]", "experiment=pasted")
    options = {name: value for name, value in config.strategy.items() if value is not None and name in plan.to_dict()}
    assert CommPlan.from_dict(options) == plan


@pytest.mark.parametrize("options", [{}, {"lossy": ["int8"]}])
@pytest.mark.parametrize("node", ["strategy", "trainer.strategy"])
def test_a_plan_that_was_to_be_found_is_to_be_found_again(tmp_path, node, options):
    """If it fails, the lines of plan="auto" train with the plan that it has begun with."""
    config = {"plan": "auto", "static_graph": True, **options}
    for name in reversed(node.split(".")):
        config = {name: config}
    lines = _lines(tmp_path, f"{node}.plan=auto", sync_method="auto", plan={"static_graph": True}, config=config)
    given = {"static_graph": True, "plan": "auto", **options}
    assert yaml.safe_load("\n".join(lines))["strategy"] == {"_target_": "lightning_commopt.CommOptDDP", **given}
    python = lines[-1].removeprefix("# in Python: ")
    assert eval(python, {"CommOptDDP": lambda **arguments: arguments}) == given
    CommOptDDP(**given)


def test_an_unknown_compressor_is_kept_as_it_is(tmp_path):
    hook = {"name": "of_a_later_version", "x": 1}
    assert yaml.safe_load("\n".join(_lines(tmp_path, plan={"comm_hook": hook})))["strategy"]["comm_hook"] == hook


def test_other_options_and_the_command_line(tmp_path):
    lines = _lines(
        tmp_path,
        "trainer.accumulate_grad_batches=4",
        "+commopt=bf16",
        "variant=bf16",
        "seed=1",
        "repetition=2",
        plan=None,
    )
    assert lines == [
        "# on the command line: trainer.accumulate_grad_batches=4 +commopt=bf16 variant=bf16",
        "trainer:",
        "  accumulate_grad_batches: 4",
    ]


def test_another_strategy_is_that_of_the_configuration(tmp_path):
    strategy = {"_target_": "x.DDPStrategy", "bucket_cap_mb": None, "static_graph": True}
    save_run(tmp_path / "0", "strategy=ddp", plan=None, config={"strategy": strategy})
    lines = build_report([tmp_path]).groups[0].settings[0].config_lines
    assert yaml.safe_load("\n".join(lines)) == {"strategy": {"_target_": "x.DDPStrategy", "static_graph": True}}


def test_ranks_are_pasted_where_they_were_set(tmp_path):
    save_run(tmp_path / "0", "trainer.devices=2", plan=None, world_size=2)
    save_run(tmp_path / "1", "trainer.devices=4", plan=None, world_size=4)
    lines = [setting.config_lines for setting in build_report([tmp_path]).groups[0].settings]
    assert [yaml.safe_load("\n".join(own)) for own in lines] == [{"trainer": {"devices": n}} for n in (2, 4)]


@pytest.mark.parametrize(
    "overrides",
    [("optimizer=sgd", "optimizer.lr=0.1"), ("optim@a=sgd", "optimizer.lr=0.1"), ("optimizer.lr=0.1", "optimizer=sgd")],
)
def test_the_choice_of_a_config_group_is_no_value(tmp_path, overrides):
    assert _lines(tmp_path, *overrides, plan=None)[1:] == ["optimizer:", "  lr: 0.1"]


def test_a_choice_whose_options_nobody_set_is_none_either(tmp_path):
    save_run(tmp_path / "0", "optimizer=sgd", plan=None, config={"optimizer": {"lr": 0.1}})
    save_run(tmp_path / "1", "optimizer=adam", plan=None)
    settings = build_report([tmp_path]).groups[0].settings
    assert settings[0].config_lines == ("# on the command line: optimizer=sgd",)

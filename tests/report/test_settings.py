from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.measure.runs.settings import settings_of
from lightning_commopt.report.grouping import GroupRuns, group_runs
from lightning_commopt.report.names import setting_name
from lightning_commopt.report.runs import read_runs
from support.sample_runs import save_run


def _groups(folder: Path, *jobs: str, **fields: Any) -> list[GroupRuns]:
    """Sorts runs with these overrides, each written with spaces between."""
    for number, overrides in enumerate(jobs):
        save_run(folder / str(number), *overrides.split(), **fields)
    return group_runs(read_runs([folder]))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("strategy/comm_hook=bf16 strategy.bucket_cap_mb=100 ranks=4", "bf16, 100 MiB buckets, 4 ranks"),
        ("trainer.devices=4 strategy.bucket_cap_mb=100 strategy/comm_hook=bf16", "bf16, 100 MiB buckets, 4 ranks"),
        ("variant=one_bucket", "one bucket"),
        ("variant=ddp_one_process", "DDP on one process"),
        ("variant=powersgd", "PowerSGD"),
        ("method=ddp ranks=2", "DDP, 2 ranks"),
        ("strategy/comm_hook=none", "uncompressed"),
        ("strategy/comm_hook=powersgd_rank_8", "PowerSGD rank 8"),
        ("commopt=alternating_powersgd", "alternating PowerSGD"),
        ("strategy/comm_hook=powersgd strategy.comm_hook.matrix_rank=4", "PowerSGD, matrix rank 4"),
        ("trainer.strategy.bucket_cap_mb=null", "default buckets"),
        ("strategy.bucket_cap_mb=[1,25]", "buckets of 1, 25 MiB"),
        ("strategy.bucket_cap_mb=0.5", "0.5 MiB buckets"),
        ("strategy.static_graph=true strategy.gradient_as_bucket_view=True", "static graph, bucket view"),
        ("strategy.static_graph=false strategy/comm_hook=bf16", "bf16"),
        ("strategy.static_graph=false", "no static graph"),
        ("trainer.accumulate_grad_batches=4", "accumulate 4"),
        ("trainer.accumulate_grad_batches=1", "no accumulation"),
        ("strategy=fsdp model.activation_checkpointing=true", "FSDP, activation checkpointing"),
        ("data.batch_size=32 ranks=1", "batch 32, 1 rank"),
        ("model.size=small link=1gbit", "small, 1 Gbit/s"),
        ("link=200mbit hosts=2", "200 Mbit/s, 2 hosts"),
        ("model.hidden_size=64", "model.hidden size 64"),
        (
            "strategy=commopt_fsdp strategy.param_hook=int8 strategy.accumulate_grads=unsharded",
            "CommOptModelParallel, int8 parameters, accumulate unsharded",
        ),
        ("strategy.reduce_scatter_max_input_buffers=4", "4 input buffers"),
    ],
)
def test_names(overrides, name):
    assert setting_name(settings_of(Path("run"), {}, overrides.split()).chosen) == name


SIZES = ("small", "large")
SORTED = {
    "by model or link": (
        [f"model.size={size} method={method}" for size in SIZES for method in ("naive", "ddp")],
        {size: {"naive": 1, "DDP": 1} for size in SIZES},
    ),
    "experiments that each choose a plan": (
        [f"experiment={name} seed={seed}" for name in ("ddp", "bf16") for seed in (1, 2)],
        {"": {"DDP": 2, "bf16": 2}},
    ),
    "experiments for each size of a model": (
        [f"experiment={name} model.size={size}" for name in ("ddp", "bf16") for size in SIZES],
        {size: {"DDP": 1, "bf16": 1} for size in SIZES},
    ),
    "one process, whatever ranks is": (
        [f"method={method} ranks={ranks}" for method in ("one_process", "ddp") for ranks in (2, 4)],
        {"": {"one process": 2, "DDP, 2 ranks": 1, "DDP, 4 ranks": 1}},
    ),
    "a choice of nothing": (["variant=null ranks=2", "ranks=2", "ranks=4"], {"": {"2 ranks": 2, "4 ranks": 1}}),
    "a default": (["strategy.bucket_cap_mb=100", ""], {"": {"100 MiB buckets": 1, "default bucket cap mb": 1}}),
}


@pytest.mark.parametrize(("jobs", "expected"), SORTED.values(), ids=SORTED.keys())
def test_groups_have_settings_and_these_their_runs(tmp_path, jobs, expected):
    groups = _groups(tmp_path, *jobs)
    found = {group.name: {setting.name: len(setting.runs) for setting in group.settings} for group in groups}
    assert found == expected
    assert list(map(list, found.values())) == list(map(list, expected.values())), "in the order of the sweep"


def test_settings_differ_in_what_the_sweep_varies(tmp_path):
    (group,) = _groups(tmp_path, "a=1 strategy/comm_hook=none", "a=1 strategy/comm_hook=bf16")
    assert [(setting.name, dict(setting.values)) for setting in group.settings] == [
        ("uncompressed", {"strategy/comm_hook": "none"}),
        ("bf16", {"strategy/comm_hook": "bf16"}),
    ]


def test_repetitions_and_seeds_are_runs_of_a_setting(tmp_path):
    groups = _groups(
        tmp_path,
        *(
            f"strategy/comm_hook={hook} seed={seed} hydra.job.num={seed}"
            for seed in (1, 2)
            for hook in ("none", "bf16")
        ),
        "strategy/comm_hook=none repetition=2 repeat=1 num_warmup_steps=3 trainer.enable_progress_bar=false",
    )
    assert [len(setting.runs) for setting in groups[0].settings] == [3, 2]
    assert [run.repetition for run in groups[0].settings[0].runs] == [0, 1, 2]


@pytest.mark.parametrize("name", ["random_seed", "seed_everything", "trainer.seed", "model.random_seed"])
def test_a_seed_of_another_name_is_a_repetition_too(tmp_path, name):
    (group,) = _groups(
        tmp_path, *(f"variant={variant} {name}={seed}" for variant in ("bf16", "powersgd") for seed in (2, 1))
    )
    assert [len(setting.runs) for setting in group.settings] == [2, 2]
    first, second = ({run.repetition_key for run in setting.runs} for setting in group.settings)
    assert first == second
    assert len(first) == 2


def test_runs_are_in_the_order_of_their_repetitions(tmp_path):
    (group,) = _groups(tmp_path, "repetition=2", "repetition=0", "repetition=1")
    assert [run.name for run in group.settings[0].runs] == ["1", "2", "0"]


def test_settings_of_one_repetition_share_a_key(tmp_path):
    for sweep in ("a", "b"):
        for hook in ("none", "bf16"):
            save_run(tmp_path / sweep / hook, f"strategy/comm_hook={hook}", "repetition=0")
    (group,) = group_runs(read_runs([tmp_path]))
    keys = [[run.repetition_key for run in setting.runs] for setting in group.settings]
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[0][1]


@pytest.mark.parametrize("option", ["model.activation_checkpointing=true", "data.batch_size=8"])
def test_some_options_of_model_and_data_are_compared(tmp_path, option):
    assert len(_groups(tmp_path, "strategy=ddp", f"strategy=ddp {option}")) == 1


@pytest.mark.parametrize("option", ["link=1gbit", "data=digits", "datamodule=x", "model/encoder=y"])
def test_others_are_not(tmp_path, option):
    assert len(_groups(tmp_path, "strategy=ddp", f"strategy=ddp {option}")) == 2


def test_names_are_unique(tmp_path):
    (group,) = _groups(
        tmp_path, *(f"strategy/comm_hook=bf16 strategy.static_graph={value}" for value in ("null", "false", "true"))
    )
    names = [setting.name for setting in group.settings]
    assert len(set(names)) == 3, names


def test_without_overrides_the_records_tell_runs_apart(tmp_path):
    for place in range(2):
        save_run(tmp_path / f"none{place}", sync_method="none", plan={"bucket_cap_mb": 25})
        save_run(
            tmp_path / f"bf16{place}", sync_method="bf16", plan={"bucket_cap_mb": 25, "comm_hook": {"name": "bf16"}}
        )
        save_run(tmp_path / f"four{place}", sync_method="none", plan={"bucket_cap_mb": 25}, world_size=4)
    (group,) = group_runs(read_runs([tmp_path]))
    assert [(setting.name, len(setting.runs)) for setting in group.settings] == [
        ("bf16, 2 ranks", 2),
        ("uncompressed, 4 ranks", 2),
        ("uncompressed, 2 ranks", 2),
    ]


def test_equal_overrides_of_a_foreign_launcher_with_other_plans(tmp_path):
    save_run(tmp_path / "0", "data=x", plan={"static_graph": True})
    save_run(tmp_path / "1", "data=x", plan={"static_graph": True, "bucket_cap_mb": 100})
    (group,) = group_runs(read_runs([tmp_path]))
    assert [setting.name for setting in group.settings] == ["default bucket cap mb", "100 MiB buckets"]


def test_plans_of_both_strategies_are_told_apart(tmp_path):
    """If it fails, runs of CommOptDDP and of CommOptModelParallel are repetitions of one setting."""
    save_run(tmp_path / "0", sync_method="ModelParallelStrategy", plan=None)
    save_run(tmp_path / "1", sync_method="int8", plan={"comm_hook": {"name": "int8"}})
    save_run(tmp_path / "2", sync_method="none", plan={"param_hook": "int8"}, plan_type="ShardedPlan")
    save_run(tmp_path / "3", sync_method="int8", plan={"comm_hook": {"name": "int8"}}, plan_type="ShardedPlan")
    (group,) = group_runs(read_runs([tmp_path]))
    assert {setting.name: dict(setting.values) for setting in group.settings} == {
        "Lightning's FSDP2": {"plan": "ModelParallelStrategy"},
        "int8": {"plan": "int8"},
        "CommOptModelParallel, uncompressed, int8 parameters": {
            "strategy": "commopt_fsdp",
            "plan": "none",
            "strategy.param_hook": "int8",
        },
        "CommOptModelParallel, int8": {"strategy": "commopt_fsdp", "plan": "int8"},
    }


def test_plans_of_diloco_have_names(tmp_path):
    """If it fails, a report calls DiLoCo "uncompressed", and takes it for the DDP that it is compared with."""
    save_run(tmp_path / "0", sync_method="none", plan={})
    save_run(tmp_path / "1", sync_method="diloco", plan={}, plan_type="DiLoCoPlan")
    plan = {"sync_every": 100, "fragments": 4, "comm_hook": {"name": "int4"}}
    save_run(tmp_path / "2", sync_method="diloco_int4", plan=plan, plan_type="DiLoCoPlan")
    (group,) = group_runs(read_runs([tmp_path]))
    names = ["uncompressed", "DiLoCo", "DiLoCo int4, exchange every 100 steps, 4 fragments"]
    assert [setting.name for setting in group.settings] == names
    overrides = ["strategy=diloco", "strategy/comm_hook=int8", "strategy.overlap=2", "strategy.mixing=0.25"]
    save_run(tmp_path / "by_overrides" / "0", *overrides)
    save_run(tmp_path / "by_overrides" / "1", "strategy=commopt")
    (group,) = group_runs(read_runs([tmp_path / "by_overrides"]))
    assert [setting.name for setting in group.settings] == ["DiLoCo, int8, overlap 2, mixing 0.25", "CommOptDDP"]


def test_equal_numbers_and_defaults_are_equal_values(tmp_path):
    """If it fails, the same plan is compared with itself, as it was written in two ways."""
    for number, cap in enumerate(["25", "25.0", "null"]):
        save_run(tmp_path / str(number), f"strategy.bucket_cap_mb={cap}", "model.size=small")
    save_run(tmp_path / "3", "model.size=small")
    (group,) = group_runs(read_runs([tmp_path]))
    assert [(setting.name, len(setting.runs)) for setting in group.settings] == [
        ("25 MiB buckets", 2),
        ("default buckets", 2),
    ]


def test_the_only_setting_is_called_by_its_plan(tmp_path):
    (group,) = _groups(tmp_path, "", sync_method="bf16", plan={"bucket_cap_mb": 100}, world_size=4)
    assert group.settings[0].name == "bf16, 100 MiB buckets, 4 ranks"


def test_failed_runs_know_what_they_belong_to(tmp_path):
    save_run(tmp_path / "0", "variant=bf16", "repetition=0")
    save_run(tmp_path / "1", "variant=bf16", "repetition=1", status="failed", error="x", world_size=None)
    save_run(tmp_path / "2", "variant=powersgd", status="failed", error="x", world_size=None)
    (group,) = group_runs(read_runs([tmp_path]))
    assert [setting.name for setting in group.settings] == ["bf16"]
    assert [run.setting for run in group.failed] == ["bf16", "PowerSGD"]


def test_sweeps_that_set_different_things_are_reported_together(tmp_path):
    save_run(tmp_path / "a" / "0", "experiment=ladder", "variant=one_bucket")
    save_run(tmp_path / "b" / "0", "experiment=buckets", "strategy.bucket_cap_mb=25")
    groups = group_runs(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert [group.name for group in groups] == ["ladder", "buckets"]


def test_without_overrides_failed_runs_are_of_their_plan(tmp_path):
    for plan in ("none", "bf16"):
        save_run(tmp_path / plan, sync_method=plan, plan={"comm_hook": {"name": plan}})
    for plan in ("bf16", "int8"):
        save_run(tmp_path / f"{plan}_failed", sync_method=plan, plan=None, status="failed", error="x", world_size=None)
    (group,) = group_runs(read_runs([tmp_path]))
    assert [setting.name for setting in group.settings] == ["bf16", "uncompressed"]
    assert [run.setting for run in group.failed] == ["bf16", "int8"]


def test_a_config_group_at_two_packages_is_two_choices(tmp_path):
    jobs = [f"optim@gen={gen} optim@disc={disc}" for gen in "xy" for disc in "xy"]
    (group,) = _groups(tmp_path, *jobs)
    assert [dict(setting.values) for setting in group.settings] == [
        {"optim@gen": gen, "optim@disc": disc} for gen in "xy" for disc in "xy"
    ]
    assert len({setting.name for setting in group.settings}) == 4

from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.measure.runs.settings import settings_of
from lightning_commopt.report.grouping import GroupRuns, group_runs
from lightning_commopt.report.names import setting_name
from lightning_commopt.report.runs import read_runs
from support.sample_runs import save_run

Job = str | tuple[str, dict[str, Any]]


def _groups(folder: Path, *jobs: Job) -> list[GroupRuns]:
    """Sorts runs with these overrides, each written with spaces between, and fields of their records."""
    for number, job in enumerate(jobs):
        overrides, fields = (job, {}) if isinstance(job, str) else job
        save_run(folder / str(number), *overrides.split(), **fields)
    return group_runs(read_runs([folder]))


def _plan(sync_method: str = "none", plan_type: str = "CommPlan", ranks: int = 2, **plan: Any) -> Job:
    """Returns a job without overrides."""
    hook = {} if sync_method in ("none", "diloco") else {"comm_hook": {"name": sync_method.removeprefix("diloco_")}}
    fields = {"sync_method": sync_method, "plan_type": plan_type, "world_size": ranks}
    return "", {**fields, "plan": {**plan, **hook}}


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
_EVERY_100 = {"sync_every": 100, "fragments": 4}
SORTED: dict[str, tuple[list[Job], dict[str, dict[str, int]]]] = {
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
    "equal numbers and defaults": (
        [*(f"strategy.bucket_cap_mb={cap} model.size=small" for cap in ("25", "25.0", "null")), "model.size=small"],
        {"": {"25 MiB buckets": 2, "default buckets": 2}},
    ),
    "records without overrides": (
        [_plan(bucket_cap_mb=25), _plan("bf16", bucket_cap_mb=25), _plan(ranks=4, bucket_cap_mb=25)] * 2,
        {"": {"uncompressed, 2 ranks": 2, "bf16, 2 ranks": 2, "uncompressed, 4 ranks": 2}},
    ),
    "other plans with equal overrides, by another launcher": (
        [("data=x", {"plan": {"static_graph": True, **cap}}) for cap in ({}, {"bucket_cap_mb": 100})],
        {"": {"default bucket cap mb": 1, "100 MiB buckets": 1}},
    ),
    "plans of both strategies": (
        [
            ("", {"sync_method": "ModelParallelStrategy", "plan": None}),
            _plan("int8"),
            _plan(plan_type="ShardedPlan", param_hook="int8"),
            _plan("int8", "ShardedPlan"),
        ],
        {
            "": {
                "Lightning's FSDP2": 1,
                "int8": 1,
                "CommOptModelParallel, uncompressed, int8 parameters": 1,
                "CommOptModelParallel, int8": 1,
            }
        },
    ),
    "plans of diloco": (
        [_plan(), _plan("diloco", "DiLoCoPlan"), _plan("diloco_int4", "DiLoCoPlan", **_EVERY_100)],
        {"": {"uncompressed": 1, "DiLoCo": 1, "DiLoCo int4, exchange every 100 steps, 4 fragments": 1}},
    ),
    "diloco by overrides": (
        ["strategy=diloco strategy/comm_hook=int8 strategy.overlap=2 strategy.mixing=0.25", "strategy=commopt"],
        {"": {"DiLoCo, int8, overlap 2, mixing 0.25": 1, "CommOptDDP": 1}},
    ),
    "the only setting": ([_plan("bf16", ranks=4, bucket_cap_mb=100)], {"": {"bf16, 100 MiB buckets, 4 ranks": 1}}),
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

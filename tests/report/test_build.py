"""What a whole report holds: baselines, speed-ups, efficiency, scaling, losses, conditions."""

from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.measure.runs.losses import LossPoint, write_losses
from lightning_commopt.report.baseline import amdahl_serial_share
from lightning_commopt.report.build import build_report
from lightning_commopt.report.intervals import Interval
from lightning_commopt.report.model import Group, Setting
from support.known import known
from support.sample_runs import PLANS, plan_run, save_rates, save_run, write_run


def _group(folder: Path, *jobs: tuple[str, dict[str, Any]]) -> Group:
    """Reports one group of single runs: overrides, then fields of the record."""
    for number, (overrides, fields) in enumerate(jobs):
        save_run(folder / str(number), *overrides.split(), **{"samples_per_s": 1.0, **fields})
    (group,) = build_report([folder]).groups
    return group


def _by_name(group: Group) -> dict[str, Setting]:
    return {setting.name: setting for setting in group.settings}


def test_speedups_are_medians_of_pairs(tmp_path):
    save_rates(tmp_path, {"none": [100, 50, 100, 100], "bf16": [110, 56, 112, 130]})
    (group,) = build_report([tmp_path]).groups
    by_name = _by_name(group)
    assert group.baseline.name == "uncompressed"
    assert by_name["uncompressed"].speedup is None
    speedup = known(by_name["bf16"].speedup)
    assert (speedup.low, speedup.median, speedup.high) == pytest.approx((1.10, 1.12, 1.30))
    assert by_name["bf16"].samples_per_s == Interval(median=111, low=56, high=130, num_values=4)
    assert group.fastest.name == "bf16"


def test_a_repetition_that_failed_takes_its_pair_away(tmp_path):
    save_rates(tmp_path, {"none": [100, 50, 100], "bf16": [110, 56, 112]})
    save_run(tmp_path / "bf16_1", "strategy/comm_hook=bf16", "repetition=1", status="failed", error="x")
    (group,) = build_report([tmp_path]).groups
    speedup = known(_by_name(group)["bf16"].speedup)
    assert (speedup.low, speedup.median, speedup.high) == pytest.approx((1.10, 1.11, 1.12))
    assert speedup.num_values == 2


def test_repetitions_of_different_numbers_are_no_pairs(tmp_path):
    save_rates(tmp_path, {"none": [100, 50, 100, 100], "bf16": [0, 0, 112, 0, 110]})
    (group,) = build_report([tmp_path]).groups
    speedup = known(_by_name(group)["bf16"].speedup)
    assert speedup.median == pytest.approx(111 / 100)


def test_sweeps_of_several_days_are_compared_day_by_day(tmp_path):
    """If it fails, a slow day makes the plans slow that ran on it only."""
    save_rates(tmp_path / "monday", {"none": [100, 101, 99], "bf16": [150, 151, 149]})
    save_rates(tmp_path / "tuesday", {"none": [50, 51, 49], "int8": [100, 102, 98]})
    (group,) = build_report([tmp_path / "monday", tmp_path / "tuesday"]).groups
    speedups = {setting.name: setting.speedup.median for setting in group.settings if setting.speedup}
    assert speedups == pytest.approx({"bf16": 1.5, "int8": 2.0}, abs=0.01)


def test_numbers_of_a_step_are_those_of_the_records(tmp_path):
    record = write_run(tmp_path / "0", plan_run("bf16", 25, 0))
    (group,) = build_report([tmp_path]).groups
    setting = group.settings[0]
    for name in ("step_s", "comm_s", "exposed_s", "exposed_share"):
        interval: Interval = getattr(setting, name)
        assert interval.median == record.comm_time[name]
    assert setting.wire_bytes == 20_000_000
    assert setting.peak_memory_bytes == record.peak_memory_bytes
    assert setting.bucket_cap_mb == 25
    assert setting.world_size == 2
    assert setting.is_lossy


@pytest.mark.parametrize("wire_bytes", [0.0, 231_040.0])
@pytest.mark.parametrize(("world_size", "is_known"), [(1, True), (2, False)])
def test_a_gradient_sync_that_nobody_sees_is_not_none(tmp_path, world_size, is_known, wire_bytes):
    """If it fails, FSDP is said to hide all of its communication."""
    comm_time = {"step_s": 0.1, "comm_s": 0.0, "exposed_s": 0.0, "exposed_share": 0.0, "wire_bytes": 0.0}
    fields = {"comm_time": comm_time, "wire_bytes_per_step": wire_bytes, "world_size": world_size}
    setting = _group(
        tmp_path, ("strategy=fsdp", {"plan": None, "strategy": "ModelParallelStrategy", **fields})
    ).settings[0]
    assert setting.step_s is not None
    for name in ("comm_s", "exposed_s", "exposed_share"):
        assert (getattr(setting, name) is not None) is is_known
    assert (setting.runs[0].record.exposed_share is not None) is is_known
    assert (setting.wire_bytes is not None) is (is_known or wire_bytes > 0)  # our FSDP2 counts its bytes


def test_lossy_is_what_the_record_says(tmp_path):
    """If it fails, a user's own compressor is called what its name makes of it."""
    known = [{"sync_method": "all_reduce", "is_lossy": True}, {"sync_method": "own", "is_lossy": False}]
    group = _group(tmp_path, *(("", {"plan": {"comm_hook": fields["sync_method"]}, **fields}) for fields in known))
    assert [setting.is_lossy for setting in group.settings] == [True, False]


def test_losses_that_are_no_number_are_counted(tmp_path):
    save_rates(tmp_path, {"none": [1.0] * 3}, {"none": [2.0, float("nan"), float("inf")]})
    setting = build_report([tmp_path]).groups[0].settings[0]
    assert setting.num_diverged == 2
    assert setting.val_loss == Interval(median=2.0, low=None, high=None, num_values=1)


BASELINES = {
    "four ways": (["method=ddp ranks=2", "method=one_process"], "one process"),
    "ladder": (["variant=one_process", "variant=bucket_view", "variant=one_bucket"], "one bucket"),
    "numbers of ranks": (["ranks=2", "ranks=1", "ranks=4"], "1 rank"),
    "plans on numbers of ranks": (
        [f"strategy/comm_hook={hook} ranks={ranks}" for ranks in (1, 2, 4) for hook in ("bf16", "none")],
        "uncompressed, 4 ranks",
    ),
    "sizes of buckets": ([f"strategy.bucket_cap_mb={size}" for size in (1, 5, 25, 100)], "25 MiB buckets"),
    "the default size": ([f"strategy.bucket_cap_mb={size}" for size in (25, "null")], "default buckets"),
    "fewest options": (
        ["strategy.static_graph=true strategy.bucket_cap_mb=25", "strategy.bucket_cap_mb=100"],
        "100 MiB buckets",
    ),
    "none is uncompressed": (["strategy/comm_hook=bf16", "strategy/comm_hook=int8"], "bf16"),
    "another strategy": (["strategy=fsdp", "strategy=ddp"], "DDP"),
}


def test_several_sizes_of_buckets_are_far_from_the_default(tmp_path):
    several, hundred = [{"plan": {"bucket_cap_mb": cap}} for cap in ([1, 25], 100)]
    group = _group(tmp_path, ("strategy.bucket_cap_mb=[1,25]", several), ("strategy.bucket_cap_mb=100", hundred))
    assert group.baseline.name == "100 MiB buckets"


@pytest.mark.parametrize("jobs", BASELINES.values(), ids=BASELINES.keys())
def test_the_baseline(tmp_path, jobs):
    overrides, name = jobs

    def fields(text):
        values = dict(part.split("=") for part in text.split())
        hook = values.get("strategy/comm_hook", "ModelParallelStrategy" if values.get("strategy") == "fsdp" else "none")
        size = values.get("strategy.bucket_cap_mb", "null")
        ranks = 1 if "one_process" in text else int(values.get("ranks", 2))
        plan = {} if size == "null" else {"bucket_cap_mb": float(size)}
        return {"sync_method": hook, "world_size": ranks, "plan": plan}

    assert _group(tmp_path, *((text, fields(text)) for text in overrides)).baseline.name == name


@pytest.mark.parametrize(("methods", "name"), [(3, "Lightning's FSDP2"), (4, "uncompressed")])
def test_the_baseline_beside_fsdp2_is_uncompressed_too(tmp_path, methods, name):
    """If it fails, plans of FSDP2 are compared with one that rounds the parameters."""
    kinds: list[dict[str, Any]] = [
        {"sync_method": "none", "plan": {"param_hook": "int8"}, "plan_type": "ShardedPlan", "is_lossy": True},
        {"sync_method": "ModelParallelStrategy", "plan": None},
        {"sync_method": "none", "plan": {}, "plan_type": "ShardedPlan"},
        {"sync_method": "none", "plan": {}},
    ]
    assert _group(tmp_path, *(("", fields) for fields in kinds[:methods])).baseline.name == name


def test_the_user_may_choose_the_baseline(tmp_path):
    save_rates(tmp_path, {"none": [100, 101], "bf16": [110, 111]})
    (group,) = build_report([tmp_path], baseline="BF16").groups
    assert group.baseline.name == "bf16"
    assert [setting.difference for setting in group.settings] == [None, "slower"]


@pytest.mark.parametrize("serial_share", [0.37, -0.02, 1.2])
def test_amdahls_law_is_not_clamped(serial_share):
    num_ranks = [1, 2, 4, 8]
    speedups = [1 / (serial_share + (1 - serial_share) / ranks) for ranks in num_ranks]
    assert amdahl_serial_share(num_ranks, speedups) == pytest.approx(serial_share)


def test_efficiency_and_scaling_are_over_one_process(tmp_path):
    rates = {
        "method=one_process": 100,
        "method=naive ranks=2": 120,
        "method=naive ranks=4": 150,
        "method=ddp ranks=2": 180,
    }
    jobs = []
    for text, rate in rates.items():
        ranks = int(text[-1]) if text[-1].isdecimal() else 1
        jobs.append((text, {"samples_per_s": rate, "world_size": ranks}))
    group = _group(tmp_path, *jobs)
    efficiency = {setting.name: setting.efficiency for setting in group.settings}
    assert efficiency == pytest.approx(
        {"one process": 1.0, "naive, 2 ranks": 0.6, "naive, 4 ranks": 0.375, "DDP, 2 ranks": 0.9}
    )
    naive, ddp = group.scalings
    assert (naive.sync_method, naive.num_ranks) == ("naive", (1, 2, 4))
    assert [speedup.median for speedup in naive.speedups] == pytest.approx([1.0, 1.2, 1.5])
    assert naive.speedups[0].low is naive.speedups[0].high is None
    assert naive.serial_share == pytest.approx((0.5 * (1 / 1.2 - 0.5) + 0.75 * (1 / 1.5 - 0.25)) / (0.5**2 + 0.75**2))
    assert (ddp.sync_method, ddp.num_ranks, ddp.serial_share) == ("DDP", (1, 2), None)


def test_a_plan_that_ran_on_one_rank_is_held_against_itself(tmp_path):
    rates = {("none", 1): 100, ("none", 2): 150, ("bf16", 1): 80, ("bf16", 2): 160}
    jobs = [
        (f"strategy/comm_hook={hook} ranks={n}", {"samples_per_s": rate, "world_size": n, "sync_method": hook})
        for (hook, n), rate in rates.items()
    ]
    group = _group(tmp_path, *jobs)
    assert {scaling.sync_method: scaling.speedups[-1].median for scaling in group.scalings} == {
        "uncompressed": 1.5,
        "bf16": 2.0,
    }


def test_one_process_with_another_batch_size_is_no_measure(tmp_path):
    """If it fails, two ranks are said to be worth eight."""
    group = _group(
        tmp_path,
        ("strategy=ddp ranks=1 data.batch_size=8", {"samples_per_s": 10, "world_size": 1}),
        ("strategy=fsdp ranks=2 data.batch_size=64", {"samples_per_s": 160, "world_size": 2}),
        ("strategy=fsdp ranks=2 data.batch_size=8", {"samples_per_s": 16, "world_size": 2}),
        ("strategy=fsdp ranks=4 data.batch_size=64", {"samples_per_s": 300, "world_size": 4}),
    )
    assert [setting.efficiency for setting in group.settings] == [1.0, None, 0.8, None]
    (group,) = build_report([tmp_path], baseline=group.settings[0].name).groups
    assert group.baseline.world_size == 1
    assert not any("could give" in sentence for sentence in group.answer)


def test_without_one_rank_the_fewest_are_the_measure(tmp_path):
    rates = {2: 100, 4: 180, 8: 300}
    group = _group(tmp_path, *((f"ranks={n}", {"world_size": n, "samples_per_s": rate}) for n, rate in rates.items()))
    (scaling,) = group.scalings
    assert scaling.num_ranks == (2, 4, 8)
    assert [speedup.median for speedup in scaling.speedups] == pytest.approx([1.0, 1.8, 3.0])
    assert scaling.serial_share is None
    assert all(setting.efficiency is None for setting in group.settings)


def test_layouts_of_as_many_ranks_are_one_point(tmp_path):
    jobs = [(f"trainer.devices={d} trainer.num_nodes={n}", {"world_size": d * n}) for n in (2, 1) for d in (1, 2, 4)]
    (scaling,) = _group(tmp_path, *jobs).scalings
    assert scaling.num_ranks == (1, 2, 4, 8)


def test_the_wrapper_around_one_process_has_an_efficiency_too(ladder):
    (group,) = ladder.groups
    by_name = _by_name(group)
    assert by_name["one process"].efficiency == 1
    assert by_name["DDP on one process"].efficiency == pytest.approx(0.96, abs=0.02)
    assert not group.scalings


def test_published_figures_stand_beside_the_same_settings(ladder):
    (group,) = ladder.groups
    assert [(figure.label, figure.speedup) for figure in _by_name(group)["bf16"].published] == [
        ("+65 % on 8x L40S (PCIe)", 1.65),
        ("slower on 8x A100 (NVLink)", None),
    ]
    assert all("write-up" in figure.source for setting in group.settings for figure in setting.published)


def test_published_figures_of_the_four_methods(four_methods):
    small, large = four_methods.groups
    assert (small.name, large.name) == ("small", "large")
    figures = {setting.name: [figure.speedup for figure in setting.published] for setting in large.settings}
    assert figures == {
        "one process": [],
        "naive, 2 ranks": [1.44],
        "naive, 4 ranks": [1.92],
        "interleaved, 2 ranks": [1.56],
        "interleaved, 4 ranks": [2.24],
        "DDP, 2 ranks": [1.58],
        "DDP, 4 ranks": [2.31],
    }
    assert small.settings[-1].published[0].label == "0.75 times one GPU on 4x A100 (PCIe)"


def test_published_speedups_are_left_out_beside_another_baseline(ladder):
    sweep = ladder.groups[0].settings[0].runs[0].folder.parent
    (group,) = build_report([sweep], baseline="static graph").groups
    of_bf16 = _by_name(group)["bf16"].published
    assert [figure.speedup for figure in of_bf16] == [None, None]
    assert of_bf16[0].label.startswith("+65 %")


@pytest.mark.parametrize(
    "config", [{"variant": ["a", "b"]}, {"method": ["ddp"]}, {"method": "ddp", "model": {"size": [8]}}]
)
def test_a_project_may_have_lists_where_ours_has_names(tmp_path, config):
    """If it fails, a setting of a user's project that has a name of ours ends the report."""
    assert _group(tmp_path, ("", {"config": config})).settings[0].published == ()


def test_conditions_say_what_a_reader_must_know(sweep):
    conditions = sweep.conditions
    assert conditions["runs"] == "24 finished"
    assert conditions["hardware"] == "AMD EPYC, 2 cores"
    assert conditions["date"] == "2026-11-21"
    assert "torch 2.15.0" in conditions["versions"]


def test_gpus_are_counted(tmp_path):
    gpu = {"kind": "cuda", "name": "NVIDIA L40S", "memory_bytes": 1, "num_cores": 142}
    save_run(tmp_path / "0", hardware=({"kind": "cpu", "name": "EPYC", "num_cores": 64}, gpu, gpu))
    assert build_report([tmp_path]).conditions["hardware"] == "EPYC, 64 cores + 2x NVIDIA L40S"


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        (
            {"versions": {"torch": "2.14"}},
            {"versions": {"torch": "2.15"}},
            "versions of torch are compared: 2.14 and 2.15",
        ),
        ({"hardware": ({"name": "A"},)}, {"hardware": ({"name": "B"},)}, "hardware are compared: A and B"),
        ({"device": "cpu"}, {"device": "L40S"}, "devices are compared: cpu and L40S"),
        (
            {"git": {"commit": "abc", "has_changes": False}},
            {"git": {"commit": "abc", "has_changes": True}},
            "git commits are compared: abc and abc with changes",
        ),
        ({"num_parameters": 10**6}, {"num_parameters": 2 * 10**6}, "numbers of parameters are compared: 1 M and 2 M"),
    ],
)
def test_mixed_conditions_are_a_line(tmp_path, one, other, line):
    save_run(tmp_path / "0", "variant=a", **one)
    save_run(tmp_path / "1", "variant=b", **other)
    assert f"runs with different {line}" in build_report([tmp_path]).problems


def test_other_batches_and_numbers_of_steps_are_a_line_where_only_the_plan_was_to_differ(tmp_path):
    """If it fails, a gain of larger batches, or a loss after more steps, is taken for a compressor's without a word."""
    for name, plan, samples, num_steps in (("a", "none", 16, 100), ("b", "bf16", 64, 1000), ("c", "bf16", 65, 1001)):
        rates = {"samples_per_s": 10.0 * samples, "steps_per_s": 10.0}
        run = save_run(tmp_path / name, plan=PLANS[plan], sync_method=plan, **rates)
        write_losses(run, [LossPoint(kind="train", step=num_steps, seconds=1.0, loss=2.0)])
    problems = [line for line in build_report([tmp_path]).problems if "compared" in line]
    assert problems == [
        "runs with different numbers of samples in a step are compared: 16 to 65",
        "runs with different numbers of optimizer steps are compared: 100 to 1,001",
    ]
    for batch_size in (8, 32):
        fields = {"samples_per_s": 20.0 * batch_size, "steps_per_s": 10.0}
        save_run(tmp_path / "chosen" / str(batch_size), f"data.batch_size={batch_size}", **fields)
    assert not any("compared" in line for line in build_report([tmp_path / "chosen"]).problems)


def test_a_compressor_that_saved_nothing_is_a_line(tmp_path):
    """If it fails, a fit that ended before ``start_step`` is taken for a compressor that gains nothing."""
    for name, plan, ratio in (("a", "none", 1.0), ("b", "bf16", 2.0), ("c", "int8", 1.0)):
        fields = {"is_lossy": plan != "none", "comm_time": {"compression_ratio": ratio}}
        save_run(tmp_path / name, f"strategy/comm_hook={plan}", plan=PLANS[plan], sync_method=plan, **fields)
    (problem,) = [line for line in build_report([tmp_path]).problems if "uncompressed" in line]
    assert problem.startswith("int8: the compressor left all gradients uncompressed")


def test_conditions_may_differ_between_groups(tmp_path):
    save_run(tmp_path / "0", "model.size=a", num_parameters=1)
    save_run(tmp_path / "1", "model.size=b", num_parameters=2)
    save_run(tmp_path / "2", "model.size=b", num_parameters=2, device="x")
    save_run(tmp_path / "3", "model.size=b", num_parameters=2, device="y")
    problems = [line for line in build_report([tmp_path]).problems if "compared" in line]
    assert problems == ["b: runs with different devices are compared: x and y"]


def test_a_report_of_failures_only_has_no_groups(tmp_path):
    save_run(tmp_path / "0", status="failed", error="x")
    report = build_report([tmp_path])
    assert not report.groups
    assert len(report.failed) == 1


def test_the_title_is_the_experiment(ladder, sweep):
    assert (ladder.title, sweep.title) == ("ladder", "sweep")

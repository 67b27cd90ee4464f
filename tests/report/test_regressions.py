import json

import pytest

from lightning_commopt.report.build import build_report
from lightning_commopt.report.outputs import to_plain
from lightning_commopt.report.regressions import Regressions, find_regressions
from support.known import known
from support.sample_runs import save_rates, save_run

BEFORE = {"none": [100, 101, 99], "bf16": [150, 152, 148], "int8": [200, 202, 198]}


def _held(folder, now, then=None) -> Regressions:  # type: ignore[no-untyped-def]
    save_rates(folder / "before", BEFORE if then is None else then)
    save_rates(folder / "now", now)
    return find_regressions(to_plain(build_report([folder / "now"])), folder / "before")


def _outcomes(held: Regressions) -> dict[str, str]:
    return {change.setting: change.outcome for change in held.changes}


def test_what_is_slower_beyond_noise_is_found(tmp_path):
    held = _held(tmp_path, {"none": [99, 101, 100], "bf16": [130, 131, 129], "int8": [240, 241, 239]})
    assert _outcomes(held) == {"uncompressed": "no difference", "bf16": "slower", "int8": "faster"}
    assert held.is_worse
    slower = next(change for change in held.changes if change.outcome == "slower")
    assert (slower.before, slower.now) == (150, 130)
    ratio = known(slower.ratio)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((129 / 152, 130 / 150, 131 / 148))


def test_the_same_again_is_no_worse(tmp_path):
    held = _held(tmp_path, BEFORE)
    assert set(_outcomes(held).values()) == {"no difference"}
    assert not held.is_worse


def test_two_sweeps_are_never_paired(tmp_path):
    """Their repetitions have the same numbers, but not the same time."""
    held = _held(tmp_path, {"none": [98, 99, 97]}, {"none": [100, 101, 99]})
    ratio = known(held.changes[0].ratio)
    assert ratio.low == pytest.approx(97 / 101)


def test_single_runs_cannot_say(tmp_path):
    held = _held(tmp_path, {name: [rates[0] / 2] for name, rates in BEFORE.items()})
    assert set(_outcomes(held).values()) == {"unknown"}
    assert not held.is_worse


def test_missing_and_new_settings_are_listed(tmp_path):
    held = _held(tmp_path, {"none": BEFORE["none"], "bf16": BEFORE["bf16"], "powersgd": [1, 2, 3]})
    assert _outcomes(held) == {
        "uncompressed": "no difference",
        "bf16": "no difference",
        "PowerSGD": "new",
        "int8": "missing",
    }
    assert not held.is_worse


def test_what_fails_now_and_did_not_is_worse(tmp_path):
    save_run(tmp_path / "now" / "x", "strategy/comm_hook=int8", "repetition=0", status="failed", error="ValueError: no")
    held = _held(tmp_path, {"none": BEFORE["none"], "bf16": BEFORE["bf16"]})
    assert _outcomes(held)["int8"] == "failed"
    assert next(change.error for change in held.changes if change.outcome == "failed") == "ValueError: no"
    assert held.is_worse


def test_what_failed_before_as_well_is_no_worse(tmp_path):
    for sweep in ("before", "now"):
        save_run(tmp_path / sweep / "x", "strategy/comm_hook=int8", status="failed", error="x")
    rates = {"none": BEFORE["none"], "bf16": BEFORE["bf16"]}
    held = _held(tmp_path, rates, rates)
    assert _outcomes(held)["int8"] == "unknown"
    assert not held.is_worse


def test_one_failed_repetition_of_several_is_worse(tmp_path):
    save_run(tmp_path / "now" / "x", "strategy/comm_hook=int8", "repetition=2", status="failed", error="x")
    held = _held(tmp_path, {**BEFORE, "int8": BEFORE["int8"][:2]})
    assert _outcomes(held)["int8"] == "failed"


def test_repetitions_of_which_all_fail_now_are_worse(tmp_path):
    """Also where one failed before."""
    for sweep, number in (("before", 3), ("now", 0), ("now", 1), ("now", 2)):
        run = tmp_path / sweep / f"int8_{number}"
        save_run(run, "strategy/comm_hook=int8", f"repetition={number}", status="failed", error="x")
    held = _held(tmp_path, {"none": BEFORE["none"], "bf16": BEFORE["bf16"]})
    assert _outcomes(held)["int8"] == "failed"


@pytest.mark.parametrize("overrides", [("strategy/comm_hook=bf16",), ()])
@pytest.mark.parametrize("others", [("none",), ()])
def test_a_setting_of_which_all_runs_fail_is_found(tmp_path, overrides, others):
    """It may be the only one, and be called otherwise, as nobody knows its ranks; or come without overrides."""
    for hook in ("bf16", *others):
        own = ("strategy/comm_hook=none",) if overrides and hook == "none" else overrides
        for sweep in ("before", "now"):
            is_failed = (hook, sweep) == ("bf16", "now")
            fields = {"status": "failed", "error": "x", "world_size": None} if is_failed else {"samples_per_s": 1.0}
            save_run(tmp_path / sweep / hook, *own, **{"sync_method": hook, **fields})
    held = find_regressions(to_plain(build_report([tmp_path / "now"])), tmp_path / "before")
    assert [change.outcome for change in held.changes if change.setting == "bf16"] == ["failed"]
    assert len(held.changes) == 1 + len(others)


def test_a_file_says_the_same_as_the_directory(tmp_path):
    now = {"none": [99, 101, 100], "bf16": [130, 131, 129]}
    held = _held(tmp_path, now)
    path = tmp_path / "before.json"
    path.write_text(json.dumps(to_plain(build_report([tmp_path / "before"]))))
    from_file = find_regressions(to_plain(build_report([tmp_path / "now"])), path)
    assert from_file.changes == held.changes


def test_a_part_of_the_sweep_finds_its_settings(tmp_path):
    """With one hook only, the name of a setting is another, but its overrides are the same."""
    held = _held(tmp_path, {"bf16": [130, 131, 129]})
    assert _outcomes(held) == {"bf16, 2 ranks": "slower", "int8": "missing", "uncompressed": "missing"}


@pytest.mark.parametrize(("tolerance", "outcome"), [(0.0, "slower"), (0.02, "slower"), (0.05, "no difference")])
def test_what_a_machine_is_slower_at_another_time_is_tolerated(tmp_path, tolerance, outcome):
    """The whole interval must lie below: 96 to 98 % here."""
    save_rates(tmp_path / "before", {"none": [100, 100.1, 99.9]})
    save_rates(tmp_path / "now", {"none": [96.9, 97, 96.8]})
    held = find_regressions(to_plain(build_report([tmp_path / "now"])), tmp_path / "before", tolerance=tolerance)
    assert list(_outcomes(held).values()) == [outcome]
    assert held.is_worse is (outcome == "slower")
    assert held.to_plain()["tolerance"] == tolerance


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, 5.0, float("nan")])
def test_a_tolerance_is_a_share(tmp_path, tolerance):
    with pytest.raises(ValueError, match="tolerance must be a share"):
        find_regressions({}, tmp_path, tolerance=tolerance)


def _save(folder, rates):
    """Writes a sweep: samples per second by overrides."""
    for number, (overrides, rate) in enumerate(rates.items()):
        for repetition in range(3):
            run = folder / f"{number}_{repetition}"
            save_run(run, *overrides.split(), f"repetition={repetition}", samples_per_s=rate + repetition)
    return folder


def test_equal_overrides_count_more_than_equal_names(tmp_path):
    """Both have a "bf16", one of them with a static graph, as the two sweeps vary different things."""
    bf16 = "strategy/comm_hook=bf16 strategy.static_graph={}"
    none, int8 = (f"strategy/comm_hook={hook} strategy.static_graph=true" for hook in ("none", "int8"))
    before = _save(tmp_path / "before", {bf16.format("false"): 100, bf16.format("true"): 200, int8: 70})
    now = _save(tmp_path / "now", {bf16.format("true"): 200, none: 50})
    held = find_regressions(to_plain(build_report([now])), before)
    assert [(change.setting, change.outcome, change.before) for change in held.changes] == [
        ("bf16", "no difference", 201),
        ("uncompressed", "new", None),
        ("bf16", "missing", None),
        ("int8, static graph", "missing", None),
    ]
    assert not held.conditions


def test_pairs_by_name_say_what_else_differs(tmp_path):
    before = _save(tmp_path / "before", {"x=1 ranks=2 variant=bf16": 100, "x=1 ranks=2 variant=powersgd": 200})
    now = _save(tmp_path / "now", {"x=2 ranks=2 variant=bf16": 100, "x=2 ranks=2 variant=powersgd": 200})
    held = find_regressions(to_plain(build_report([now])), before)
    assert set(_outcomes(held).values()) == {"no difference"}
    assert held.conditions == ("bf16: x=2; before: x=1", "PowerSGD: x=2; before: x=1")


def _save_without_hydra(folder, rates):
    """Writes runs of RunRecorder: samples per second by plan and ranks."""
    for (plan, ranks), rate in rates.items():
        for repetition in range(3):
            fields = {"sync_method": plan, "plan_name": plan, "world_size": ranks, "samples_per_s": rate + repetition}
            save_run(folder / f"{plan}_{ranks}_{repetition}", **fields)
    return folder


def test_runs_without_overrides_are_told_by_plan_and_ranks(tmp_path):
    """Their names may be those of another plan, as they say only what varies within a report."""
    before = _save_without_hydra(tmp_path / "before", {("none", 2): 100, ("none", 4): 200})
    now = _save_without_hydra(tmp_path / "now", {("int8", 2): 50, ("int8", 4): 100})
    with pytest.raises(ValueError, match="no setting in common"):
        find_regressions(to_plain(build_report([now])), before)
    _save_without_hydra(now, {("none", 2): 100, ("none", 4): 200})
    held = find_regressions(to_plain(build_report([now])), before)
    assert sorted((change.outcome, change.before, change.now) for change in held.changes if change.before) == [
        ("no difference", 101, 101),
        ("no difference", 201, 201),
    ]
    assert [change.outcome for change in held.changes].count("new") == 2


def test_nothing_in_common_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no setting in common"):
        _held(tmp_path, {"powersgd": [1, 2, 3], "fp16": [1, 2, 3]})


def test_other_conditions_are_reported(tmp_path):
    for sweep, version in (("before", "2.14"), ("now", "2.15")):
        save_run(tmp_path / sweep / "x", "strategy/comm_hook=fp16", samples_per_s=1.0, versions={"torch": version})
    held = _held(tmp_path, BEFORE)
    assert held.conditions == ("versions: torch 2.15; before: torch 2.14",)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 99, "groups": [], "failed": []}', '{"format": 1, "groups": [1], "failed": []}']
)
def test_another_file_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    save_rates(tmp_path / "now", BEFORE)
    with pytest.raises(ValueError, match=r"other\.json"):
        find_regressions(to_plain(build_report([tmp_path / "now"])), tmp_path / "other.json")


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", '"fast"', "[1]"])
def test_a_throughput_that_is_none_is_an_error_that_names_it(tmp_path, wrong):
    save_rates(tmp_path / "now", BEFORE)
    plain = to_plain(build_report([tmp_path / "now"]))
    plain["groups"][0]["settings"][0]["runs"][0]["samples_per_s"] = "WRONG"
    (tmp_path / "other.json").write_text(json.dumps(plain).replace('"WRONG"', wrong))
    with pytest.raises(ValueError, match=r"other\.json is not what commopt report --json prints"):
        find_regressions(to_plain(build_report([tmp_path / "now"])), tmp_path / "other.json")

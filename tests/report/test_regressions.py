import json
from functools import partial
from typing import Any

import pytest

from lightning_commopt.report.build import build_report
from lightning_commopt.report.outputs import to_plain
from lightning_commopt.report.regressions import Regressions, find_regressions
from lightning_commopt.report.terminal import print_regressions
from support.known import known
from support.narrow import printed
from support.sample_runs import save_rates, save_run

BEFORE = {"none": [100, 101, 99], "bf16": [150, 152, 148], "int8": [200, 202, 198]}


def _held(folder, now, then=None, failed=()) -> Regressions:  # type: ignore[no-untyped-def]
    """Compares two sweeps. ``failed`` are repetitions of int8, each after the name of its sweep."""
    save_rates(folder / "before", BEFORE if then is None else then)
    save_rates(folder / "now", now)
    for sweep, number in failed:
        run = folder / sweep / f"int8_{number}"
        save_run(run, "strategy/comm_hook=int8", f"repetition={number}", status="failed", error="ValueError: no")
    return find_regressions(to_plain(build_report([folder / "now"])), folder / "before")


def _outcomes(held: Regressions) -> dict[str, str]:
    return {change.setting: change.outcome for change in held.changes}


def test_the_ratio_is_of_medians_and_its_ends_are_the_farthest(tmp_path):
    held = _held(tmp_path, {"none": [99, 101, 100], "bf16": [130, 131, 129]})
    slower = next(change for change in held.changes if change.outcome == "slower")
    assert (slower.before, slower.now) == (150, 130)
    ratio = known(slower.ratio)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((129 / 152, 130 / 150, 131 / 148))


TWO = {"none": BEFORE["none"], "bf16": BEFORE["bf16"]}
CASES: dict[str, dict[str, Any]] = {
    "slower and faster beyond noise": {
        "now": {"none": [99, 101, 100], "bf16": [130, 131, 129], "int8": [240, 241, 239]}
    },
    "the same again": {"now": BEFORE},
    # Their repetitions have the same numbers, but not the same time, and so are no pairs.
    "a drift that pairs would show": {"now": {"none": [98, 99, 97]}, "then": {"none": [100, 101, 99]}},
    "slower, but perhaps by less than the tolerance": {
        "now": {"none": [94, 95.5, 96]},
        "then": {"none": [100, 100.1, 99.9]},
    },
    "single runs": {"now": {name: [rates[0] / 2] for name, rates in BEFORE.items()}},
    "missing and new settings": {"now": {**TWO, "powersgd": [1, 2, 3]}},
    "a part of the sweep, whose setting has another name": {"now": {"bf16": [130, 131, 129]}},
    "fails now": {"now": TWO, "failed": [("now", 0)]},
    "failed before as well": {"now": TWO, "then": TWO, "failed": [("before", 0), ("now", 0)]},
    "one repetition of several fails now": {"now": {**BEFORE, "int8": BEFORE["int8"][:2]}, "failed": [("now", 2)]},
    "one repetition of several fails, as before": {
        **{sweep: {**TWO, "int8": BEFORE["int8"][:2]} for sweep in ("now", "then")},
        "failed": [("before", 2), ("now", 2)],
    },
    "all repetitions fail now, and one did before": {
        "now": TWO,
        "failed": [("before", 3), *(("now", number) for number in range(3))],
    },
}


def test_changes(tmp_path, golden):
    """If it fails, a slower setting passes the gate of CI, or one that is as fast as before closes it."""
    said = []
    for name, case in CASES.items():
        held = _held(tmp_path / name, **case)
        text = printed(partial(print_regressions, held), 200, is_terminal=False)
        said.append(f"{name}: {'worse' if held.is_worse else 'no worse'}\n{text}".replace("\n", "\n    ").rstrip())
    golden("regressions", "\n".join(said).replace(f"{tmp_path}/", ""))


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


def test_other_conditions_are_reported(tmp_path):
    for sweep, version in (("before", "2.14"), ("now", "2.15")):
        save_run(tmp_path / sweep / "x", "strategy/comm_hook=fp16", samples_per_s=1.0, versions={"torch": version})
    held = _held(tmp_path, BEFORE)
    assert held.conditions == ("versions: torch 2.15; before: torch 2.14",)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 99, "groups": [], "failed": []}', '{"format": 1, "groups": [1], "failed": []}']
)
def test_another_file_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    save_rates(tmp_path / "now", BEFORE)
    with pytest.raises(ValueError, match=r"other\.json"):
        find_regressions(to_plain(build_report([tmp_path / "now"])), tmp_path / "other.json")


@pytest.mark.parametrize("wrong", ["NaN", '"fast"'])
def test_a_throughput_that_is_none_is_an_error_that_names_it(tmp_path, wrong):
    save_rates(tmp_path / "now", BEFORE)
    plain = to_plain(build_report([tmp_path / "now"]))
    plain["groups"][0]["settings"][0]["runs"][0]["samples_per_s"] = "WRONG"
    (tmp_path / "other.json").write_text(json.dumps(plain).replace('"WRONG"', wrong))
    with pytest.raises(ValueError, match=r"other\.json is not what commopt report --json prints"):
        find_regressions(to_plain(build_report([tmp_path / "now"])), tmp_path / "other.json")

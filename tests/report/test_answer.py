"""What a report says, sentence by sentence."""

import math

import pytest

from lightning_commopt.measure.runs.losses import LossPoint, write_losses
from lightning_commopt.report.build import build_report
from lightning_commopt.report.model import Group
from lightning_commopt.report.terminal import print_report
from support.known import known
from support.narrow import printed
from support.sample_runs import save_rates, save_run

SLOW = [100, 101, 99]
FAST = [150, 152, 149]
FASTER = [300, 303, 298]
LOW = [2.0, 2.01, 1.99]
HIGH = [2.2, 2.21, 2.19]


def _group(folder, rates, losses=None) -> Group:  # type: ignore[no-untyped-def]
    (group,) = build_report([save_rates(folder, rates, losses)]).groups
    return group


def test_a_lossy_plan_whose_loss_is_within_the_spread(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": FAST}, {"none": [2.0, 2.05, 1.95], "bf16": [2.01, 2.04, 1.96]})
    assert group.answer == (
        '"bf16" is the fastest: 50.5 % faster than "uncompressed" (50.0 to 50.5 % in 3 repetitions),'
        " 150 against 100 samples/s.",
        "It is lossy; the final loss is 2.010 against 2.000, 0.50 % higher and within the spread over repetitions.",
    )
    assert group.recommended is group.fastest


def test_a_loss_beyond_the_spread_names_a_lossless_plan_as_well(tmp_path):
    rates = {"none": SLOW, "powersgd": FASTER, "all_reduce": FAST}
    group = _group(tmp_path, rates, {"none": LOW, "powersgd": HIGH, "all_reduce": LOW})
    assert group.fastest.name == "PowerSGD"
    assert group.answer[1:] == (
        "It is lossy; the final loss is 2.200 against 2.000, 10 % higher and beyond the spread over repetitions.",
        'Use "all reduce": 50.5 % faster than "uncompressed" (50.0 to 50.5 % in 3 repetitions).',
        "It is lossless; the final loss is the same, 2.000.",
    )
    assert known(group.recommended).name == "all reduce"


def _save(folder, *overrides, rates, losses=LOW, **fields):
    for repetition, (rate, loss) in enumerate(zip(rates, losses, strict=True)):
        run = folder / f"{len(list(folder.iterdir())) if folder.exists() else 0}"
        save_run(run, *overrides, f"repetition={repetition}", samples_per_s=rate, val_loss=loss, **fields)


@pytest.mark.parametrize(
    ("override", "plan", "kind"),
    [
        ("strategy.static_graph=true", {"static_graph": True}, "It is lossless; the"),
        ("strategy.comm_hook.inner=none", {}, "It is lossless; the"),
        ("trainer.precision=16", {}, "The"),
        ("data.batch_size=8", {}, "The"),
        ("trainer.accumulate_grad_batches=4", {}, "The"),
        ("trainer.strategy.ddp_comm_hook.x=1", {}, "The"),
        ("strategy.static_graph=true", None, "The"),
    ],
)
def test_lossless_is_what_differs_in_the_plan_only(tmp_path, override, plan, kind):
    _save(tmp_path, rates=SLOW)
    _save(tmp_path, override, rates=FAST, plan=plan)
    answer = build_report([tmp_path]).groups[0].answer
    assert answer[1] == f"{kind} final loss is the same, 2.000."


def test_a_higher_but_uncertain_median_is_reported(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": FAST, "int8": [160, 320, 99]})
    assert group.answer[:2] == (
        '"bf16" is the fastest beyond noise: 50.5 % faster than "uncompressed" (50.0 to 50.5 % in 3 repetitions),'
        " 150 against 100 samples/s.",
        '"int8" has a higher median, up to 160 samples/s, but the difference is uncertain.',
    )


def test_the_loss_of_the_recommended_is_reported(tmp_path):
    """No fixed words: the ranges overlap, but the median is far above."""
    losses = {"none": [2.0, 2.5, 1.9], "powersgd": [3.0, 3.1, 3.2], "bf16": [2.38, 2.39, 2.4]}
    group = _group(tmp_path, {"none": SLOW, "powersgd": FASTER, "bf16": FAST}, losses)
    assert group.answer[-1] == (
        "It is lossy; the final loss is 2.390 against 2.000, 20 % higher and within the spread over repetitions."
    )


@pytest.mark.parametrize(("rates", "recommended"), [(SLOW, None), (FAST, "bf16")])
def test_a_baseline_that_diverged_is_not_recommended(tmp_path, rates, recommended):
    losses = {"none": [2.0, math.nan, 2.0], "bf16": LOW, "int8": LOW}
    group = _group(tmp_path, {"none": SLOW, "bf16": rates, "int8": [50, 51, 49]}, losses)
    assert group.answer[0] == (
        'In 1 of the 3 runs of "uncompressed", the baseline, the loss became NaN; do not use it.'
    )
    assert not any("stay with it" in sentence for sentence in group.answer)
    assert (group.recommended and group.recommended.name) == recommended


@pytest.mark.parametrize("losses", [None, {"none": LOW, "powersgd": LOW}])
def test_a_loss_that_ends_in_nan_in_training_is_not_recommended(tmp_path, losses):
    """If it fails, a plan that destroys training is recommended where no validation, or only an earlier one, shows."""
    save_rates(tmp_path, {"none": SLOW, "powersgd": FASTER}, losses)
    for number, last in enumerate([math.nan, 1.9, math.inf]):
        points = [LossPoint(kind="train", step=step, seconds=step, loss=loss) for step, loss in ((1, 2.0), (2, last))]
        write_losses(tmp_path / f"powersgd_{number}", points)
    (group,) = build_report([tmp_path]).groups
    assert group.answer[1] == "In 2 of its 3 runs the loss became NaN; do not use it."
    assert group.recommended is group.baseline


def test_nothing_but_the_plan_with_the_worse_loss_is_faster(tmp_path):
    group = _group(
        tmp_path, {"none": SLOW, "powersgd": FASTER, "bf16": SLOW}, {"none": LOW, "powersgd": HIGH, "bf16": LOW}
    )
    assert group.answer[-1] == 'Nothing else is faster than "uncompressed" beyond noise: stay with it.'
    assert group.recommended is group.baseline


def test_others_that_are_faster_at_a_higher_loss_are_not_passed_over(tmp_path):
    """If it fails, the page says that nothing else is faster, above bars of settings that are."""
    rates = {"none": SLOW, "powersgd": FASTER, "int8": FAST}
    for losses, names in ((HIGH, '"int8" is faster, too, but its loss is'), ([math.nan] * 3, '"int8" is faster, too')):
        folder = tmp_path / str(losses[0])
        group = _group(folder, rates, {"none": LOW, "powersgd": HIGH, "int8": losses})
        assert group.answer[-1].startswith(names)
        assert group.answer[-1].endswith('higher or became NaN: stay with "uncompressed".')
    rates["bf16"] = [140, 141, 139]
    group = _group(tmp_path / "more", rates, {"none": LOW, **dict.fromkeys(("powersgd", "int8", "bf16"), HIGH)})
    assert group.answer[-1].startswith('"int8" and "bf16" are faster, too, but their losses are higher')


def test_a_run_that_diverged_is_no_plan_to_use(tmp_path):
    losses = {"none": LOW, "bf16": [2.0, math.nan, 2.0], "int8": LOW}
    group = _group(tmp_path, {"none": SLOW, "bf16": FASTER, "int8": FAST}, losses)
    assert group.answer[1] == "In 1 of its 3 runs the loss became NaN; do not use it."
    assert known(group.recommended).name == "int8"


def test_the_same_loss_is_called_so(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": FAST}, {"none": [2.0] * 3, "bf16": [2.001] * 3})
    assert group.answer[1] == "It is lossy; the final loss is the same, 2.001."


def test_a_lower_loss_is_no_worse(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": FAST}, {"none": HIGH, "bf16": LOW})
    assert group.answer[1].endswith("2.000 against 2.200, 9.1 % lower and beyond the spread over repetitions.")
    assert group.recommended is group.fastest


def test_without_a_loss_the_lossless_plans_are_named(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": FASTER, "all_reduce": FAST})
    assert group.answer[1:] == (
        "It is lossy, and no final loss was recorded: compare the loss before you use it.",
        'The fastest lossless one is "all reduce": 50.5 % faster than "uncompressed" (50.0 to 50.5 % in 3'
        " repetitions).",
    )
    assert group.recommended is group.fastest


def test_a_lossless_plan_that_is_as_fast_is_preferred(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": [151, 150, 152], "all_reduce": FAST})
    assert group.answer[-1] == '"all reduce" is as fast within noise, and lossless: use that.'
    assert known(group.recommended).name == "all reduce"


def test_a_loss_under_another_name_names_the_override(tmp_path):
    for hook, rates in (("none", SLOW), ("bf16", FAST)):
        options = {"plan": {"comm_hook": {"name": hook}}, "sync_method": hook, "metrics": {"val/nll": 1.0}}
        overrides = (f"+commopt={hook}", "+commopt_record=callbacks")
        _save(tmp_path, *overrides, rates=rates, losses=[None] * 3, **options)
    (group,) = build_report([tmp_path]).groups
    (sentence,) = [text for text in group.answer if "no final loss" in text]
    assert "val/nll" in sentence
    assert "callbacks.commopt_run.val_loss=NAME" in sentence


def test_others_that_are_as_fast_are_named(tmp_path):
    losses = {"none": LOW, "bf16": LOW, "int8": LOW}
    group = _group(tmp_path, {"none": SLOW, "bf16": [151, 150, 152], "int8": FAST}, losses)
    assert group.answer[-1] == 'As fast within noise: "int8".'


def test_nothing_beyond_noise_is_left_off(tmp_path):
    group = _group(tmp_path, {"none": SLOW, "bf16": [101, 100.5, 100.2], "int8": [90, 91, 89]})
    assert group.answer == (
        'Nothing is faster than "uncompressed" beyond noise: stay with it.',
        '"bf16", the nearest, is 1.0 % faster than "uncompressed" (-0.5 to 1.2 % in 3 repetitions),'
        " which is within noise.",
    )
    assert group.recommended is group.baseline


def test_the_baseline_may_be_the_fastest(tmp_path):
    group = _group(tmp_path, {"none": FAST, "bf16": SLOW})
    assert group.answer == (
        '"uncompressed" is the fastest, at 150 samples/s: stay with it.',
        '"bf16", the nearest, is 33.6 % slower than "uncompressed" (33.3 to 33.6 % in 3 repetitions).',
    )


def test_single_runs_say_that_the_noise_is_unknown(tmp_path):
    group = _group(tmp_path, {"none": [100], "bf16": [150]}, {"none": [2.0], "bf16": [2.01]})
    assert group.answer == (
        "Measured once, which does not show noise: repeat=3 shows which differences hold up.",
        '"bf16" has the highest throughput: 50 % faster than "uncompressed", 150 against 100 samples/s.',
        "It is lossy; the final loss is 2.010 against 2.000, 0.50 % higher (single runs, so the spread is unknown).",
    )
    assert group.recommended is None


@pytest.mark.parametrize(
    ("overrides", "config", "advice"),
    [
        (["strategy/comm_hook=bf16"], {"repetition": 0}, "repeat=3 "),
        (["+commopt=bf16"], {"seed": 12}, " seed=1,2,3 before"),
        (["+commopt=bf16", "trainer.seed_everything=1"], {}, " trainer.seed_everything=1,2,3 before"),
        ([], {}, "each setting with 3 seeds"),
    ],
)
def test_how_to_repeat_fits_where_the_sweep_ran(tmp_path, overrides, config, advice):
    """If it fails, a project that has no key ``repeat`` is told to set it."""
    for hook, rate in (("none", 100), ("bf16", 150)):
        own = [override.replace("bf16", hook) for override in overrides]
        known = {"sync_method": hook, "plan": {"comm_hook": hook}, "samples_per_s": rate}
        save_run(tmp_path / hook, *own, config=config, **known)
    (group,) = build_report([tmp_path]).groups
    assert advice in group.answer[0]


def test_two_repetitions_that_disagree_are_too_few(tmp_path):
    group = _group(tmp_path, {"none": [100, 100], "all_reduce": [200, 320]})
    assert group.answer == (
        '"all reduce" has the highest throughput: 2.6 times as fast as "uncompressed" (2.0 to 3.2 in 2 repetitions),'
        " 260 against 100 samples/s.",
        "2 repetitions are too few to tell that from noise: repeat=5 would show it.",
    )
    assert group.recommended is None


def test_single_runs_of_slower_plans_say_so_too(tmp_path):
    group = _group(tmp_path, {"none": [100], "bf16": [90]})
    assert group.answer == (
        "Measured once, which does not show noise: repeat=3 shows which differences hold up.",
        '"uncompressed" has the highest throughput, at 100 samples/s: stay with it.',
        '"bf16", the nearest, is 10 % slower than "uncompressed".',
    )


@pytest.mark.parametrize(
    ("rates", "share", "override", "fields", "is_beyond"),
    [
        ([200, 202, 198], 0.32, "strategy/comm_hook=bf16", {}, True),
        ([140, 141, 139], 0.32, "strategy/comm_hook=bf16", {}, False),
        ([155, 156, 154], 0.32, "strategy/comm_hook=bf16", {}, False),  # noise, or less work for the optimizer
        ([200, 202, 198], None, "strategy/comm_hook=bf16", {}, False),
        ([200, 202, 198], 0.32, "trainer.precision=bf16-mixed", {}, False),
        ([200, 202, 198], 0.32, "ranks=4", {"world_size": 4}, False),
    ],
)
def test_more_than_communication_explains_is_no_headline(tmp_path, rates, share, override, fields, is_beyond):
    """Hiding 32 % of a step makes it 1.47 times as fast at most; if it fails, a busy minute is praised as a plan."""
    shares = [None if share is None else share - at / 100 for at in range(3)]
    for at, (slow, fast, of_run) in enumerate(zip(SLOW, rates, shares, strict=True)):
        seen = (
            {}
            if of_run is None
            else {"comm_time": {"step_s": 1.0, "comm_s": 1.0, "exposed_s": of_run, "exposed_share": of_run}}
        )
        save_run(tmp_path / f"a{at}", f"repetition={at}", samples_per_s=slow, **seen)
        save_run(tmp_path / f"b{at}", override, f"repetition={at}", samples_per_s=fast, **fields)
    (group,) = build_report([tmp_path], baseline=build_report([tmp_path]).groups[0].settings[0].name).groups
    setting = group.settings[1]
    assert setting.is_beyond_limit is is_beyond
    page = printed(lambda console: print_report(build_report([tmp_path]), console), 100, is_terminal=False)
    assert not (is_beyond and "highest throughput so far" in page)
    assert ("busy" in " ".join(group.answer)) is is_beyond
    assert (group.fastest is setting) is not is_beyond
    assert (group.recommended is None) is is_beyond
    if is_beyond:
        assert setting.speedup_limit == pytest.approx(1 / 0.68)
        assert "1.47 times" in group.answer[0]
        assert "is the fastest" not in " ".join(group.answer)


def test_one_setting_has_nothing_to_be_compared_with(tmp_path):
    group = _group(tmp_path, {"bf16": FAST}, {"bf16": LOW})
    assert group.answer == (
        '"bf16, 2 ranks" reached 150 samples/s with a final loss of 2.000; there is nothing to compare it with.',
    )
    assert group.recommended is None


def test_without_throughput_there_is_no_answer(tmp_path):
    save_run(tmp_path / "0", "variant=bf16")
    save_run(tmp_path / "1", "variant=one_bucket")
    (group,) = build_report([tmp_path]).groups
    assert group.answer == ("No run has a throughput: without the callback SpeedMonitor nothing can be compared.",)
    assert group.fastest is group.baseline


def test_a_baseline_without_throughput_is_named(tmp_path):
    save_run(tmp_path / "0", "variant=bf16", samples_per_s=1.0)
    save_run(tmp_path / "1", "variant=one_bucket")
    (group,) = build_report([tmp_path], baseline="one bucket").groups
    assert group.answer == ('"bf16" reached 1.00 samples/s; "one bucket" has no throughput to compare it with.',)


def test_ranks_are_said_where_more_of_them_are_slower(tmp_path):
    for repetition in range(3):
        for ranks, rate in ((1, 100), (2, 150), (4, 120)):
            method = "one_process" if ranks == 1 else "ddp"
            overrides = (f"method={method}", f"ranks={ranks}", f"repetition={repetition}")
            save_run(
                tmp_path / f"{ranks}_{repetition}",
                *overrides,
                world_size=ranks,
                samples_per_s=rate * (1 + repetition / 50),
            )
    (group,) = build_report([tmp_path]).groups
    assert group.answer == (
        '"DDP, 2 ranks" is the fastest: 50.0 % faster than "one process" (in all 3 repetitions), 153 against'
        " 102 samples/s, 75 % of what 2 ranks could give.",
        'On 4 ranks the fastest is "DDP, 4 ranks": 20.0 % slower than "DDP, 2 ranks" (in all 3 repetitions).',
    )


def test_one_process_that_beats_the_chosen_plan_is_reported(ladder):
    (group,) = ladder.groups
    assert group.answer[-1].startswith('"one process" alone is 5')
    assert group.answer[-1].endswith("more ranks do not pay off here.")
    assert known(group.recommended).name == "several buckets"


def test_an_answer_is_short(report):
    for group in report.groups:
        assert 2 <= len(group.answer) <= 5
        assert all(len(sentence) < 220 for sentence in group.answer)
        assert group.recommended in group.settings

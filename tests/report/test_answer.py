"""What a report says of a group, and what it recommends.

It is in ``golden/answers.txt``, a block for each of `CASES`, whose name says what a reader needs to hear.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.measure.runs.losses import LossPoint, write_losses
from lightning_commopt.report.answer import compare_losses
from lightning_commopt.report.build import build_report
from lightning_commopt.report.model import Group
from lightning_commopt.report.terminal import print_report
from support.narrow import printed
from support.sample_runs import save_rates, save_run

SLOW = [100.0, 101, 99]
FAST = [150.0, 152, 149]
FASTER = [300.0, 303, 298]
LOW = [2.0, 2.01, 1.99]
HIGH = [2.2, 2.21, 2.19]
NAN = [2.0, math.nan, 2.0]
SLOW_AND_FASTER: dict[str, Sequence[float]] = {"none": SLOW, "powersgd": FASTER}

Write = Callable[[Path], object]


def rates(losses: Mapping[str, Sequence[float]] | None = None, **of_hooks: Sequence[float]) -> Write:
    """Returns what writes a sweep over comm hooks."""
    return lambda folder: save_rates(folder, of_hooks, losses)


def two_settings(*overrides: str, **fields: Any) -> Write:
    """Returns what writes a slow baseline, and faster runs with further overrides and fields."""

    def write(folder: Path) -> None:
        for name, own, of_runs, more in (("a", (), SLOW, {}), ("b", overrides, FAST, fields)):
            for at, (rate, loss) in enumerate(zip(of_runs, LOW, strict=True)):
                known = {"samples_per_s": rate, "val_loss": loss, **more}
                save_run(folder / f"{name}{at}", *own, f"repetition={at}", **known)

    return write


def train_loss_ends_in_nan(losses: Mapping[str, Sequence[float]] | None, folder: Path) -> None:
    save_rates(folder, SLOW_AND_FASTER, losses)
    for number, last in enumerate([math.nan, 1.9, math.inf]):
        points = [LossPoint(kind="train", step=step, seconds=step, loss=loss) for step, loss in ((1, 2.0), (2, last))]
        write_losses(folder / f"powersgd_{number}", points)


def loss_of_another_name(folder: Path) -> None:
    for hook, of_runs in (("none", SLOW), ("bf16", FAST)):
        for at, rate in enumerate(of_runs):
            overrides = (f"+commopt={hook}", "+commopt_record=callbacks", f"repetition={at}")
            options = {"plan": {"comm_hook": {"name": hook}}, "sync_method": hook, "metrics": {"val/nll": 1.0}}
            save_run(folder / f"{hook}_{at}", *overrides, samples_per_s=rate, **options)


def single_runs(overrides: Sequence[str], config: Mapping[str, Any], folder: Path) -> None:
    for hook, rate in (("none", 100), ("bf16", 150)):
        own = [override.replace("bf16", hook) for override in overrides]
        known = {"sync_method": hook, "plan": {"comm_hook": hook}, "samples_per_s": rate}
        save_run(folder / hook, *own, config=dict(config), **known)


def numbers_of_ranks(rates: Mapping[int, float], folder: Path) -> None:
    for at in range(3):
        for ranks, rate in rates.items():
            overrides = (f"method={'one_process' if ranks == 1 else 'ddp'}", f"ranks={ranks}", f"repetition={at}")
            save_run(folder / f"{ranks}_{at}", *overrides, world_size=ranks, samples_per_s=rate * (1 + at / 50))


def several_ways_and_one_process(folder: Path) -> None:
    for at in range(3):
        for variant, rate in (("one_process", 200), ("one_bucket", 100), ("bf16", 150)):
            overrides = (f"variant={variant}", f"repetition={at}")
            ranks: dict[str, Any] = {
                "world_size": 1 if variant == "one_process" else 2,
                "plan": None if rate == 200 else {},
            }
            save_run(folder / f"{variant}_{at}", *overrides, samples_per_s=rate * (1 + at / 50), **ranks)


def without_throughput(rate: float | None, folder: Path) -> None:
    save_run(folder / "0", "variant=bf16", samples_per_s=rate)
    save_run(folder / "1", "variant=one_bucket")


THREE = {"none": LOW, "bf16": LOW, "int8": LOW}
CASES: dict[str, Write] = {
    "a lossy plan whose loss is within the spread": rates(
        {"none": [2.0, 2.05, 1.95], "bf16": [2.01, 2.04, 1.96]}, none=SLOW, bf16=FAST
    ),
    "the fastest loses, and a lossless plan is to be used": rates(
        {"none": LOW, "powersgd": HIGH, "all_reduce": LOW}, none=SLOW, powersgd=FASTER, all_reduce=FAST
    ),
    "a higher median that is uncertain": rates(none=SLOW, bf16=FAST, int8=[160, 320, 99]),
    "the median of the loss is far above, but the ranges overlap": rates(
        {"none": [2.0, 2.5, 1.9], "powersgd": [3.0, 3.1, 3.2], "bf16": [2.38, 2.39, 2.4]},
        **SLOW_AND_FASTER,
        bf16=FAST,
    ),
    "the baseline diverged, and nothing is faster": rates(
        {**THREE, "none": NAN}, none=SLOW, bf16=SLOW, int8=[50, 51, 49]
    ),
    "the baseline diverged, and a plan is faster": rates(
        {**THREE, "none": NAN}, none=SLOW, bf16=FAST, int8=[50, 51, 49]
    ),
    "a loss that ends in NaN in training": partial(train_loss_ends_in_nan, None),
    "a loss that ends in NaN in training after a validation": partial(
        train_loss_ends_in_nan, {"none": LOW, "powersgd": LOW}
    ),
    "nothing but the plan with the worse loss is faster": rates(
        {"none": LOW, "powersgd": HIGH, "bf16": LOW}, **SLOW_AND_FASTER, bf16=SLOW
    ),
    "another is faster, too, at a higher loss": rates(
        {"none": LOW, "powersgd": HIGH, "int8": HIGH}, **SLOW_AND_FASTER, int8=FAST
    ),
    "another is faster, too, and diverged": rates(
        {"none": LOW, "powersgd": HIGH, "int8": [math.nan] * 3}, **SLOW_AND_FASTER, int8=FAST
    ),
    "two others are faster, too, at a higher loss": rates(
        {"none": LOW, "powersgd": HIGH, "int8": HIGH, "bf16": HIGH}, **SLOW_AND_FASTER, int8=FAST, bf16=[140, 141, 139]
    ),
    "a run of the fastest diverged": rates({**THREE, "bf16": NAN}, none=SLOW, bf16=FASTER, int8=FAST),
    "the loss is the same": rates({"none": [2.0] * 3, "bf16": [2.001] * 3}, none=SLOW, bf16=FAST),
    "the loss is lower": rates({"none": HIGH, "bf16": LOW}, none=SLOW, bf16=FAST),
    "without a loss the fastest lossless plan is named": rates(none=SLOW, bf16=FASTER, all_reduce=FAST),
    "a lossless plan is as fast": rates(none=SLOW, bf16=[151, 150, 152], all_reduce=FAST),
    "the loss has another name": loss_of_another_name,
    "others are as fast": rates(THREE, none=SLOW, bf16=[151, 150, 152], int8=FAST),
    "nothing is faster beyond noise": rates(none=SLOW, bf16=[101, 100.5, 100.2], int8=[90, 91, 89]),
    "the baseline is the fastest": rates(none=FAST, bf16=SLOW),
    "single runs": rates({"none": [2.0], "bf16": [2.01]}, none=[100], bf16=[150]),
    "single runs of slower plans": rates(none=[100], bf16=[90]),
    "two repetitions that disagree": rates(none=[100, 100], all_reduce=[200, 320]),
    # A project that has no key ``repeat`` is not told to set it.
    "single runs of commopt-train": partial(single_runs, ["strategy/comm_hook=bf16"], {"repetition": 0}),
    "single runs of a project with a seed": partial(single_runs, ["+commopt=bf16"], {"seed": 12}),
    "single runs of a sweep over seeds": partial(single_runs, ["+commopt=bf16", "trainer.seed_everything=1"], {}),
    "single runs without Hydra": partial(single_runs, [], {}),
    # Lossless is what differs in the plan alone.
    "another wrapping": two_settings("strategy.static_graph=true", plan={"static_graph": True}),
    "another inner compressor": two_settings("strategy.comm_hook.inner=none", plan={}),
    "another precision": two_settings("trainer.precision=16", plan={}),
    "another batch size": two_settings("data.batch_size=8", plan={}),
    "another accumulation": two_settings("trainer.accumulate_grad_batches=4", plan={}),
    "a hook of torch": two_settings("trainer.strategy.ddp_comm_hook.x=1", plan={}),
    "another wrapping without a plan": two_settings("strategy.static_graph=true", plan=None),
    "one setting": rates({"bf16": LOW}, bf16=FAST),
    "no throughput": partial(without_throughput, None),
    "more ranks are slower": partial(numbers_of_ranks, {1: 100, 2: 150, 4: 120}),
    "one process is faster than the chosen plan": several_ways_and_one_process,
}


def _said(group: Group) -> str:
    recommended = "nothing" if group.recommended is None else group.recommended.name
    return "\n".join([*group.answer, f"-> fastest: {group.fastest.name}; recommended: {recommended}"])


def test_answers(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """If it fails, a report says another thing: the wrong plan, a plan that costs loss, or noise as a fact."""
    said = []
    for number, (name, write) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder)
        (group,) = build_report([folder]).groups
        said.append(f"{name}\n{_said(group)}".replace("\n", "\n    "))
        assert all(len(sentence) < 220 for sentence in group.answer)
        assert group.recommended is None or compare_losses(group.recommended, group.baseline).verdict != "worse"
    golden("answers", "\n".join(said))


def test_a_baseline_without_throughput_is_named(tmp_path: Path) -> None:
    without_throughput(1.0, tmp_path)
    (group,) = build_report([tmp_path], baseline="one bucket").groups
    assert group.answer == ('"bf16" reached 1.00 samples/s; "one bucket" has no throughput to compare it with.',)


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

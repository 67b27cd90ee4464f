"""The answer of a group in words: which setting to use, its gain and its price in final loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_commopt.measure.runs.record import how_to_name_loss
from lightning_commopt.report.baseline import compare_settings, differ_in_plan
from lightning_commopt.report.choices import is_seed
from lightning_commopt.report.intervals import Interval, speedup_in_words
from lightning_commopt.report.model import Setting
from lightning_commopt.report.names import in_quotes, join_names, link_of
from lightning_commopt.text.formatting import number, short_percent

_SAME = 0.001  # relative difference up to which two losses count as the same
_DIGITS = 4  # significant digits of a loss in a sentence


def is_lossless(setting: Setting, baseline: Setting) -> bool:
    """Returns whether a setting certainly trains like the baseline, up to rounding.

    It does with a `CommPlan` whose compressor changes no gradients, if it differs from the baseline only in the plan
    and the number of ranks. Precision, batch size and hooks that are not this package's may change anything.
    """
    has_plan = all(run.settings.plan is not None for run in setting.runs)
    return has_plan and not setting.is_lossy and differ_in_plan(setting, baseline)


class LossComparison(NamedTuple):
    """A comparison of a setting's final losses with the baseline's.

    Attributes:
        verdict: "worse" if a run diverged, or the median is above by more than 0.1 % and all losses are above all of
            the baseline's; "unknown" without losses of both, or if the loss of a single run is above, unless the
            setting is lossless; else "fine".
        sentence: the comparison in words; empty if a lossless plan has no loss.
    """

    verdict: Literal["worse", "fine", "unknown"]
    sentence: str


def compare_losses(setting: Setting, baseline: Setting) -> LossComparison:
    """Compares the final losses of a setting with the baseline's."""
    if setting.num_diverged:
        diverged = f"In {setting.num_diverged} of its {len(setting.runs)} runs the loss became NaN; do not use it."
        return LossComparison("worse", diverged)
    lossless = is_lossless(setting, baseline)
    without_spread: Literal["fine", "unknown"] = "fine" if lossless else "unknown"
    kind = "It is lossy" if setting.is_lossy else "It is lossless" if lossless else ""
    if setting.val_loss is None or baseline.val_loss is None:
        return LossComparison(without_spread, "" if lossless else _missing_loss(setting, baseline, kind))
    ours, theirs = setting.val_loss.median, baseline.val_loss.median
    lead = f"{kind}; the" if kind else "The"
    if abs(ours - theirs) <= _SAME * abs(theirs):
        return LossComparison("fine", f"{lead} final loss is the same, {number(ours, _DIGITS)}.")
    by = short_percent((ours - theirs) / abs(theirs)) if theirs else number(abs(ours - theirs))
    both = f"{number(ours, _DIGITS)} against {number(theirs, _DIGITS)}"
    text = f"{lead} final loss is {both}, {by} {'higher' if ours > theirs else 'lower'}"
    own, others = _losses(setting), _losses(baseline)
    if min(len(own), len(others)) == 1:
        text += " (single runs, so the spread is unknown)."
        return LossComparison(without_spread if ours > theirs else "fine", text)
    is_beyond = max(min(own), min(others)) > min(max(own), max(others))
    spread = f"{'beyond' if is_beyond else 'within'} the spread over repetitions"
    return LossComparison("worse" if is_beyond and ours > theirs else "fine", f"{text} and {spread}.")


def _missing_loss(setting: Setting, baseline: Setting, kind: str) -> str:
    between, text = ", and ", "one of the losses is missing: compare the loss before you use it"
    if setting.val_loss is baseline.val_loss:
        run, reason = setting.runs[0], ""
        record = run.record
        if any("val" in name for name in record.metrics):
            reason = f" ({how_to_name_loss(record.metrics, run.settings, record.metric_names.get('val_loss'))})"
        text = f"no final loss was recorded{reason}: compare the loss before you use it"
    return f"{kind}{between}{text}." if kind else f"{text[0].upper()}{text[1:]}."


def _losses(setting: Setting) -> list[float]:
    losses = [run.record.val_loss for run in setting.runs]
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


class Answer(NamedTuple):
    """Sentences, and the setting to use, if there is a choice."""

    sentences: tuple[str, ...]
    recommended: Setting | None


def answer_for(settings: Sequence[Setting], baseline: Setting) -> Answer:
    """Returns the answer for all settings of a group. The baseline is one of them, and speed-ups are over it."""
    ranked = sorted((setting for setting in settings if setting.samples_per_s is not None), key=_rate, reverse=True)
    if not ranked:
        needs = "each needs the callback SpeedMonitor, and steps after its warm-up"
        return Answer((f"No run has a throughput, so nothing can be compared: {needs}.",), None)
    if len(settings) == 1 or baseline.samples_per_s is None:
        best = ranked[0]
        loss = "" if best.val_loss is None else f" with a final loss of {number(best.val_loss.median, 4)}"
        reason = "there is nothing to compare it with"
        if len(settings) > 1:
            reason = f"{in_quotes(baseline.name)} has no throughput to compare it with"
        return Answer((f"{in_quotes(best.name)} reached {_rate_text(best)}{loss}; {reason}.",), None)
    link = link_of(baseline.runs[0])
    conditions = f" over a link of {link}" if link else ""
    # The question is how several ranks should sync gradients, unless the baseline is one process; the last sentence
    # compares with that.
    on_one = [setting for setting in ranked if setting.world_size == 1 < baseline.world_size]
    conditions += " on several ranks" if ranked[0] in on_one else ""
    chosen = _choose([setting for setting in ranked if setting not in on_one], baseline, conditions)
    sentences, recommended = _without_diverged(chosen, baseline)
    return Answer((*sentences, *_compare_one_process(on_one, recommended)), recommended)


def _choose(ranked: Sequence[Setting], baseline: Setting, conditions: str) -> Answer:
    """Chooses from settings by falling throughput, the baseline among them; an impossible speed-up is not chosen."""
    impossible = [
        f"{in_quotes(setting.name)} is {_ratio_text(setting, baseline)}, but hiding all communication could make it"
        f" {number(setting.speedup_limit)} times as fast at most: the machine was busy when"
        f" {in_quotes(baseline.name)} ran, or something else differs. Run both again."
        for setting in ranked
        if setting.is_beyond_limit and setting.speedup_limit is not None
    ]
    possible = [setting for setting in ranked if not setting.is_beyond_limit]
    if impossible and len(possible) < 2:
        return Answer(tuple(impossible), None)
    is_certain = not impossible and not baseline.num_diverged
    sentences, recommended = _choose_possible(possible, baseline, conditions, ": stay with it" if is_certain else "")
    return Answer((*sentences, *impossible), None if impossible and recommended is baseline else recommended)


def _choose_possible(ranked: Sequence[Setting], baseline: Setting, conditions: str, advice: str) -> Answer:
    others = [setting for setting in ranked if setting.speedup is not None]
    winners = [setting for setting in others if setting.difference == "faster"]
    if not winners:
        return _without_winner(ranked[0], others, baseline, conditions, advice)
    fastest = winners[0]
    usable = [setting for setting in winners if compare_losses(setting, baseline).verdict != "worse"]
    recommended = usable[0] if usable else baseline
    if recommended is fastest:
        recommended, more = _among_equals(fastest, usable, baseline)
    elif recommended is baseline:
        more = [_no_other_winner(winners[1:], baseline, advice)]
    else:
        use = f"Use {in_quotes(recommended.name)}: {_ratio_text(recommended, baseline)}."
        more = [use, compare_losses(recommended, baseline).sentence]
    higher = ranked[: ranked.index(fastest)]
    predicate = ("is the fastest beyond noise" if higher else "is the fastest") + conditions
    sentences = [_lead_sentence(fastest, baseline, predicate)]
    # The median of these is above the winner's, but their own difference from the baseline is within noise.
    if higher:
        names, rate = join_names([setting.name for setting in higher]), _rate_text(higher[0])
        singular = f"{names} has a higher median, up to {rate}, but the difference is uncertain."
        plural = f"{names} have higher medians, up to {rate}, but the differences are uncertain."
        sentences.append(singular if len(higher) == 1 else plural)
    sentences += [compare_losses(fastest, baseline).sentence, *more, *_compare_most_ranks(ranked, baseline)]
    return Answer(tuple(filter(None, sentences)), recommended)


def _no_other_winner(others: Sequence[Setting], baseline: Setting, advice: str) -> str:
    """Returns why to keep the baseline: the fastest setting and these ``others`` are faster, but have worse losses."""
    than = in_quotes(baseline.name)
    if not others:
        return f"Nothing else is faster than {than} beyond noise{advice}."
    names, is_one = join_names([setting.name for setting in others]), len(others) == 1
    stay = f": stay with {than}" if advice else ""
    predicate = "is faster, too, but its loss is" if is_one else "are faster, too, but their losses are"
    return f"{names} {predicate} higher or became NaN{stay}."


def _without_diverged(answer: Answer, baseline: Setting) -> Answer:
    """Puts a warning first if the baseline itself diverged, and does not recommend it."""
    if not baseline.num_diverged:
        return answer
    warning = (
        f"In {baseline.num_diverged} of the {len(baseline.runs)} runs of {in_quotes(baseline.name)}, the baseline, the"
        " loss became NaN; do not use it."
    )
    return Answer((warning, *answer.sentences), None if answer.recommended is baseline else answer.recommended)


def _without_winner(
    first: Setting, others: Sequence[Setting], baseline: Setting, conditions: str, advice: str
) -> Answer:
    """Returns the answer that the baseline need not be changed, or that there are too few runs."""
    uncertain = [setting for setting in others if setting.difference == "unknown"]
    promising = [setting for setting in uncertain if setting.speedup is not None and setting.speedup.median > 1]
    if promising:
        predicate = f"has the highest throughput{conditions}" if promising[0] is first else "has a higher throughput"
        lead, loss = _lead_sentence(promising[0], baseline, predicate), compare_losses(promising[0], baseline).sentence
        return Answer(_with_too_few_runs([lead, *filter(None, [loss])], uncertain), None)
    than = in_quotes(baseline.name)
    if first is baseline:
        predicate = ("has the highest throughput" if uncertain else "is the fastest") + conditions
        sentences = [f"{than} {predicate}, at {_rate_text(baseline)}{advice}."]
    else:
        sentences = [f"Nothing is faster than {than} beyond noise{advice}."]
    if others:
        noise = ", which is within noise" if others[0].difference == "no difference" else ""
        sentences.append(f"{in_quotes(others[0].name)}, the nearest, is {_ratio_text(others[0], baseline)}{noise}.")
    return Answer(_with_too_few_runs(sentences, uncertain), baseline)


def _with_too_few_runs(sentences: Sequence[str], uncertain: Sequence[Setting]) -> tuple[str, ...]:
    """Adds that there are too few runs; this comes first for single runs, whose result must never be a headline."""
    doubt = _too_few_runs(uncertain)
    is_single = any(setting.speedup is not None and setting.speedup.num_values == 1 for setting in uncertain)
    return (*doubt, *sentences) if is_single else (*sentences, *doubt)


def _too_few_runs(uncertain: Sequence[Setting]) -> list[str]:
    if not uncertain:
        return []
    num_runs = min(setting.speedup.num_values for setting in uncertain if setting.speedup is not None)
    run, needed = uncertain[0].runs[0], 3 if num_runs == 1 else num_runs + 3
    if "repetition" in run.settings:
        repeat = f"repeat={needed}"
    elif run.settings.overrides:
        seed = next(filter(is_seed, [*run.settings.chosen, *run.settings.values]), "seed")
        repeat = f"{seed}={','.join(map(str, range(1, needed + 1)))} before the other choices"
    else:
        repeat = f"running each setting with {needed} seeds"
    if num_runs == 1:
        return [f"A setting was measured only once, so noise is unknown: {repeat} shows which differences hold up."]
    return [f"{num_runs} repetitions are too few to tell that from noise: {repeat} would show it."]


def _ratio_text(setting: Setting, other: Setting, ratio: Interval | None = None) -> str:
    """Returns a ratio of throughputs in words, by default the setting's speed-up."""
    ratio = ratio or setting.speedup
    return "" if ratio is None else speedup_in_words(ratio, in_quotes(other.name))


def _rate(setting: Setting) -> float:
    assert setting.samples_per_s is not None
    return setting.samples_per_s.median


def _rate_text(setting: Setting) -> str:
    return f"{number(_rate(setting))} samples/s"


def _lead_sentence(fastest: Setting, baseline: Setting, predicate: str) -> str:
    of_ideal = ""
    if baseline.world_size == 1 and fastest.world_size > 1 and fastest.efficiency is not None:
        of_ideal = f", {100 * fastest.efficiency:.0f} % of what {fastest.world_size} ranks could give"
    rates = f"{number(_rate(fastest))} against {_rate_text(baseline)}"
    return f"{in_quotes(fastest.name)} {predicate}: {_ratio_text(fastest, baseline)}, {rates}{of_ideal}."


def _among_equals(fastest: Setting, usable: Sequence[Setting], baseline: Setting) -> tuple[Setting, list[str]]:
    """Names settings that are as fast within noise, and prefers a lossless one."""
    equals = []
    for setting in usable[1:]:
        comparison = compare_settings(setting, fastest)
        if comparison is not None and comparison.difference == "no difference":
            equals.append(setting)
    lossless = next((setting for setting in usable if is_lossless(setting, baseline)), None)
    if fastest.is_lossy and lossless is not None and lossless in equals:
        return lossless, [f"{in_quotes(lossless.name)} is as fast within noise, and lossless: use that."]
    sentences = [f"As fast within noise: {join_names([setting.name for setting in equals])}."] if equals else []
    if fastest.is_lossy and compare_losses(fastest, baseline).verdict == "unknown":
        text = f"No lossless one is faster than {in_quotes(baseline.name)} beyond noise."
        if lossless is not None:
            text = f"The fastest lossless one is {in_quotes(lossless.name)}: {_ratio_text(lossless, baseline)}."
        sentences.append(text)
    return fastest, sentences


def _compare_most_ranks(ranked: Sequence[Setting], baseline: Setting) -> list[str]:
    """Returns a sentence if the most ranks are not the fastest."""
    most = max(setting.world_size for setting in ranked)
    fastest, on_most = ranked[0], next(setting for setting in ranked if setting.world_size == most)
    comparison = None if fastest.world_size == most or on_most is baseline else compare_settings(on_most, fastest)
    if comparison is None or comparison.difference != "slower":
        return []
    return [
        f"On {most} ranks the fastest is {in_quotes(on_most.name)}: {_ratio_text(on_most, fastest, comparison.ratio)}."
    ]


def _compare_one_process(on_one: Sequence[Setting], recommended: Setting | None) -> list[str]:
    """Returns a sentence if one process alone is faster than the choice for several."""
    comparison = compare_settings(on_one[0], recommended) if on_one and recommended is not None else None
    if comparison is None or comparison.difference != "faster" or recommended is None:
        return []
    ratio_text = _ratio_text(on_one[0], recommended, comparison.ratio)
    return [f"{in_quotes(on_one[0].name)} alone is {ratio_text}: more ranks do not pay off here."]

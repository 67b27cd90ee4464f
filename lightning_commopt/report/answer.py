"""What the numbers of a group say, in words: what to use, what it brings, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_commopt.report.baseline import compare_settings
from lightning_commopt.report.conditions import link_of
from lightning_commopt.report.final_loss import is_lossless, loss_sentence, loss_verdict
from lightning_commopt.report.model import Interval, Setting
from lightning_commopt.report.phrases import in_quotes, join_names, speedup_in_words, times
from lightning_commopt.report.settings import is_seed
from lightning_commopt.text.formatting import number


class Answer(NamedTuple):
    """What to tell, and what it comes to.

    Attributes:
        sentences: a few.
        recommended: the setting to use; None where there is nothing to choose from.
    """

    sentences: tuple[str, ...]
    recommended: Setting | None


def answer_for(settings: Sequence[Setting], baseline: Setting) -> Answer:
    """Returns the answer for a group.

    Args:
        settings: all of the group, with their speed-ups over the baseline.
        baseline: one of them.
    """
    ranked = sorted((setting for setting in settings if setting.samples_per_s is not None), key=_rate, reverse=True)
    if not ranked:
        return Answer((ANSWERS["no throughput"],), None)
    if len(settings) == 1 or baseline.samples_per_s is None:
        text = ANSWERS["only one" if len(settings) == 1 else "baseline without rate"]
        return Answer((text.format(**_texts_of(ranked[0], baseline), loss=_loss(ranked[0])),), None)
    link = link_of(baseline.runs[0])
    over_link = f" over a link of {link}" if link else ""
    if baseline.world_size == 1:
        return _without_diverged(_choice(ranked, baseline, over_link), baseline)
    # The question is how several ranks should sync gradients; whether they are worth it comes last.
    on_one = [setting for setting in ranked if setting.world_size == 1]
    where = over_link + (" on several ranks" if ranked[0] in on_one else "")
    answer = _choice([setting for setting in ranked if setting.world_size > 1], baseline, where)
    answer = _without_diverged(answer, baseline)
    return Answer((*answer.sentences, *_one_process(on_one, answer.recommended)), answer.recommended)


def _choice(ranked: Sequence[Setting], baseline: Setting, where: str = "") -> Answer:
    """Chooses from settings by falling throughput, the baseline among them; what cannot be is named, not chosen."""
    beyond = [_beyond_limit(setting, baseline) for setting in ranked if setting.is_beyond_limit]
    if not beyond:
        return _choice_of_possible(ranked, baseline, where)
    possible = [setting for setting in ranked if not setting.is_beyond_limit]
    if len(possible) < 2:
        return Answer(tuple(beyond), None)
    answer = _choice_of_possible(possible, baseline, where)
    if answer.recommended is not baseline:
        return Answer((*answer.sentences, *beyond), answer.recommended)
    sentences = (sentence.replace(ANSWERS["rest"], "") for sentence in answer.sentences)
    return Answer((*sentences, *beyond), None)


def _beyond_limit(setting: Setting, baseline: Setting) -> str:
    assert setting.speedup_limit is not None
    return ANSWERS["beyond limit"].format(**_texts_of(setting, baseline), limit=times(setting.speedup_limit))


def _choice_of_possible(ranked: Sequence[Setting], baseline: Setting, where: str) -> Answer:
    others = [setting for setting in ranked if setting.speedup is not None]
    winners = [setting for setting in others if setting.difference == "faster"]
    if not winners:
        return _without_a_winner(ranked[0], others, baseline, where)
    fastest = winners[0]
    usable = [setting for setting in winners if loss_verdict(setting, baseline) != "worse"]
    recommended = usable[0] if usable else baseline
    if recommended is fastest:
        recommended, more = _among_equals(fastest, usable, baseline)
    else:
        more = _instead(recommended, baseline)
    higher = ranked[: ranked.index(fastest)]
    what = ("is the fastest beyond noise" if higher else "is the fastest") + where
    sentences = [_lead(fastest, baseline, what), *_uncertain(higher), *loss_sentence(fastest, baseline), *more]
    return Answer((*sentences, *_on_most_ranks(ranked, baseline)), recommended)


def _without_diverged(answer: Answer, baseline: Setting) -> Answer:
    """Says it first if the baseline itself is of no use, and does not recommend it."""
    if not baseline.num_diverged:
        return answer
    counts = {"num": baseline.num_diverged, "of": len(baseline.runs)}
    sentence = ANSWERS["baseline diverged"].format(name=in_quotes(baseline.name), **counts)
    return Answer((sentence, *answer.sentences), None if answer.recommended is baseline else answer.recommended)


def _uncertain(higher: Sequence[Setting]) -> list[str]:
    """Names the settings whose medians are above that of the fastest, though not beyond noise."""
    if not higher:
        return []
    text = ANSWERS["one uncertain" if len(higher) == 1 else "several uncertain"]
    return [text.format(names=join_names([setting.name for setting in higher]), rate=_rate_text(higher[0]))]


def _without_a_winner(first: Setting, others: Sequence[Setting], baseline: Setting, where: str) -> Answer:
    """Says that the baseline need not be changed, or that too few runs were made to tell."""
    uncertain = [setting for setting in others if setting.difference == "unknown"]
    promising = [setting for setting in uncertain if setting.speedup is not None and setting.speedup.median > 1]
    if promising:
        what = f"has the highest throughput{where}" if promising[0] is first else "has a higher throughput"
        lead, loss = _lead(promising[0], baseline, what), loss_sentence(promising[0], baseline)
        return Answer((lead, *loss, *_too_few(uncertain)), None)
    if first is baseline:
        what = ("has the highest throughput" if uncertain else "is the fastest") + where
        sentences = [ANSWERS["baseline leads"].format(**_texts_of(baseline, baseline), what=what, rest=_rest(baseline))]
    else:
        sentences = [ANSWERS["none faster"].format(than=in_quotes(baseline.name), rest=_rest(baseline))]
    if others:
        text = ANSWERS["nearest within noise" if others[0].difference == "no difference" else "nearest"]
        sentences.append(text.format(**_texts_of(others[0], baseline)))
    return Answer((*sentences, *_too_few(uncertain)), baseline)


def _rest(baseline: Setting) -> str:
    return "" if baseline.num_diverged else ANSWERS["rest"]


def _too_few(uncertain: Sequence[Setting]) -> list[str]:
    """Says what would make sure."""
    if not uncertain:
        return []
    num_runs = min(setting.speedup.num_values for setting in uncertain if setting.speedup is not None)
    if num_runs == 1:
        return [ANSWERS["single runs"].format(repeat=_repeat(uncertain[0], 3))]
    return [ANSWERS["too few"].format(num=num_runs, repeat=_repeat(uncertain[0], num_runs + 3))]


def _repeat(setting: Setting, num_runs: int) -> str:
    """Returns how to run each setting so many times, where its sweep ran."""
    run = setting.runs[0]
    seed = next(filter(is_seed, [*run.record.chosen, *run.settings]), "seed")
    where = "hydra" if run.record.chosen else "elsewhere"
    text = REPEAT["commopt-train" if "repetition" in run.settings else where]
    return text.format(num=num_runs, seed=seed, seeds=",".join(map(str, range(1, num_runs + 1))))


def _texts_of(setting: Setting, baseline: Setting, ratio: Interval | None = None) -> dict[str, str]:
    """Returns what texts name of a setting beside another, by default with its speed-up over the baseline."""
    than, ratio = in_quotes(baseline.name), ratio or setting.speedup
    shown = "" if ratio is None else speedup_in_words(ratio, than)
    return {"name": in_quotes(setting.name), "than": than, "rate": _rate_text(setting), "compared": shown}


def _rate(setting: Setting) -> float:
    assert setting.samples_per_s is not None
    return setting.samples_per_s.median


def _rate_text(setting: Setting) -> str:
    return f"{number(_rate(setting))} samples/s"


def _loss(setting: Setting) -> str:
    return "" if setting.val_loss is None else f" with a final loss of {number(setting.val_loss.median, 4)}"


def _lead(fastest: Setting, baseline: Setting, what: str) -> str:
    of_ideal = ""
    if baseline.world_size == 1 and fastest.world_size > 1 and fastest.efficiency is not None:
        of_ideal = ANSWERS["of ideal"].format(share=100 * fastest.efficiency, num_ranks=fastest.world_size)
    named = {**_texts_of(fastest, baseline), "rate": number(_rate(fastest)), "other_rate": _rate_text(baseline)}
    return ANSWERS["lead"].format(**named, what=what, of_ideal=of_ideal)


def _instead(setting: Setting, baseline: Setting) -> list[str]:
    if setting is baseline:
        return [ANSWERS["none else faster"].format(than=in_quotes(baseline.name), rest=_rest(baseline))]
    return [ANSWERS["use instead"].format(**_texts_of(setting, baseline)), *loss_sentence(setting, baseline)]


def _among_equals(fastest: Setting, usable: Sequence[Setting], baseline: Setting) -> tuple[Setting, list[str]]:
    """Names those that are as fast within noise, and prefers one that loses nothing."""
    equals = [setting for setting in usable[1:] if _is_equal(setting, fastest)]
    lossless = [setting for setting in usable if is_lossless(setting, baseline)]
    if fastest.is_lossy and lossless and lossless[0] in equals:
        return lossless[0], [ANSWERS["use lossless"].format(name=in_quotes(lossless[0].name))]
    sentences = [ANSWERS["equals"].format(names=join_names([setting.name for setting in equals]))] if equals else []
    if fastest.is_lossy and loss_verdict(fastest, baseline) == "unknown":
        named = _texts_of(lossless[0] if lossless else fastest, baseline)
        sentences.append(ANSWERS["fastest lossless" if lossless else "no lossless"].format(**named))
    return fastest, sentences


def _is_equal(setting: Setting, other: Setting) -> bool:
    comparison = compare_settings(setting, other)
    return comparison is not None and comparison.difference == "no difference"


def _on_most_ranks(ranked: Sequence[Setting], baseline: Setting) -> list[str]:
    """Says so if the most ranks are not the fastest."""
    most = max(setting.world_size for setting in ranked)
    fastest, on_most = ranked[0], next(setting for setting in ranked if setting.world_size == most)
    if fastest.world_size == most or on_most is baseline:
        return []
    comparison = compare_settings(on_most, fastest)
    if comparison is None or comparison.difference != "slower":
        return []
    return [ANSWERS["most ranks"].format(**_texts_of(on_most, fastest, comparison.ratio), num_ranks=most)]


def _one_process(on_one: Sequence[Setting], recommended: Setting | None) -> list[str]:
    """Says so if one process alone is faster than what was chosen for several."""
    comparison = compare_settings(on_one[0], recommended) if on_one and recommended is not None else None
    if comparison is None or comparison.difference != "faster" or recommended is None:
        return []
    return [ANSWERS["one process"].format(**_texts_of(on_one[0], recommended, comparison.ratio))]


ANSWERS: Final = {
    "no throughput": "No run has a throughput: without the callback SpeedMonitor nothing can be compared.",
    "only one": "{name} reached {rate}{loss}; there is nothing to compare it with.",
    "baseline without rate": "{name} reached {rate}{loss}; {than} has no throughput to compare it with.",
    "lead": "{name} {what}: {compared}, {rate} against {other_rate}{of_ideal}.",
    "of ideal": ", {share:.0f} % of what {num_ranks} ranks could give",
    "beyond limit": (
        "{name} is {compared}, but hiding all communication could make it {limit} as fast at most: the machine was busy"
        " when {than} ran, or something else differs. Run both again."
    ),
    "baseline diverged": "In {num} of the {of} runs of {name}, the baseline, the loss became NaN; do not use it.",
    "one uncertain": "{names} has a higher median, up to {rate}, but the difference is uncertain.",
    "several uncertain": "{names} have higher medians, up to {rate}, but the differences are uncertain.",
    "baseline leads": "{name} {what}, at {rate}{rest}.",
    "none faster": "Nothing is faster than {than} beyond noise{rest}.",
    "none else faster": "Nothing else is faster than {than} beyond noise{rest}.",
    "rest": ": leave the rest off",
    "nearest": "{name}, the nearest, is {compared}.",
    "nearest within noise": "{name}, the nearest, is {compared}, which is within noise.",
    "single runs": "With single runs the noise is unknown: {repeat} shows which differences last.",
    "too few": "{num} repetitions are too few to tell that from noise: {repeat} would show it.",
    "use instead": "Use {name}: {compared}.",
    "use lossless": "{name} is as fast within noise, and lossless: use that.",
    "equals": "As fast within noise: {names}.",
    "fastest lossless": "The fastest lossless one is {name}: {compared}.",
    "no lossless": "No lossless one is faster than {than} beyond noise.",
    "most ranks": "On {num_ranks} ranks the fastest is {name}: {compared}.",
    "one process": "{name} alone is {compared}: more ranks do not pay off here.",
}

REPEAT: Final = {
    "commopt-train": "repeat={num}",
    "hydra": "{seed}={seeds} before the other choices",
    "elsewhere": "running each setting with {num} seeds",
}
"""How to run every setting several times, by where the sweep ran."""

"""What the numbers of a group say, in words: what to use, what it brings, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_commopt.formatting import number
from lightning_commopt.report.baseline import compare_settings
from lightning_commopt.report.final_loss import is_lossless, loss_sentence, loss_verdict
from lightning_commopt.report.model import Setting
from lightning_commopt.report.phrases import compared, in_quotes, listed, times
from lightning_commopt.report.settings import is_seed


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
        return Answer(("No run has a throughput: without the callback SpeedMonitor nothing can be compared.",), None)
    if len(settings) == 1 or baseline.samples_per_s is None:
        why = "there is nothing to compare it with" if len(settings) == 1 else f"{in_quotes(baseline.name)} has none"
        return Answer((f"{in_quotes(ranked[0].name)} made {_shown_rate(ranked[0])}{_loss(ranked[0])}; {why}.",), None)
    if baseline.world_size == 1:
        return _without_diverged(_choice(ranked, baseline), baseline)
    # The question is how several ranks should sync gradients; whether they are worth it comes last.
    on_one = [setting for setting in ranked if setting.world_size == 1]
    where = " on several ranks" if ranked[0] in on_one else ""
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
    recommended = None if answer.recommended is baseline else answer.recommended
    return Answer((*answer.sentences, *beyond), recommended)


def _beyond_limit(setting: Setting, baseline: Setting) -> str:
    assert setting.speedup is not None
    assert setting.speedup_limit is not None
    most = f"hiding all communication could make it {times(setting.speedup_limit)} as fast at most"
    than = in_quotes(baseline.name)
    return (
        f"{in_quotes(setting.name)} is {compared(setting.speedup, than)}, but {most}: the machine was busy when"
        f" {than} ran, or something else differs. Run both again."
    )


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
    which = f"{baseline.num_diverged} of the {len(baseline.runs)} runs"
    sentence = f"In {which} of {in_quotes(baseline.name)}, the baseline, the loss became NaN; do not use it."
    return Answer((sentence, *answer.sentences), None if answer.recommended is baseline else answer.recommended)


def _uncertain(higher: Sequence[Setting]) -> list[str]:
    """Names the settings whose medians are above that of the fastest, though not beyond noise."""
    if not higher:
        return []
    have = "has a higher median" if len(higher) == 1 else "have higher medians"
    return [f"{listed([setting.name for setting in higher])} {have}, up to {_shown_rate(higher[0])}, but uncertain."]


def _without_a_winner(first: Setting, others: Sequence[Setting], baseline: Setting, where: str) -> Answer:
    """Says that the baseline need not be changed, or that too few runs were made to tell."""
    name = in_quotes(baseline.name)
    uncertain = [setting for setting in others if setting.difference == "unknown"]
    promising = [setting for setting in uncertain if setting.speedup is not None and setting.speedup.median > 1]
    if promising:
        what = f"has the highest throughput{where}" if promising[0] is first else "has a higher throughput"
        lead, loss = _lead(promising[0], baseline, what), loss_sentence(promising[0], baseline)
        return Answer((lead, *loss, *_too_few(uncertain)), None)
    rest = "" if baseline.num_diverged else ": leave the rest off"
    if first is baseline:
        what = ("has the highest throughput" if uncertain else "is the fastest") + where
        sentences = [f"{name} {what}, at {_shown_rate(baseline)}{rest}."]
    else:
        sentences = [f"Nothing is faster than {name} beyond noise{rest}."]
    if others and others[0].speedup is not None:
        within = ", which is within noise" if others[0].difference == "no difference" else ""
        sentences.append(f"{in_quotes(others[0].name)}, the nearest, is {compared(others[0].speedup, name)}{within}.")
    return Answer((*sentences, *_too_few(uncertain)), baseline)


def _too_few(uncertain: Sequence[Setting]) -> list[str]:
    """Says what would make sure."""
    if not uncertain:
        return []
    num_runs = min(setting.speedup.num_values for setting in uncertain if setting.speedup is not None)
    if num_runs == 1:
        return [f"With single runs the noise is unknown: {_repeat(uncertain[0], 3)} shows which differences last."]
    more = _repeat(uncertain[0], num_runs + 3)
    return [f"{num_runs} repetitions are too few to tell that from noise: {more} would show it."]


def _repeat(setting: Setting, num_runs: int) -> str:
    """Returns how to run each setting so many times, where its sweep ran."""
    run = setting.runs[0]
    if "repetition" in run.settings:  # of commopt-train
        return f"repeat={num_runs}"
    if not run.record.chosen:
        return f"running each setting with {num_runs} seeds"
    seed = next(filter(is_seed, [*run.record.chosen, *run.settings]), "seed")
    seeds = ",".join(map(str, range(1, num_runs + 1)))
    return f"{seed}={seeds} before the other choices"


def _rate(setting: Setting) -> float:
    assert setting.samples_per_s is not None
    return setting.samples_per_s.median


def _shown_rate(setting: Setting) -> str:
    return f"{number(_rate(setting))} samples/s"


def _loss(setting: Setting) -> str:
    return "" if setting.val_loss is None else f" with a final loss of {number(setting.val_loss.median, 4)}"


def _lead(fastest: Setting, baseline: Setting, what: str) -> str:
    assert fastest.speedup is not None
    rates = f"{number(_rate(fastest))} against {_shown_rate(baseline)}"
    of_ideal = ""
    if baseline.world_size == 1 and fastest.world_size > 1 and fastest.efficiency is not None:
        of_ideal = f", {100 * fastest.efficiency:.0f} % of what {fastest.world_size} ranks could give"
    return (
        f"{in_quotes(fastest.name)} {what}: {compared(fastest.speedup, in_quotes(baseline.name))}, {rates}{of_ideal}."
    )


def _instead(setting: Setting, baseline: Setting) -> list[str]:
    if setting is baseline:
        rest = "" if baseline.num_diverged else ": leave the rest off"
        return [f"Nothing else is faster than {in_quotes(baseline.name)} beyond noise{rest}."]
    assert setting.speedup is not None
    use = f"Use {in_quotes(setting.name)}: {compared(setting.speedup, in_quotes(baseline.name))}."
    return [use, *loss_sentence(setting, baseline)]


def _among_equals(fastest: Setting, usable: Sequence[Setting], baseline: Setting) -> tuple[Setting, list[str]]:
    """Names those that are as fast within noise, and prefers one that loses nothing."""
    equals = [setting for setting in usable[1:] if _is_equal(setting, fastest)]
    lossless = [setting for setting in usable if is_lossless(setting, baseline)]
    if fastest.is_lossy and lossless and lossless[0] in equals:
        return lossless[0], [f"{in_quotes(lossless[0].name)} is as fast within noise, and lossless: use that."]
    sentences = [f"As fast within noise: {listed([setting.name for setting in equals])}."] if equals else []
    if fastest.is_lossy and loss_verdict(fastest, baseline) == "unknown":
        name, than = in_quotes(lossless[0].name) if lossless else "", in_quotes(baseline.name)
        fast = compared(lossless[0].speedup, than) if lossless and lossless[0].speedup is not None else ""
        none = f"No lossless one is faster than {than} beyond noise."
        sentences.append(f"The fastest lossless one is {name}: {fast}." if lossless else none)
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
    than = in_quotes(fastest.name)
    return [f"On {most} ranks the fastest is {in_quotes(on_most.name)}: {compared(comparison.ratio, than)}."]


def _one_process(on_one: Sequence[Setting], recommended: Setting | None) -> list[str]:
    """Says so if one process alone is faster than what was chosen for several."""
    comparison = compare_settings(on_one[0], recommended) if on_one and recommended is not None else None
    if comparison is None or comparison.difference != "faster" or recommended is None:
        return []
    says = compared(comparison.ratio, in_quotes(recommended.name))
    return [f"{in_quotes(on_one[0].name)} alone is {says}: more ranks do not pay here."]

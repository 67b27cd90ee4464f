"""`check_compressor`: starts ranks, tries one law after another on them, and reports which are broken."""

from __future__ import annotations

import pickle
import re
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightning_commopt.compressors import Compressor, ShardedCompressor, ShardedHierarchical
from lightning_commopt.compressors.shards import FromShards
from lightning_commopt.plan import OptionError
from lightning_commopt.testing import ranks
from lightning_commopt.testing.law import Law
from lightning_commopt.testing.laws import LAWS, same_collectives
from lightning_commopt.testing.places import Place
from lightning_commopt.testing.ranks import DIED, RankError, find_place, prepare_rank, run_on
from lightning_commopt.testing.sharded_laws import SHARDED_LAWS, ShardedSetup, why_unavailable
from lightning_commopt.testing.steps import Setup
from lightning_commopt.text.validation import check_choice, warn

# The server from which ranks are forked imports these once. Otherwise each rank would, which takes longer than all
# laws. A caller whose ranks need more modules sets another list later.
ranks.PROCESSES.set_forkserver_preload([__name__, "torch._dynamo"])

_DDP, _FSDP2 = "DDP", "FSDP2"
_LAWS_OF: Mapping[str, Mapping[str, Law]] = {_FSDP2: SHARDED_LAWS, _DDP: LAWS}
_NUM_RANKS = (2, 3, 4)  # numbers of ranks for which `Claims.error_bound` holds


class _Trial(NamedTuple):
    """A law, and the strategy with which it is tried."""

    strategy: str
    law: Law


class _CannotImport(NamedTuple):
    """A rank's answer if it cannot make the compressor out of what was pickled."""

    reason: str


def check_compressor(
    compressor: Compressor | ShardedCompressor,
    *,
    num_ranks: int = 2,
    device: str = "cpu",
    laws: Iterable[str] | None = None,
) -> None:
    """Checks on real ranks of this machine that a compressor obeys the laws that hold for every compressor.

    ::

        from lightning_commopt.testing import LAWS, check_compressor

        def test_sign():
            check_compressor(Sign())

        @pytest.mark.parametrize("law", LAWS)  # or one test for each law
        def test_law(law):
            check_compressor(Sign(), laws=[law])

    Random gradients go through DDP and the compressor, in processes of their own for each law. A `ShardedCompressor`
    is held to `SHARDED_LAWS` with FSDP2, and to `LAWS` with DDP, where it averages buckets as `FromShards`;
    `ShardedHierarchical` only with FSDP2. Where FSDP2 takes no compressors (torch before 2.9, or gloo on a GPU) its
    laws are left out, with a warning.

    The law `same_collectives` is tried first, whatever ``laws`` are: it sends nothing, and finds ranks that would wait
    for each other. A law that still hangs ends after one minute if it waits for a collective, after two
    otherwise, and the laws after it are not tried. No process of a rank is left when this returns or raises, also by
    Ctrl-C.

    Args:
        compressor: its class is at the top level of a module, registered or not. The ranks get it by pickle, and import
            its module by name. A script calls this below ``if __name__ == "__main__":``, as they import it, too. One
            that starts late, such as `AfterSteps`, must start amid the 8 steps of a law, as with ``start_step=4``.
        num_ranks: 2, 3 or 4, for which `Claims.error_bound` holds. 3 finds what is right for two ranks only.
        device: "cpu" with gloo; "cuda", where NCCL takes a GPU for each rank, or one that they share, and gloo takes
            over where NCCL refuses; "auto" for CUDA where there is a device.
        laws: names of the laws to check, in any order; None for all. A name in `LAWS` and in `SHARDED_LAWS` is checked
            with both strategies.

    Raises:
        AssertionError: laws are broken. The message lists what is wrong with each, and what that means for training. A
            law is broken, too, if the compressor raises, or if a rank's process dies.
        TypeError: ``compressor`` is not an instance of either class, or cannot be pickled.
        ValueError: a law, the number of ranks or the device is unknown, or this machine has no such device.
        OptionError: FSDP2 takes no compressors here, and none of the ``laws`` is about DDP.
        RankError: ranks cannot start here; a RuntimeError.
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    check_choice("num_ranks", num_ranks, _NUM_RANKS)
    trials, pickled = _choose(compressor, laws), _pickle(compressor)
    place = _find_place(device, num_ranks)
    trials = _possible(trials, place)
    broken: dict[_Trial, str] = {}
    untried = deque(trials)
    while untried:
        trial = untried.popleft()
        start_s = time.monotonic()
        if reason := _try(trial, pickled, repr(compressor), place):
            waited_s = time.monotonic() - start_s
            has_waited = waited_s >= place.timeout_s
            broken[trial] = f"after {waited_s:.0f} s of waiting {reason}" if has_waited else reason
            if has_waited or trial.law is same_collectives:
                break  # ranks would wait for each other under the other laws as well
    if broken:
        raise AssertionError(_report(repr(compressor), place, broken, len(trials), untried))


def _choose(compressor: Compressor | ShardedCompressor, laws: Iterable[str] | None) -> list[_Trial]:
    """Returns what to try, `same_collectives` first with each strategy."""
    if isinstance(compressor, ShardedCompressor):
        # For DDP another class has the hierarchy of nodes, `Hierarchical`.
        strategies = [_FSDP2] if isinstance(compressor, ShardedHierarchical) else [_FSDP2, _DDP]
    elif isinstance(compressor, Compressor):
        strategies = [_DDP]
    else:
        hint = f"; make one: {compressor.__name__}(...)" if isinstance(compressor, type) else ""
        raise TypeError(f"compressor must be a Compressor or a ShardedCompressor, got {compressor!r}{hint}")
    known = list(dict.fromkeys(name for strategy in strategies for name in _LAWS_OF[strategy]))
    if isinstance(laws, str):
        raise TypeError(f"laws must be a list of names, got {laws!r}; for a single law: laws=[{laws!r}]")
    wanted = set(known if laws is None else laws)
    for name in wanted:
        check_choice(f"a law of {type(compressor).__name__}", name, known)
    if not wanted:
        raise ValueError("laws must name at least one law, got none")
    trials = []
    for strategy in strategies:
        if names := wanted & _LAWS_OF[strategy].keys():
            names.add(same_collectives.name)
            trials += [_Trial(strategy, law) for name, law in _LAWS_OF[strategy].items() if name in names]
    return trials


def _pickle(compressor: Compressor | ShardedCompressor) -> bytes:
    try:
        return pickle.dumps(compressor)
    except Exception as error:
        cls = type(compressor)
        reason = f"{type(error).__name__}: {error}"
        if "<locals>" in cls.__qualname__:
            reason = f"its class {cls.__qualname__} is local to a function; define it at the top level of a module"
        raise TypeError(
            f"{cls.__name__} cannot be pickled, but the ranks, which are other processes, get it by pickle: {reason}"
        ) from error


def _find_place(device: str, num_ranks: int) -> Place:
    try:
        place, _ = find_place(device, num_ranks)
    except RankError as error:
        raise RankError(
            f"the ranks cannot start: {error}. If their processes have died, see what they printed. A script must call"
            ' check_compressor below `if __name__ == "__main__":`, as each rank imports the script.'
        ) from None
    return place


def _possible(trials: list[_Trial], place: Place) -> list[_Trial]:
    """Returns the trials without those with FSDP2 where it takes no compressors; warns if that leaves some out."""
    reason = why_unavailable(place)
    possible = [trial for trial in trials if trial.strategy != _FSDP2 or not reason]
    if not possible:
        raise OptionError(reason)
    if len(possible) < len(trials):
        warn(f"the laws for FSDP2 are not checked: {reason}")
    return possible


def _try(trial: _Trial, pickled: bytes, name: str, place: Place) -> str:
    """Returns why a law is broken, "" if it is not."""
    try:
        answers = run_on(place, _try_on_rank, trial.strategy, trial.law.name, pickled, name)
    except RankError as error:
        return _in_words(error)
    for answer in answers:
        if isinstance(answer, _CannotImport):
            raise TypeError(
                f"the ranks cannot make {name}, whose module they import by name: {answer.reason}. A class that was"
                " defined in a notebook must be in a module of its own."
            )
    return next((answer for answer in answers if answer), "")


def _in_words(error: RankError) -> str:
    """Returns a line with the rank and its exception, and then the traceback."""
    head, _, trace = str(error).partition("\n")
    if trace == DIED:
        reason = "gloo ends a process that receives a larger message than it has asked for"
        return f"{head.removesuffix(' raised')}: {DIED}; {reason}"
    raised = re.findall(r"^[\w.]+: .+", trace, re.MULTILINE)  # the last one is of the exception that was not caught
    return f"{head} {raised[-1]}\n{trace}" if raised else str(error)


def _try_on_rank(strategy: str, law: str, pickled: bytes, name: str, place: Place) -> str | _CannotImport:
    """Returns what is wrong, on a rank; "" if nothing is."""
    try:
        compressor = pickle.loads(pickled)
    except Exception as error:
        return _CannotImport(f"{type(error).__name__}: {error}")
    prepare_rank(place)
    setup: Setup = ShardedSetup(place=place) if strategy == _FSDP2 else Setup(place=place)
    if strategy == _DDP and isinstance(compressor, ShardedCompressor):
        compressor = FromShards(shards=compressor)
    try:
        _LAWS_OF[strategy][law](setup, name, compressor)
    except AssertionError as error:
        return str(error).removeprefix(f"{name}: ") or "an assertion of the compressor"
    return ""


def _report(name: str, place: Place, broken: Mapping[_Trial, str], num_laws: int, untried: Iterable[_Trial]) -> str:
    """Returns the message about broken laws; a traceback appears once, though it may break many of them."""
    paragraphs, traced = [f"{name} breaks {len(broken)} of {num_laws} laws, on {place.name}:"], []
    for trial, reason in broken.items():
        first_line, _, trace = reason.partition("\n")
        law = f"    Law: {trial.law.statement}.\n    Else {trial.law.consequence}."
        paragraphs.append(f"{_shown(trial)}: {first_line}\n{law}")
        if trace and first_line not in traced:
            paragraphs.append(textwrap.indent(trace.strip(), "    "))
            traced.append(first_line)
    if untried:
        paragraphs.append(f"Not tried, as ranks may wait for each other: {', '.join(map(_shown, untried))}")
    return "\n\n".join(paragraphs)


def _shown(trial: _Trial) -> str:
    return trial.law.name if trial.strategy == _DDP else f"{trial.law.name} ({trial.strategy})"

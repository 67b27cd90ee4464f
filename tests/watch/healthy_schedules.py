"""Healthy programs drawn from a seed: what is trained, and which rank takes its time where.

A delay is given in units of ``after_s`` and stays within what ``docs/troubleshoot/hangs.md`` allows for its place. No
delay is drawn where the other ranks would wait in a collective for longer than that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

_SEEN_FACTOR = 0.5
"""Of the 1 that phases are allowed which have been seen before."""

_SLOW_FACTOR = 7.5
"""Of the 10 that slow phases are allowed; all delays of a call share it, as they may follow each other."""

_END_FACTORS = 11.5, 13.0
"""Behind the last batch no rank waits for another: there is no limit."""

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_FIT_HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", *_STEP_HOOKS)
_END_HOOKS = ("on_train_end", "on_fit_end", "teardown")
_SANITY_HOOKS = ("on_sanity_check_start", "on_sanity_check_end")


def _evaluation_hooks(stage: str) -> tuple[str, ...]:
    parts = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    return tuple(f"on_{stage}_{part}" for part in parts)


HOOKS = (
    *_FIT_HOOKS,
    *_END_HOOKS,
    *_SANITY_HOOKS,
    *(hook for stage in ("validation", "test", "predict") for hook in _evaluation_hooks(stage)),
    "on_save_checkpoint",
)
"""Of a callback."""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """A rank sleeps."""

    # One of `HOOKS`, or "forward", "batch" (reading one), "validation_step", "validation_batch", "checkpoint" (a
    # `ModelCheckpoint`), "write" (of its file), "logger".
    place: str
    rank: int
    call: int  # how often the place has been reached in this call before; of a batch its index, in every epoch
    factor: float  # for how many ``after_s``


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a Trainer."""

    method: str = "fit"  # or "validate", "test", "predict"
    keeps_trainer: bool = False  # with its strategy and callbacks; else all is new
    # Whether the HangMonitor comes before the callback that sleeps, or behind it, or is that of the last call and comes
    # behind it.
    monitor: Literal["first", "last", "kept"] = "first"
    comm_hook: str | None = None
    num_batches: int = 4
    has_length: bool = True
    num_workers: int = 0
    max_epochs: int = 1
    max_steps: int = -1  # the fit ends after these, if not before
    accumulate: int = 1
    num_sanity: int = 0
    validates: bool = False
    saves: bool = False
    ends: Literal["", "should_stop", "raise"] = ""  # on all ranks; "raise" is an exception that the program catches
    delays: tuple[Delay, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A program: the calls that every rank makes, one after the other."""

    seed: int
    world_size: int
    calls: tuple[Call, ...]


def draw(seed: int) -> Schedule:
    """Returns the schedule of a seed; the same on every machine."""
    chance = random.Random(seed)
    world_size = chance.choice((2, 2, 3))
    methods = ["fit"] * chance.choice((1, 1, 1, 2))
    for _ in range(chance.choice((0, 0, 1))):
        methods.insert(chance.randint(0, len(methods)), chance.choice(("validate", "test", "predict")))
    calls: list[Call] = []
    for position, method in enumerate(methods):
        previous = calls[-1] if calls else None
        call = _draw_call(chance, method, previous)
        delays = _draw_delays(chance, call, world_size, is_last=position == len(methods) - 1)
        calls.append(replace(call, delays=delays))
    return Schedule(seed=seed, world_size=world_size, calls=tuple(calls))


def _draw_call(chance: random.Random, method: str, previous: Call | None) -> Call:
    can_go_on = previous is not None and previous.ends == "" and previous.max_steps == -1
    keeps_trainer = can_go_on and chance.random() < 0.5
    monitors: tuple[Literal["first", "last", "kept"], ...] = ("first", "last", "kept")
    monitor = chance.choice(monitors if previous is not None else monitors[:2])
    comm_hook = chance.choice((None, None, "bf16", "int8", "powersgd"))
    has_length = chance.random() < 0.7
    num_batches = chance.randint(3, 6)
    num_workers = int(chance.random() < 0.1)
    any_call = Call(
        method=method,
        keeps_trainer=keeps_trainer,
        monitor=monitor,
        num_batches=num_batches,
        has_length=has_length,
        num_workers=num_workers,
    )
    if method != "fit":
        return any_call
    saves = chance.random() < 0.5
    return replace(
        any_call,
        comm_hook=comm_hook,
        max_epochs=chance.choice((1, 1, 2)),
        max_steps=chance.choice((-1, -1, -1, num_batches - 1)) if not keeps_trainer else -1,
        accumulate=chance.choice((1, 1, 2)),
        num_sanity=chance.choice((0, 1)),
        validates=chance.random() < 0.5,
        saves=previous.saves if keeps_trainer and previous is not None else saves,
        ends=chance.choice(("", "", "", "should_stop", "raise")),
    )


def _draw_delays(chance: random.Random, call: Call, world_size: int, *, is_last: bool) -> tuple[Delay, ...]:
    ends_late = is_last and call.method == "fit" and call.ends != "raise" and chance.random() < 0.6
    places = _slow_places(call) if not ends_late else []
    num_slow = chance.choice((1, 1, 2, 3)) if places else 0
    delays = []
    for place in chance.sample(places, min(num_slow, len(places))):
        number = chance.randrange(call.num_batches) if place in _STEP_HOOKS else 0
        delays.append(_draw_delay(chance, world_size, place, number, _SLOW_FACTOR / num_slow))
    if ends_late:
        delays.append(_draw_end(chance, call, chance.randrange(world_size)))
    if chance.random() < 0.5:
        place, number = chance.choice(_seen_places(call)), chance.randrange(1, call.num_batches)
        delays.append(_draw_delay(chance, world_size, place, number, _SEEN_FACTOR))
    return tuple(delays)


def _draw_end(chance: random.Random, call: Call, rank: int) -> Delay:
    # All ranks come to the last checkpoint, so none may come that late.
    place = chance.choice(_END_HOOKS[1:] if call.saves else _END_HOOKS)
    return Delay(place=place, rank=rank, call=0, factor=chance.uniform(*_END_FACTORS))


def _draw_delay(chance: random.Random, world_size: int, place: str, number: int, factor: float) -> Delay:
    rank = 0 if place in ("write", "logger") else chance.randrange(world_size)
    return Delay(place=place, rank=rank, call=number, factor=factor * chance.uniform(0.7, 1))


def _slow_places(call: Call) -> list[str]:
    if call.method != "fit":
        stage = "validation" if call.method == "validate" else call.method
        return ["setup", "batch", "teardown", *_evaluation_hooks(stage)]
    places = [*_FIT_HOOKS, *_END_HOOKS, "batch", "forward", "logger"]
    if call.validates:
        places += [*_evaluation_hooks("validation"), "validation_batch", "validation_step"]
    if call.validates and call.num_sanity:
        places += _SANITY_HOOKS
    if call.saves:
        places += ["on_save_checkpoint", "checkpoint", "write"]
    # Nothing is done behind the step in which all ranks raise.
    return [place for place in places if call.ends != "raise" or place not in (*_END_HOOKS, "on_train_epoch_end")]


def _seen_places(call: Call) -> list[str]:
    if call.method != "fit":
        return ["batch"]
    return ["forward", "batch", *(["validation_step", "validation_batch"] if call.validates else [])]

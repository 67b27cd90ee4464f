"""What the Trace Event Format asks of a file, and Perfetto of a file that it is to draw as it was meant."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]

_METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_trace(trace: dict[str, Any]) -> None:
    """Raises AssertionError where a trace is not as viewers want it."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert events
    for event in events:
        _check_event(event)
    _check_names(events)
    for row in rows(trace).values():
        _check_nesting(row)


def rows(trace: dict[str, Any]) -> dict[tuple[int, str], list[Event]]:
    """Returns the slices by the number of the process and the name of the thread."""
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    found: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], names[event["tid"]]].append(event)
    return dict(found)


def _check_event(event: Event) -> None:
    keys = {"name", "ph", "pid", "tid", "args"}
    keys |= {"X": {"cat", "ts", "dur"}, "C": {"cat", "ts"}, "M": set()}[event["ph"]]
    assert set(event) == keys, event
    for key in keys & {"ts", "dur"}:
        assert isinstance(event[key], int | float)
        assert event[key] >= 0
        assert (event[key] * 1000).is_integer(), "no whole number of nanoseconds: viewers round it either way"
    if event["ph"] == "M":
        key, kind = _METADATA[event["name"]]
        assert set(event["args"]) == {key}
        assert isinstance(event["args"][key], kind)


def _check_names(events: list[Event]) -> None:
    """Every process and thread has one name, and no two processes share the number of a thread."""
    metadata = [event for event in events if event["ph"] == "M"]
    processes = [event["pid"] for event in metadata if event["name"] == "process_name"]
    threads = [event["tid"] for event in metadata if event["name"] == "thread_name"]
    assert len(processes) == len(set(processes))
    assert len(threads) == len(set(threads))
    assert {event["pid"] for event in events} == set(processes)
    assert {event["tid"] for event in events if event["ph"] == "X"} <= set(threads)
    assert len({(event["pid"], event["tid"]) for event in events}) == len({event["tid"] for event in events})
    assert not set(processes) & set(threads), "Perfetto takes a thread with its process's number for the main one"


def _check_nesting(row: list[Event]) -> None:
    """The slices of a thread are in order of time, and lie beside or within each other."""
    open_ends: list[float] = []
    last = 0.0
    for event in row:
        start, end = event["ts"], event["ts"] + event["dur"]
        assert start >= last, "not in the order of time"
        last = start
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{event['name']} overlaps what came before"
        open_ends.append(end)

"""Ranges in one NVTX domain: nested ranges of one thread, and those of buckets."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import nvtx  # type: ignore[import-untyped]

from lightning_commopt.measure.observer import END, START, BucketInfo, BucketSync, SyncObserver


def profiled_domain(name: str) -> Any:
    """Returns the NVTX domain of that name; None if no profiler is attached."""
    if not nvtx.enabled():
        return None
    domain = nvtx.get_domain(name)
    # For this case nvtx has a domain that does nothing and gives no attributes. Its class is not public.
    return domain if domain.get_event_attributes(name) is not None else None


class Timeline:
    """Nested ranges in a `profiled_domain`, all on one thread; ``depth`` of them are open. Colors are ARGB, by name."""

    def __init__(self, domain: Any, colors: Mapping[str, int]) -> None:
        self._domain = domain
        self._colors = colors
        self._attributes = {name: domain.get_event_attributes(name, color) for name, color in colors.items()}
        self.depth = 0

    def push(self, name: str, number: int | None = None) -> None:
        """Opens a range within those that are open, with a number in its name; nvtx keeps every text in memory."""
        attributes = self._attributes[name]
        if number is not None:
            attributes = self._domain.get_event_attributes(f"{name} {number}", self._colors[name])
        self._domain.push_range(attributes)
        self.depth += 1

    def pop_to(self, depth: int) -> None:
        """Ends the innermost ranges until at most ``depth`` are open."""
        while self.depth > depth:
            self._domain.pop_range()
            self.depth -= 1


class SyncRanges(SyncObserver):
    """Makes a range of every bucket's sync, on whichever threads it begins and ends; the color is ARGB."""

    def __init__(self, domain: Any, color: int) -> None:
        self._domain = domain
        self._color = color
        self._attributes: dict[tuple[int, int], Any] = {}
        self._lock = Lock()
        self._open: set[int] = set()
        self._is_closed = False

    def ready(self, bucket: BucketInfo) -> BucketSync:
        """Prepares the range ``bucket <index>``, whose payload is the gradients' size in bytes."""
        key = bucket.index, bucket.gradient_bytes
        if key not in self._attributes:
            self._attributes[key] = self._domain.get_event_attributes(
                f"bucket {bucket.index}", self._color, payload=bucket.gradient_bytes
            )
        return _SyncRange(self, self._attributes[key])

    def start(self, attributes: Any) -> int | None:
        """Begins a range, and returns its number; None after `close`."""
        with self._lock:
            if self._is_closed:
                return None
            range_id: int = self._domain.start_range(attributes)
            self._open.add(range_id)
            return range_id

    def end(self, range_id: int | None) -> None:
        """Ends a range, unless `close` did."""
        with self._lock:
            if range_id in self._open:
                self._open.remove(range_id)
                self._domain.end_range(range_id)

    def close(self) -> None:
        """Ends the ranges of syncs that failed; no further ones begin."""
        with self._lock:
            self._is_closed = True
            while self._open:
                self._domain.end_range(self._open.pop())


class _SyncRange(BucketSync):
    def __init__(self, ranges: SyncRanges, attributes: Any) -> None:
        self._ranges = ranges
        self._attributes = attributes
        self._range_id: int | None = None

    def note(self, event: int, wire_bytes: int = 0) -> None:
        if event == START:
            self._range_id = self._ranges.start(self._attributes)
        elif event == END:
            self._ranges.end(self._range_id)

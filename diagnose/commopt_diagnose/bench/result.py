"""BenchResult: a row for each measured case, to JSON and back, and to CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_commopt.measure.link.bus import bus_factor
from lightning_commopt.measure.median import Median, median_of
from lightning_commopt.measure.plain import from_plain, load_json, parse_json, write_json, write_rows
from lightning_commopt.text.formatting import grouped

FORMAT = 1  # version of the JSON, raised when a key changes its meaning; new keys keep it
_KIND = "commopt bench"
_SCOPE_WORDS = {"node": "within a node", "across": "across nodes"}
_ONLY_OUT_OF_PLACE = ("all_to_all", "send_recv")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation to measure."""

    operation: str  # a collective, or "comm_hook"
    size_bytes: int  # size of the message; if ranks hold parts of it, the size of all parts
    count: int  # number of elements as nccl-tests counts: if ranks hold parts of a message, one rank's elements
    dtype: str
    redop: str  # reduction; "none" for other collectives
    place: str  # "in" or "out" of place
    comm_hook: Any = None  # the compressor as in a configuration; None for a collective
    load: str = "idle"  # "idle" or "compute"
    scope: str = "all"  # "all", "node" or "across"
    num_ranks: int  # number of ranks in one group

    @property
    def name(self) -> str:
        """The collective, or the comm hook with its options."""
        if self.operation != "comm_hook":
            return self.operation
        if not isinstance(self.comm_hook, Mapping):
            return str(self.comm_hook)
        return " ".join(str(value) if key == "name" else f"{key}={value}" for key, value in self.comm_hook.items())

    @property
    def series(self) -> tuple[Any, ...]:
        """The attributes that are equal in cases that differ only in size."""
        return self.name, self.dtype, self.redop, self.place, self.load, self.scope, self.num_ranks

    @property
    def label(self) -> str:
        """The series in few words, without defaults."""
        words = [self.name]
        words += [self.dtype] if self.dtype != "float32" else []
        words += [self.redop] if self.redop not in ("none", "sum", "mean") else []
        words += ["out of place"] if self.place == "out" and self.operation not in _ONLY_OUT_OF_PLACE else []
        words += [_SCOPE_WORDS[self.scope]] if self.scope in _SCOPE_WORDS else []
        words += ["under compute"] if self.load == "compute" else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurement of one case."""

    case: Case
    times_s: Sequence[float] = ()  # time of one call in each repetition: the mean over its calls on the slowest rank
    num_iters: int = 0  # calls in the last repetition
    num_wrong: int | None = None  # elements on all ranks that are wrong or differ between ranks; None if unchecked
    error: str | None = None  # why there are no times, in one line

    @cached_property
    def time_s(self) -> Median:
        """The median over repetitions."""
        return median_of(self.times_s)

    @property
    def algbw(self) -> float:
        """Message bytes per second."""
        return self.case.size_bytes / self.time_s.median

    @property
    def busbw(self) -> float:
        """Bytes per second on a link; see `bus_factor`."""
        return self.algbw * bus_factor(self.case.operation, self.case.num_ranks)


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All measurements, with their conditions."""

    rows: tuple[Row, ...]
    where: Mapping[str, Any]  # "hosts", "devices", "backend", "world_size", "num_nodes", "link" and other conditions
    settings: Mapping[str, Any]  # see `BenchSettings.to_dict`
    peer_copies: Sequence[Sequence[float | None]] = field(default=())  # bytes/s from each GPU (row) to each other GPU

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]

    @property
    def num_wrong(self) -> int:
        return sum(row.num_wrong or 0 for row in self.rows)

    @property
    def link_bytes_per_s(self) -> float | None:
        """The limit of the link's rate in each direction; None without a limit."""
        bits = self.where.get("link_bits_per_s")
        return None if bits is None else bits / 8

    def by_series(self) -> dict[tuple[Any, ...], list[Row]]:
        """Returns the rows that have times, by `Case.series`, each in the order of sizes."""
        by_series = grouped((row.case.series, row) for row in self.measured)
        return {series: sorted(rows, key=lambda row: row.case.size_bytes) for series, rows in by_series.items()}

    def to_plain(self) -> dict[str, Any]:
        """Returns everything in JSON types; bandwidths in bytes per second."""
        return {
            "kind": _KIND,
            "format": FORMAT,
            "where": dict(self.where),
            "settings": dict(self.settings),
            "rows": [_plain_row(row) for row in self.rows],
            "peer_copies": [list(line) for line in self.peer_copies],
        }

    def save(self, path: Path) -> None:
        """Writes the result as JSON, atomically."""
        write_json(path, self.to_plain())

    @classmethod
    def load(cls, path: Path) -> BenchResult:
        """Reads a file of `save`; for errors see `load_json`."""

        def read(plain: dict[str, Any]) -> BenchResult:
            result = from_plain(cls, {**plain, "rows": [{**row, "case": row} for row in plain["rows"]]})
            for row in result.measured:
                if not row.times_s or not all(0 < time_s < float("inf") for time_s in row.times_s):
                    raise ValueError(f"times must be above 0, got {list(row.times_s)}")
            return result

        return load_json(path, _KIND, FORMAT, read)

    def write_csv(self, path: Path) -> None:
        """Writes a row for each case; see `to_plain`."""
        rows = [{name: value for name, value in _plain_row(row).items() if name != "times_s"} for row in self.rows]
        write_rows(path, rows)


def kind_of(path: Path) -> object:
    """Returns the kind of a JSON file that this package wrote; None for any other file."""
    try:
        plain = parse_json(path.read_bytes())
    except ValueError:
        return None
    return plain.get("kind") if isinstance(plain, dict) else None


def _plain_row(row: Row) -> dict[str, Any]:
    plain = dataclasses.asdict(row.case)
    if row.error is not None:
        return {**plain, "error": row.error}
    times_s = dict(zip(("time_s", "time_s_low", "time_s_high"), row.time_s, strict=True))
    numbers = {name: getattr(row, name) for name in ("algbw", "busbw", "num_wrong", "num_iters")}
    return {**plain, **times_s, **numbers, "times_s": list(row.times_s)}

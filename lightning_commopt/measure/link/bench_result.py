"""The result of a bench: a row for each case, to JSON and back, and to CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_commopt.measure.median import Median, median_of

FORMAT = 1
"""Of the JSON. A later version that changes what a key means raises it; new keys do not."""

_KIND = "commopt bench"
_SCOPE_WORDS = {"node": "within a node", "across": "across nodes"}
_ONLY_OUT_OF_PLACE = ("all_to_all", "send_recv")


def bus_factor(operation: str, num_ranks: int) -> float:
    """Returns what the algorithm bandwidth is multiplied by, to compare it with a link's rate.

    Args:
        operation: a collective, or "comm_hook".
        num_ranks: that take part.

    Source: nccl-tests, doc/PERFORMANCE.md. Compound ways to reduce, and comm hooks, count as the all-reduce that they
    stand for; the tests say nothing of those.
    """
    if operation in ("all_reduce", "reduce_broadcast", "reduce_scatter_all_gather", "comm_hook"):
        return 2 * (num_ranks - 1) / num_ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: a collective, or "comm_hook".
        size_bytes: of the message; whole elements, of all ranks where it is divided.
        count: elements as nccl-tests counts them: for a message that is divided, those of one rank.
        dtype: of the elements.
        redop: how they are reduced; "none" where they are not.
        place: "in" or "out" of place.
        comm_hook: the compressor, as a configuration writes it; None for a collective.
        load: "idle" or "compute".
        scope: "all", "node" or "across".
        num_ranks: in one group.
    """

    operation: str
    size_bytes: int
    count: int
    dtype: str
    redop: str
    place: str
    comm_hook: Any = None
    load: str = "idle"
    scope: str = "all"
    num_ranks: int

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
        """What all cases have in common that differ in their size only."""
        return self.name, self.dtype, self.redop, self.place, self.load, self.scope, self.num_ranks

    @property
    def label(self) -> str:
        """The series in few words; what is usual is left out."""
        words = [self.name]
        words += [self.dtype] if self.dtype != "float32" else []
        words += [self.redop] if self.redop not in ("none", "sum", "mean") else []
        words += ["out of place"] if self.place == "out" and self.operation not in _ONLY_OUT_OF_PLACE else []
        words += [_SCOPE_WORDS[self.scope]] if self.scope in _SCOPE_WORDS else []
        words += ["under compute"] if self.load == "compute" else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one case.

    Attributes:
        case: what it is.
        times_s: of one call, one for each repetition: the mean of its calls on the slowest rank.
        num_iters: calls in a repetition.
        num_wrong: elements that are not what they must be, on all ranks; of a comm hook, that differ between ranks.
            None where nothing was checked.
        error: why there are no times, in a line; None where there are.
    """

    case: Case
    times_s: Sequence[float] = ()
    num_iters: int = 0
    num_wrong: int | None = None
    error: str | None = None

    @cached_property
    def time_s(self) -> Median:
        """The median over repetitions."""
        return median_of(self.times_s)

    @property
    def algbw(self) -> float:
        """Bytes of the message in a second."""
        return self.case.size_bytes / self.time_s.median

    @property
    def busbw(self) -> float:
        """What a link carries in a second, in bytes; see `bus_factor`."""
        return self.algbw * bus_factor(self.case.operation, self.case.num_ranks)


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All that was measured, with where and when.

    Attributes:
        rows: in the order of cases.
        where: "hosts", "devices", "backend", "world_size", "num_nodes", "link" and what else there is to know.
        settings: see `BenchSettings.to_dict`.
        peer_copies: bytes a second from each GPU (row) to each other one (column); empty without two GPUs.
    """

    rows: tuple[Row, ...]
    where: Mapping[str, Any]
    settings: Mapping[str, Any]
    peer_copies: Sequence[Sequence[float | None]] = field(default=())

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]

    @property
    def num_wrong(self) -> int:
        return sum(row.num_wrong or 0 for row in self.rows)

    @property
    def link_bytes_per_s(self) -> float | None:
        """The rate that the link was limited to, each way; None if it was not."""
        bits = self.where.get("link_bits_per_s")
        return None if bits is None else bits / 8

    def by_series(self) -> dict[tuple[Any, ...], list[Row]]:
        """Returns the rows that have times, by `Case.series`, each in the order of sizes."""
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.measured:
            found.setdefault(row.case.series, []).append(row)
        return {series: sorted(rows, key=lambda row: row.case.size_bytes) for series, rows in found.items()}

    def to_plain(self) -> dict[str, Any]:
        """Returns everything in types that JSON has; bandwidths in bytes a second."""
        return {
            "kind": _KIND,
            "format": FORMAT,
            "where": dict(self.where),
            "settings": dict(self.settings),
            "rows": [_plain_row(row) for row in self.rows],
            "peer_copies": [list(line) for line in self.peer_copies],
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_plain(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> BenchResult:
        """Reads what `save` has written.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file, or it is cut.
        """
        plain = load_json(path, _KIND, FORMAT)
        try:
            rows = tuple(_row_of(each) for each in plain["rows"])
            return cls(rows=rows, where=plain["where"], settings=plain["settings"], peer_copies=plain["peer_copies"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None

    def write_csv(self, path: Path) -> None:
        """Writes a row for each case; see `to_plain`."""
        rows = [{name: value for name, value in _plain_row(row).items() if name != "times_s"} for row in self.rows]
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
            writer.writeheader()
            writer.writerows(rows)


def kind_of(path: Path) -> object:
    """Returns what a JSON file of ours says it is; None of any other file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        plain = json.loads(path.read_bytes())
    except ValueError:
        return None
    return plain.get("kind") if isinstance(plain, dict) else None


def load_json(path: Path, kind: str, newest_format: int) -> dict[str, Any]:
    """Reads a JSON object that a command of ours has written.

    Args:
        path: of the file.
        kind: that it says it is.
        newest_format: that we can read.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or a part.
    """
    try:
        plain = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = "it is binary" if isinstance(error, UnicodeDecodeError) else f"{error.msg} in line {error.lineno}"
        raise ValueError(f"{path} is no result of {kind}, or was cut: {reason}") from None
    if not isinstance(plain, dict) or plain.get("kind") != kind:
        raise ValueError(f"{path} is no result of {kind}")
    if not isinstance(plain.get("format"), int) or plain["format"] > newest_format:
        raise ValueError(f"{path} has format {plain.get('format')!r}; this version reads up to {newest_format}")
    return plain


def _plain_row(row: Row) -> dict[str, Any]:
    plain = dataclasses.asdict(row.case)
    if row.error is not None:
        return {**plain, "error": row.error}
    numbers = {
        "time_s": row.time_s.median,
        "time_s_low": row.time_s.low,
        "time_s_high": row.time_s.high,
        "algbw": row.algbw,
        "busbw": row.busbw,
        "num_wrong": row.num_wrong,
        "num_iters": row.num_iters,
    }
    return {**plain, **numbers, "times_s": list(row.times_s)}


def _row_of(plain: Mapping[str, Any]) -> Row:
    case = Case(**{each.name: plain[each.name] for each in dataclasses.fields(Case)})
    if plain.get("error") is not None:
        return Row(case=case, error=str(plain["error"]))
    times_s = [float(time_s) for time_s in plain["times_s"]]
    if not times_s or not all(0 < time_s < float("inf") for time_s in times_s):
        raise ValueError(f"times must be above 0, got {times_s}")
    return Row(case=case, times_s=times_s, num_iters=int(plain["num_iters"]), num_wrong=plain["num_wrong"])

"""The result of `gpu.py`: a JSON file and a Markdown table, both written anew with each row: no row is lost."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from results_file import origin_of

from lightning_commopt.measure.plain import write_json

VERDICTS = ("right", "wrong", "measured", "failed", "cut", "not run")
_BAR = "\\|"  # which Markdown would take for the end of a cell
_HEADINGS = ("part", "what", "result", "verdict", "hardware", "date")


def slug(name: str) -> str:
    """Returns a name for file names.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Report:
    """Rows of all parts, of which several may run at the same time.

    Args:
        folder: of the files.
        settings: of the run, for the JSON.
        place: where ranks run, in words.
        is_dry: no GPU is used.
        commit: of the checkout, for a copy of it that git does not know, or takes for another one.

    Attributes:
        suffix: of the names of all files of this run: hardware and date.
        path: of the JSON file.
    """

    def __init__(
        self, folder: Path, *, settings: dict[str, Any], place: str, is_dry: bool, commit: str | None, load: float
    ) -> None:
        self.folder = folder
        self._settings, self._place, self._load, self._start_s = settings, place, load, time.monotonic()
        self._origin = origin_of(load) | {"driver_version": driver_version()}
        gpus = [device["name"] for device in self._origin["devices"] if device["kind"] == "cuda"]
        number = f"{len(gpus)} x " if len(gpus) > 1 else ""
        self.hardware = self._origin["hardware"] if is_dry or not gpus else f"{number}{gpus[0]}"
        if commit is not None:
            self._origin["git"] = {"commit": commit}
        self.suffix = f"{slug(self.hardware)}_{date.today().isoformat()}"
        self.path = folder / f"{'gpu_dry_run' if is_dry else 'gpu'}_{self.suffix}.json"
        self.parts: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self.ended_by: str | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, part: str, title: str, limit_s: float) -> None:
        """Adds a part, whose rows come next."""
        with self._lock:
            self.parts[part] = {"title": title, "limit_s": round(limit_s, 1), "seconds": 0.0, "rows": []}
            self.write()

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Adds a row, or replaces that of this name, with the seconds of this run at which it was known."""
        assert row["verdict"] in VERDICTS, row
        with self._lock:
            rows = self.parts[part]["rows"]
            at = next((at for at, other in enumerate(rows) if other["name"] == row["name"]), len(rows))
            if rows[at:] and row.items() <= rows[at].items():
                return
            rows[at : at + 1] = [{**row, "at_s": round(time.monotonic() - self._start_s, 1)}]
            print(f"{part}: {row['name']}: {row['verdict']}: {row['result']}", flush=True)
            self.write()

    def end(self, part: str, seconds: float) -> None:
        """Notes what a part took."""
        with self._lock:
            self.parts[part]["seconds"] = round(seconds, 1)
            self.write()

    def count(self) -> Counter[str]:
        """Returns how many rows there are of each verdict."""
        return Counter(row["verdict"] for part in self.parts.values() for row in part["rows"])

    def write(self) -> None:
        """Writes both files; a reader sees the old or the new ones."""
        result = {
            "settings": self._settings,
            "place": self._place,
            "seconds": round(time.monotonic() - self._start_s, 1),
            "ended_by": self.ended_by,
            "verdicts": dict(self.count()),
            "parts": self.parts,
        }
        write_json(self.path, self._origin | result)
        markdown = self.path.with_suffix(".md")
        unfinished = markdown.with_name(f".{markdown.name}")
        unfinished.write_text(self.markdown(), encoding="utf-8")
        unfinished.replace(markdown)

    def markdown(self) -> str:
        """Returns the table, below what it needs to be understood."""
        versions = ", ".join(f"{name} {version}" for name, version in self._origin["versions"].items())
        git = self._origin["git"] or {}
        counts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(self.count().items()))
        lines = [
            f"# {self.hardware}, {self._origin['date']}",
            "",
            f"`{self._origin['command']}`, commit {git.get('commit') or 'unknown'}: {self._place}.",
            f"{versions}, NCCL {self._origin['nccl_version']}, driver {self._origin['driver_version']},"
            f" {self._origin['platform']}.",
            f"{counts or 'nothing yet'}, in {time.monotonic() - self._start_s:.0f} s."
            + (f" Ended by {self.ended_by}." if self.ended_by else ""),
            "",
            _line(_HEADINGS),
            _line(["---"] * len(_HEADINGS)),
        ]
        where = f"{self.hardware}; {self._place}"
        for part in self.parts.values():
            for row in part["rows"]:
                cells = (part["title"], row["name"], row["result"], row["verdict"], where, self._origin["date"])
                lines.append(_line(cells))
        return "\n".join(lines) + "\n"


def _line(cells: Iterable[Any]) -> str:
    words = (" ".join(str(cell).split()) for cell in cells)
    return f"| {' | '.join(word.replace('|', _BAR) for word in words)} |"


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver; None without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.split("\n")[0].strip()


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns what a script has written; None if that is nothing, or not yet all."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    assert isinstance(found, dict)
    return found

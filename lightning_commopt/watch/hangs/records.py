"""What watchers leave in a folder: ``report.json``, and the state and marks of every rank."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_commopt.watch.hangs.diagnosis import Diagnosis
from lightning_commopt.watch.hangs.marks import Mark
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

REPORT = "report.json"
_PREVIOUS_REPORT = "previous_report.json"
_RANK_FILE = re.compile(r"rank_(\d+)\.json")


class Records:
    """Writes the files of one rank.

    Files are replaced as a whole. A folder that cannot be written to is left alone: the sentence has been printed.

    Args:
        folder: made when the first file is written.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def begin(self, world_size: int) -> None:
        """Takes away what another run has left in the folder; its report stays as ``previous_report.json``."""
        with suppress(OSError):  # there is none, or another rank was faster
            (self._folder / REPORT).replace(self._folder / _PREVIOUS_REPORT)
        with suppress(OSError):
            for path in self._folder.iterdir():
                found = _RANK_FILE.fullmatch(path.name)
                if found and (int(found[1]) == self._rank or int(found[1]) >= world_size):
                    path.unlink(missing_ok=True)

    def keep(self, snapshot: RankSnapshot, marks: Sequence[Mark]) -> None:
        """Writes where the rank is, and its last marks with times in seconds since 1970."""
        unix_s = time.time() - time.monotonic()
        plain = snapshot.to_plain() | {
            "written_unix_s": time.time(),
            "marks": [[round(mark.at_s + unix_s, 6), *mark[2:]] for mark in marks],
        }
        self._write(f"rank_{self._rank}.json", plain)

    def discard(self) -> None:
        """Removes the rank's file: its fit has ended well."""
        try:
            (self._folder / f"rank_{self._rank}.json").unlink(missing_ok=True)
            self._folder.rmdir()
        except OSError:  # others are still in it
            pass

    def report(self, diagnosis: Diagnosis, snapshots: Sequence[RankSnapshot], idle_s: float, ras: Any = None) -> Path:
        """Writes the diagnosis with the snapshots of all ranks, and what NCCL's RAS says; returns the folder."""
        plain = diagnosis.to_plain() | {
            "time_unix_s": time.time(),
            "idle_s": idle_s,
            "nccl_ras": ras,
            "snapshots": [each.to_plain() for each in sorted(snapshots, key=lambda each: each.rank)],
        }
        self._write(REPORT, plain)
        return self._folder

    def _write(self, name: str, plain: dict[str, Any]) -> None:
        path = self._folder / name
        partial = path.with_name(f".{name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(plain), encoding="utf-8")
            partial.replace(path)
        except OSError:
            return

"""Finds the run that a command is about where a user names a directory above it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lightning_commopt.commands.errors import echo


def newest_run(folder: Path, *patterns: str) -> Path:
    """Returns ``folder`` if a file in it matches one of these patterns, else the directory below it where one does.

    Of several directories the one that was written last is returned, and a line on standard error names it. A folder
    can match, too; its time is that at which a file was last added or removed. If nothing matches, ``folder`` itself is
    returned, and its reader reports what is missing.
    """
    if not folder.is_dir() or _matches(folder, patterns):
        return folder
    runs: dict[Path, float] = {}
    for path, folders, _ in os.walk(folder):
        if matches := _matches(Path(path), patterns):
            runs[Path(path)] = max(match.stat().st_mtime for match in matches)
            folders.clear()  # a run holds no other run
    if not runs:
        return folder
    newest = max(runs, key=runs.__getitem__)
    others = f", the newest of {len(runs)} runs below {folder}" if len(runs) > 1 else ""
    echo(f"commopt: {newest}{others}", err=True)
    return newest


def _matches(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [match for pattern in patterns for match in folder.glob(pattern)]

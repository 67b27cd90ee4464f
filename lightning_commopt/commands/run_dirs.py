"""Finds the run that a command is about where a user names a directory above it."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_commopt.commands.errors import echo


def newest_run(folder: Path, *names: str) -> Path:
    """Returns ``folder`` if it holds one of these files or folders, else the directory below it that does.

    Of several the one that was written last counts, and a line on standard error names it. If there is none, ``folder``
    itself is returned: what reads it knows best what is missing.
    """
    if not folder.is_dir() or any((folder / name).exists() for name in names):
        return folder
    runs: list[Path] = []
    for path, folders, files in os.walk(folder):
        if any(name in folders or name in files for name in names):
            runs.append(Path(path))
            folders.clear()  # a run holds no other run
    if not runs:
        return folder
    newest = max(runs, key=lambda path: max((path / name).stat().st_mtime for name in names if (path / name).exists()))
    others = f", the newest of {len(runs)} runs below {folder}" if len(runs) > 1 else ""
    echo(f"commopt: {newest}{others}", err=True)
    return newest

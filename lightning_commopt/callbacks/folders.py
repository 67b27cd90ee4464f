"""The folders that callbacks write to, which are local even if the logger's or the Trainer's is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def check_dirpath(dirpath: str | Path | None) -> Path | None:
    """Returns the option ``dirpath`` of a callback as a path, with "~" expanded; None stays None.

    Raises:
        ValueError: it is not a path, or it is a URL.
    """
    if dirpath is None:
        return None
    if not isinstance(dirpath, (str, os.PathLike)) or _is_url(str(dirpath)):
        raise ValueError(f"dirpath must be a local folder or None, got {dirpath!r}")
    return Path(dirpath).expanduser()


def check_unshared(dirpaths: Sequence[Path | None], callback: object) -> None:
    """Raises a MisconfigurationException if two callbacks like ``callback`` would write into one ``dirpath``."""
    if len({*dirpaths}) < len(dirpaths):
        raise MisconfigurationException(
            f"{type(callback).__name__}: another {type(callback).__name__} in the same Trainer writes the same files."
            " Give one of them another dirpath, or save_records=False."
        )


def local_folder(folder: str | Path, callback: object) -> Path:
    """Returns the folder of a logger or a Trainer; the working directory, with a warning, if it is a URL.

    Lightning writes to URLs such as ``s3://bucket/runs`` through fsspec. As a path it would mean a folder ``s3:`` in
    the working directory.
    """
    text = str(folder).removeprefix("file://")
    if not _is_url(text):
        return Path(text)
    warn_once(
        f"{type(callback).__name__} writes local files only, so they are written to {Path.cwd()} and not to {text}. Set"
        " dirpath to choose another folder."
    )
    return Path.cwd()


def find_folder(trainer: Trainer, dirpath: Path | None, callback: object) -> Path:
    """Returns ``dirpath``, else the logger's folder, else the Trainer's.

    All ranks must call it, because Lightning broadcasts ``log_dir``.
    """
    return dirpath or local_folder(trainer.log_dir or trainer.default_root_dir, callback)


def _is_url(text: str) -> bool:
    return "://" in text

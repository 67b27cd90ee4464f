"""Which commit a run was made from."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

_LIMIT_S = 5


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit that is checked out and whether files differ from it; None where there is no repository.

    Args:
        folder: any folder within the repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "has_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()

"""Finds Linux's control groups of this process, which hold the limits of a container, a job or a login session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folder of the group that this process is in, then those above it, whose limits count as well.

    Args:
        controller: what has its own groups in version 1, such as "memory"; in version 2 a group is for everything.
        root: ``/``, or a folder with the files of another machine.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folders = [top / path.lstrip("/"), *(top / path.lstrip("/")).parents]
        yield from folders[: folders.index(top) + 1]

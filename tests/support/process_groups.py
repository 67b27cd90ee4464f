"""Which processes of a process group are alive, read from /proc."""

import time
from pathlib import Path


def living_members(group: int) -> list[int]:
    """Returns the processes of a group but those that only wait to be reaped."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has ended since the folder was listed
                continue
            state, _, of_group = stat.rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                members.append(int(entry.name))
    return members


def is_group_gone(group: int, limit_s: float = 20) -> bool:
    """Returns whether no process of the group is left; a killed one takes a moment to be gone."""
    end = time.monotonic() + limit_s
    while living_members(group):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True

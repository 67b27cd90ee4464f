"""What a lab could leave behind: processes in its namespaces, and devices and names outside of them."""

import os
import subprocess
import time
from pathlib import Path

# To be run as a rank: says its namespaces and leaves a process behind that has a session of its own.
SAY_NAMESPACES = "setsid sleep 600 & echo NAMESPACES $(readlink /proc/self/ns/net /proc/self/ns/mnt /proc/self/ns/pid)"


def namespaces_in(output: str) -> set[str]:
    """Returns the namespaces that `SAY_NAMESPACES` said, such as "net:[4026532000]"."""
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("NAMESPACES ")]
    assert lines, output
    return {name for line in lines for name in line}


def processes_in(namespaces: set[str]) -> list[int]:
    """Returns the processes that are in one of these namespaces; the kernel removes one that nothing is in."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for kind in ("net", "mnt", "pid"):
                try:
                    name = os.readlink(entry / "ns" / kind)
                except OSError:  # it has ended, or is somebody else's
                    continue
                if name in namespaces:
                    found.append(int(entry.name))
                    break
    return found


def are_empty(namespaces: set[str], limit_s: float = 30) -> bool:
    """Returns whether all processes in the namespaces are gone before time is up."""
    end = time.monotonic() + limit_s
    while processes_in(namespaces):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def machine_traces() -> dict[str, list[str]]:
    """Returns the devices, named namespaces and mounts of this machine, as seen from outside of labs."""
    commands = {"devices": ["ip", "-o", "-brief", "link"], "names": ["ip", "netns", "list"]}
    listings = {what: subprocess.check_output(command, text=True).splitlines() for what, command in commands.items()}
    return {**listings, "mounts": Path("/proc/self/mounts").read_text().splitlines()}

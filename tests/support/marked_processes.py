"""Programs of which every process can be found, whatever it has become: by a variable in its environment."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_POLL_S = 0.1


class Program:
    """A Python program that runs in a session of its own, with its output in a file.

    Args:
        arguments: of Python.
        folder: to start in.
    """

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._mark = f"COMMOPT_TEST={uuid.uuid4().hex}"
        self._output = folder / "output.txt"
        name, _, value = self._mark.partition("=")
        paths = (_TESTS, _TESTS.parent)
        environment = {
            known: os.environ[known] for known in ("PATH", "HOME", "LIGHTNING_PACKAGE") if known in os.environ
        }
        environment |= {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1", name: value}
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What all its processes have said so far."""
        return self._output.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Returns those of its processes that run."""
        return marked_processes(self._mark)

    def wait(self, limit_s: float) -> bool:
        """Waits until none of its processes is left; returns whether that was so in time."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def finish(self, limit_s: float) -> int:
        """Returns its status, once none of its processes is left; ends them and fails if that takes too long."""
        try:
            assert self.wait(limit_s), f"{self.processes()} are left: {self.output}"
        finally:
            self.kill()
        return int(self.process.returncode)

    def kill(self) -> None:
        """Ends all of its processes."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def marked_processes(mark: str) -> list[int]:
    """Returns the processes that run and had ``NAME=VALUE`` in their environment when they started."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_marked(entry, mark)]


def _is_marked(entry: Path, mark: str) -> bool:
    try:
        state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX" and mark.encode() in (entry / "environ").read_bytes()
    except OSError:
        return False

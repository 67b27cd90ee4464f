"""The processes of one run of `hangs.py`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

from hang_faults import FAULTS

from lightning_commopt.launch.lab import NetLab
from lightning_commopt.launch.lab.lab import DEVICE, MASTER_PORT

SCRIPT = Path(__file__).with_name("hanging_script.py")
FAULT_STEP = 3
ADD_WRONG_INTERFACE = (
    "ip link add wrong0 type veth peer name wrong1 && ip address add 9.9.9.9/24 dev wrong0"
    " && ip link set wrong0 up && ip link set wrong1 up && export GLOO_SOCKET_IFNAME=wrong0 && "
)
BLOCK_RANK_1 = "ip route add blackhole 10.0.0.2/32 && "


class Devices(NamedTuple):
    """The devices of ranks that are on this host."""

    kind: str  # "cpu" or "cuda"
    is_shared: bool  # all ranks have GPU 0, as hosts of their own


CPU = Devices("cpu", False)


class Job:
    """The processes of one run, with their output in files; all are ended when it is closed.

    Args:
        name: of the fault.
        strategy: "ddp" or "commopt".
        has_monitor: with a `HangMonitor`.
        folder: for everything that the run leaves.
        lab: whose hosts the ranks run on; None for processes of this host.
        where: the devices of ranks.
    """

    def __init__(
        self, name: str, strategy: str, has_monitor: bool, folder: Path, lab: NetLab | None, where: Devices = CPU
    ) -> None:
        self.fault = FAULTS[name]
        self.folder = folder
        self._has_monitor = has_monitor
        self._are_hosts = lab is not None or where.is_shared
        self._mark = f"COMMOPT_RUN={uuid.uuid4().hex}"
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if lab is not None:
            master = {"MASTER_ADDR": lab.addresses[0], "MASTER_PORT": str(MASTER_PORT), "GLOO_SOCKET_IFNAME": DEVICE}
        settings = {
            "FAULT": name,
            "FAULT_RANK": str(self.fault.rank),
            "FAULT_STEP": str(FAULT_STEP),
            "FOLDER": str(folder),
            "STRATEGY": strategy,
            "MONITOR": str(int(has_monitor)),
            "GROUP_TIMEOUT_S": str(self.fault.group_timeout_s),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(self.fault.world_size),
            "LOCAL_WORLD_SIZE": str(1 if self._are_hosts else self.fault.world_size),
            "DEVICE": where.kind,
        }
        self.processes = {
            rank: self._start(rank, name, {**os.environ, **settings, **master}, lab)
            for rank in range(self.fault.world_size)
            if not (name == "absent" and rank == self.fault.rank)
        }

    def _start(self, rank: int, name: str, env: dict[str, str], lab: NetLab | None) -> subprocess.Popen[bytes]:
        key, _, value = self._mark.partition("=")
        local_rank, host_rank = (0, rank) if self._are_hosts else (rank, 0)
        env |= {key: value, "LOCAL_RANK": str(local_rank), "NODE_RANK": str(host_rank)}
        if self._are_hosts:
            env["NCCL_HOSTID"] = f"host{rank}"
        before = {("interface", 1): ADD_WRONG_INTERFACE, ("port", 0): BLOCK_RANK_1}.get((name, rank), "")
        host = () if lab is None else lab.enter(rank)
        with (self.folder / f"rank{rank}.txt").open("wb") as file:
            return subprocess.Popen(
                [*host, "sh", "-c", f"{before}exec {sys.executable} {SCRIPT}"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def outputs(self) -> list[str]:
        """What each rank has said so far."""
        paths = [self.folder / f"rank{rank}.txt" for rank in range(self.fault.world_size)]
        return [path.read_text(errors="replace") if path.exists() else "" for path in paths]

    @property
    def fault_at_s(self) -> float | None:
        """When the fault began, in seconds since the epoch; None if it has not."""
        try:
            return float((self.folder / "fault").read_text())
        except (OSError, ValueError):
            return None

    @property
    def statuses(self) -> dict[str, int | None]:
        """The exit status of each rank; None for one that runs."""
        return {str(rank): process.poll() for rank, process in self.processes.items()}

    def left(self) -> list[int]:
        """Returns the processes of this run that have not ended, workers of dataloaders included.

        Where no monitor ends it, a rank that was stopped is not among them: it cannot end by itself.
        """
        cannot_end = self.fault.is_survivor and not self._has_monitor
        stopped = self.processes[self.fault.rank].pid if cannot_end else None
        started = [process.pid for process in self.processes.values() if process.poll() is None]
        left = [pid for pid in started if pid != stopped]
        return left or [pid for pid in self._alive() if pid != stopped]

    def close(self) -> None:
        """Ends all processes of the run."""
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def _alive(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._owns(entry)]

    def _owns(self, entry: Path) -> bool:
        try:
            state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            is_of_rank = int(session) in (process.pid for process in self.processes.values())
            return state not in "ZX" and (is_of_rank or self._mark.encode() in (entry / "environ").read_bytes())
        except OSError:
            return False


def free_port() -> int:
    """Returns a port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

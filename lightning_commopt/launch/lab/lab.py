"""NetLab: hosts in network namespaces, the links between them, and ranks that run on the hosts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from lightning_commopt.launch.lab.namespaces import Keeper, LabError, find_unshare_options, path_of, run_program
from lightning_commopt.launch.process import run_ranks
from lightning_commopt.text.validation import check_integer, check_positive

DEVICE = "eth0"
"""The network device of every host."""

MASTER_PORT = 29500
"""Where the ranks meet. It is free in every lab, as no other process listens on its hosts."""

_MAX_HOSTS = 254  # addresses of 10.0.0.0/24, without the first and the last
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # tc(8) defines its rates by these factors
_MIN_RATE, _MAX_RATE = 10**5, 10**11  # bits per second; at the lowest, a packet takes a quarter of a second
_MAX_RATE_ELSEWHERE = 10**12  # limit for links that the lab does not create; no network card is as fast
# The smaller burst holds two packets at the rates where it counts. The larger one is `_SLOW_BURST_S` at 1 Gbit/s.
_MIN_BURST_BYTES, _MAX_SLOW_BURST_BYTES = 2**14, 2**18
# A burst of this duration hides that a timer of the kernel is late. The longer one is for up to 1 Gbit/s.
_BURST_S, _SLOW_BURST_S = 0.0005, 0.002
# The limiter passes a packet whole and at once. So packets are limited to what a link would send in this time.
_PACKET_S, _MIN_PACKET_BYTES, _MAX_PACKET_BYTES = 0.001, 2 * 1514, 2**16
# The queue in front of the link holds what it sends in this time, and at least several packets.
_QUEUE_S, _MIN_QUEUE_BYTES = 0.05, 2**18
_CPUS = Path("/sys/devices/system/cpu")
_LIMITER = ("htb", "default", "1")
_ADD_NAMES = 'cp /etc/hosts /run/hosts && printf %s "$1" >> /run/hosts && mount --bind /run/hosts /etc/hosts || true'


def parse_rate(rate: str | None, name: str = "rate", *, is_elsewhere: bool = False) -> int | None:
    """Returns bits per second of a rate in the notation of ``tc``; None for None or "unlimited".

    Args:
        rate: such as "2.5gbit".
        name: name of the option, for the error message.
        is_elsewhere: whether the lab does not create this link. Its rate may then be higher, but not unlimited.

    Raises:
        ValueError: the rate is not in this notation, or is out of range.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    if not is_elsewhere and (rate is None or rate == "unlimited"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate) if isinstance(rate, str) else None
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    max_rate, others = (_MAX_RATE_ELSEWHERE, "") if is_elsewhere else (_MAX_RATE, ", or 'unlimited' or None")
    if not _MIN_RATE <= bits <= max_rate:
        raise ValueError(
            f"{name} must be a number with kbit, mbit or gbit, from 100kbit to {max_rate // 10**9}gbit{others},"
            f" got {rate!r}"
        )
    return bits


def list_cores() -> list[int]:
    """Returns the numbers of the cores that this process may use, second threads of the same core last."""
    num_threads: Counter[str] = Counter()
    order = []
    for core in sorted(os.sched_getaffinity(0)):
        siblings = str(core)
        with suppress(OSError):
            siblings = (_CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        order.append((num_threads[siblings], core))
        num_threads[siblings] += 1
    return [core for _, core in sorted(order)]


class NetLab:
    """Hosts on one machine, each with a link of a limited rate each way. To be used in a ``with`` statement.

    A host is a network namespace with a loopback device and `DEVICE`. Two hosts are the ends of one pair of devices;
    any other number is connected by a bridge. Hosts share the machine's files, except an empty ``/run``. A lab is
    invisible from outside, so that labs do not disturb each other, and ends with the thread that opened it, even by
    SIGKILL.

    Args:
        num_hosts: number of hosts, from 1 to 254.
        rate: rate of each link in each direction, see `parse_rate`; None for no limit.

    Raises:
        ValueError: an argument is out of range.
        LabError: this machine cannot make the lab, see `lightning_commopt.launch.lab.why_not`; raised on entering.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if isinstance(num_hosts, bool) or not isinstance(num_hosts, int) or not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts must be an integer from 1 to {_MAX_HOSTS}, got {num_hosts!r}")
        self.num_hosts = num_hosts
        self._bits_per_s = parse_rate(rate)
        self._unshare_options: tuple[str, ...] = ()
        self._keeper: Keeper | None = None

    @property
    def addresses(self) -> list[str]:
        return [f"10.0.0.{host + 1}" for host in range(self.num_hosts)]

    def __enter__(self) -> NetLab:
        assert self._keeper is None, "this lab is open already"
        self._unshare_options = find_unshare_options()
        self._keeper = Keeper(self._unshare_options)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Removes hosts and links; may be called again."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        pin_to_cores: bool = False,
        timeout_s: float | None = None,
        on_output: Callable[[int, bytes], None] = lambda rank, output: None,
    ) -> list[str]:
        """Runs a command as every rank of a job and waits for all of them.

        Each rank has the variables of ``torchrun`` in its environment, and the device for gloo and NCCL. No process
        that was started here, or by those, is left when this returns or raises.

        Args:
            command: program and arguments.
            ranks_per_host: number of ranks on each host.
            environment: further variables, which take precedence.
            pin_to_cores: give each rank one core, round-robin in the order of `list_cores`, and one OpenMP thread.
            timeout_s: seconds the ranks may take; None for no limit.
            on_output: called with a rank and a part of its standard output and error.

        Returns:
            The output of each rank, by rank.

        Raises:
            RankError: a rank failed, or exceeded the limit.
            LabError: the lab is not open.
            ValueError: an argument is out of range.
        """
        check_integer("ranks_per_host", ranks_per_host, at_least=1)
        if timeout_s is not None:
            check_positive("timeout_s", timeout_s)
        keeper, cores = self._open_keeper(), list_cores()
        with closing(Keeper(self._unshare_options, within=keeper)) as tree:
            programs = []
            for rank in range(self.num_hosts * ranks_per_host):
                enter = tree.enter(f"host{rank // ranks_per_host}", os.getcwd())
                pin = (path_of("taskset"), "--cpu-list", str(cores[rank % len(cores)])) if pin_to_cores else ()
                variables = self._variables(rank, ranks_per_host, pin_to_cores)
                programs.append(((*enter, *pin, *command), {**os.environ, **variables, **(environment or {})}))
            return run_ranks(programs, on_output=on_output, timeout_s=timeout_s)

    def change_rate(self, rate: str) -> None:
        """Changes the rate of each link in each direction; ranks may be running.

        Raises:
            ValueError: it is not a rate for `parse_rate`, or not a limit.
            LabError: the lab is not open.
        """
        bits_per_s = parse_rate(rate)
        if bits_per_s is None:
            raise ValueError(f"rate must be a limit such as '1gbit', got {rate!r}")
        self._open_keeper()
        is_new, self._bits_per_s = self._bits_per_s is None, bits_per_s
        for host in range(self.num_hosts):
            self._limit("-n", f"host{host}", device=DEVICE, is_new=is_new)
            if self.num_hosts != 2:
                self._limit(device=f"port{host}", is_new=is_new)

    def enter(self, host: int) -> tuple[str, ...]:
        """Returns the prefix with which a command runs on a host, in this process's folder.

        The caller must end the process of that command.

        Raises:
            LabError: the lab is not open.
        """
        return self._open_keeper().enter(f"host{host}", os.getcwd())

    def _open_keeper(self) -> Keeper:
        if self._keeper is None:
            raise LabError("the network lab is not open: use it in a with statement")
        return self._keeper

    def _variables(self, rank: int, ranks_per_host: int, is_pinned: bool) -> dict[str, str]:
        host, local_rank = divmod(rank, ranks_per_host)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_hosts * ranks_per_host),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "NODE_RANK": str(host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "NCCL_SOCKET_IFNAME": DEVICE,
            **({"OMP_NUM_THREADS": "1"} if is_pinned else {}),
        }

    def _connect(self) -> None:
        # ip keeps the names of network namespaces as files in /run. This mount hides them from the rest of the machine.
        self._run_in_lab("mount", "-t", "tmpfs", "tmpfs", "/run")
        for host in range(self.num_hosts):
            self._run_in_lab("ip", "netns", "add", f"host{host}")
        if self.num_hosts == 2:
            self._run_in_lab(
                "ip", "-n", "host0", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", "host1"
            )
        else:
            self._add_bridge()
        for host, address in enumerate(self.addresses):
            name = f"host{host}"
            self._limit("-n", name, device=DEVICE)
            self._run_in_lab("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                self._run_in_lab("ip", "-n", name, "link", "set", device, "up")
        self._name_addresses()

    def _name_addresses(self) -> None:
        """Gives each address a name, also in its IPv6 form, because torch warns of each peer without a name."""
        names = "".join(
            f"{prefix}{address} host{host}\n"
            for host, address in enumerate(self.addresses)
            for prefix in ("", "::ffff:")
        )
        self._run_in_lab("sh", "-c", _ADD_NAMES, "sh", names)

    def _add_bridge(self) -> None:
        self._run_in_lab("ip", "link", "add", "bridge0", "type", "bridge")
        self._run_in_lab("ip", "link", "set", "bridge0", "up")
        for host in range(self.num_hosts):
            port = f"port{host}"
            self._run_in_lab("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", f"host{host}")
            # This limits what the host receives. Its own device limits what it sends.
            self._limit(device=port)
            self._run_in_lab("ip", "link", "set", port, "master", "bridge0", "up")

    def _limit(self, *options: str, device: str, is_new: bool = True) -> None:
        """Limits the rate at which a device sends; without ``is_new`` it changes the existing limit."""
        if self._bits_per_s is None:
            return
        bytes_per_s = self._bits_per_s / 8
        slow_burst = min(_MAX_SLOW_BURST_BYTES, bytes_per_s * _SLOW_BURST_S)
        burst = str(round(max(_MIN_BURST_BYTES, slow_burst, bytes_per_s * _BURST_S)))
        shape = ("rate", f"{self._bits_per_s}bit", "burst", burst, "cburst", burst, "quantum", "65536")
        queue = str(round(_MIN_QUEUE_BYTES + bytes_per_s * _QUEUE_S))
        if is_new:
            packet = str(round(min(_MAX_PACKET_BYTES, max(_MIN_PACKET_BYTES, bytes_per_s * _PACKET_S))))
            self._run_in_lab("ip", *options, "link", "set", "dev", device, "gso_max_size", packet)
            self._run_in_lab("tc", *options, "qdisc", "replace", "dev", device, "root", "handle", "1:", *_LIMITER)
        self._run_in_lab(
            "tc", *options, "class", "replace", "dev", device, "parent", "1:", "classid", "1:1", "htb", *shape
        )
        self._run_in_lab("tc", *options, "qdisc", "replace", "dev", device, "parent", "1:1", "bfifo", "limit", queue)

    def _run_in_lab(self, name: str, *arguments: str) -> None:
        run_program(*self._open_keeper().enter(), path_of(name), *arguments)

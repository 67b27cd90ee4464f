"""A delay on the link between two hosts of the network lab, also where the kernel has no netem.

On each host runs a process that is the other end of a TUN device. What programs send to the device waits there for the
delay and then crosses the lab's link in a UDP packet, so that the link's rate and queue hold for it. Both directions
are delayed; a round trip takes twice the delay.
"""

import argparse
import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_commopt.launch.lab import NetLab

DEVICE = "wan0"
_PORT = 4789
_LINK_MTU = 9000  # large, because every packet takes time of the cores that the ranks compute on
_MTU = _LINK_MTU - 28  # without the headers of IP and UDP
_QUEUE_BYTES = 1 << 23  # above the lab's own queue, which so drops packets as a router does
# Of linux/if_tun.h and asm/socket.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _SO_SNDBUFFORCE = 0x400454CA, 0x0001, 0x1000, 32


@contextlib.contextmanager
def delayed_link(lab: NetLab, delay_s: float) -> Iterator[dict[str, str]]:
    """Delays packets between two hosts; yields the environment with which ranks use the delayed devices.

    Args:
        lab: an open lab with two hosts.
        delay_s: of each packet; without one, ranks use the lab's own devices.
    """
    if not delay_s:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        for host in range(2):
            command = [*lab.enter(host), sys.executable, str(Path(__file__).resolve()), str(host), str(delay_s)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert process.stdout is not None
            if not process.stdout.readline():
                sys.exit(f"the delayed link of host {host} could not be made")
        yield {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": DEVICE}


def _address(host: int) -> str:
    return f"10.1.0.{host + 1}"


def forward(host: int, delay_s: float) -> None:
    """Makes the device of a host and forwards its packets until the process is terminated."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for arguments in (
        f"link set eth0 mtu {_LINK_MTU}",
        f"address add {_address(host)}/24 dev {DEVICE}",
        f"link set {DEVICE} mtu {_MTU} up",
    ):
        subprocess.run(["ip", *arguments.split()], check=True)
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _QUEUE_BYTES)
    link.bind((f"10.0.0.{host + 1}", _PORT))
    link.connect((f"10.0.0.{2 - host}", _PORT))
    link.setblocking(False)
    print("ready", flush=True)
    both: list[int | socket.socket] = [device, link]
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(both, [], [], timeout_s)
        if device in readable:
            waiting.append((time.monotonic() + delay_s, os.read(device, _LINK_MTU)))
        if link in readable:
            # The other end may not listen yet, and a full queue drops the packet, as on any network.
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                os.write(device, link.recv(_LINK_MTU))
        while waiting and waiting[0][0] <= time.monotonic():
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                link.send(waiting.popleft()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host", type=int)
    parser.add_argument("delay_s", type=float)
    forward(**vars(parser.parse_args()))

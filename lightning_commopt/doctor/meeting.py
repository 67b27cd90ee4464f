"""How ranks that a launcher has started meet, to compare what they are like; each step has a limit."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lightning_commopt.doctor.facts import Facts
from lightning_commopt.launch.ports import try_port

_RETRY_S = 0.2


class MeetingError(RuntimeError):
    """Ranks cannot meet; the message names the peer and the port, and what is probably in the way."""


def meet(facts: Facts, *, limit_s: float, environment: Mapping[str, str] = os.environ) -> list[Facts]:
    """Returns the facts of all ranks, in their order. All ranks must call it.

    Args:
        facts: of this rank.
        limit_s: seconds that all of it may take.
        environment: with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as launchers set them.

    Raises:
        MeetingError: rank 0 cannot be reached, or a rank does not come.
    """
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_host = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:
        check_port(host, port, limit_s=limit_s)
    try:
        store = dist.TCPStore(
            host, port, world_size, is_host, timeout=timedelta(seconds=limit_s), wait_for_workers=False
        )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("commopt/doctor", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limit_s),
        )
        everybody: list[Facts | None] = [None] * world_size
        dist.all_gather_object(everybody, facts)
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        raise MeetingError(
            f"rank {rank} on {facts.host} found {host}:{port}, but the ranks did not meet within {limit_s:g} s:"
            f" {str(error).splitlines()[0]}. Do all {world_size} ranks run? Can each host reach the others at any port?"
        ) from error
    return [each for each in everybody if each is not None]


def check_port(host: str, port: int, *, limit_s: float) -> None:
    """Tries whether something listens at a port, or will within the limit.

    Raises:
        MeetingError: it cannot be reached; the message tells a name that is unknown, a port where nothing listens, and
            a connection without an answer apart.
    """
    deadline = time.monotonic() + limit_s
    while True:
        failure = try_port(host, port, limit_s=max(0.1, deadline - time.monotonic()))
        if failure is None:
            return
        if failure.kind != "refused" or time.monotonic() > deadline:
            raise MeetingError(failure.message)
        time.sleep(_RETRY_S)

"""Network interfaces that gloo or NCCL would take, and should not, where there are several hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from lightning_commopt.doctor.facts import Facts
from lightning_commopt.findings import Finding

_OF_ONE_HOST = ("docker", "lo", "virbr")


def find_wrong_interfaces(facts: Facts) -> Iterator[Finding]:
    """Finds interfaces that other hosts cannot reach, or that are not there."""
    there = ", ".join(f"{each.name} {each.address}" for each in facts.interfaces) or "none"
    named = facts.environment.get("GLOO_SOCKET_IFNAME")
    if named and facts.gloo_interface is None:
        yield Finding(
            severity="error",
            where=facts.host,
            what=f"GLOO_SOCKET_IFNAME={named}, and there is no such interface with an address; there are: {there}",
            advice="set it to the interface between the hosts",
        )
    elif not named and (facts.address is None or ipaddress.ip_address(facts.address).is_loopback):
        yield Finding(
            severity="error",
            where=facts.host,
            what=f"the host's name resolves to {facts.address or 'nothing'}, which other hosts cannot reach",
            advice="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts, or mend"
            " /etc/hosts",
        )
    named = facts.environment.get("NCCL_SOCKET_IFNAME")
    if named and facts.nccl_interface is None:
        yield Finding(
            severity="error",
            where=facts.host,
            what=f"NCCL_SOCKET_IFNAME={named} leaves no interface; there are: {there}",
            advice="set it to the interface between the hosts, or to what it should leave out, such as ^docker,lo",
        )
    elif facts.gpus and facts.nccl_interface is not None and facts.nccl_interface.name.startswith(_OF_ONE_HOST):
        yield Finding(
            severity="error",
            where=facts.host,
            what=f"NCCL would take {facts.nccl_interface.name}, which other hosts cannot reach; there are: {there}",
            advice="set NCCL_SOCKET_IFNAME to the interface between the hosts",
        )

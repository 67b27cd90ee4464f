"""What the doctor finds, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from lightning_commopt.commands.doctor.facts import Facts
from lightning_commopt.text import findings
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.terminal import print_text

_HOSTS_SHOWN = 8


def print_findings(found: Sequence[findings.Finding], everybody: Sequence[Facts], console: Console) -> None:
    """Prints findings with what to do, the worst first, and then what was not looked at."""
    hosts = list(dict.fromkeys(facts.host for facts in everybody))
    console.print(f"{len(everybody)} rank(s) on {len(hosts)} host(s)", highlight=False)
    if len(hosts) > 1:
        _print_interfaces(everybody, console)
    if found:
        is_broken = found[0].severity == "error"
        console.print("Fix this first:" if is_broken else "Nothing must be fixed. It may be worth it:")
        findings.print_findings(found, console)
    else:
        console.print("Nothing is wrong as far as can be seen before a run.")
    for each in list_unchecked(everybody):
        print_text(f"not checked: {each}", console, "dim")


def _print_interfaces(everybody: Sequence[Facts], console: Console) -> None:
    """Prints what gloo and NCCL would take on each host, hosts alike together."""
    alike: dict[str, list[str]] = {}
    for facts in {each.host: each for each in reversed(everybody)}.values():
        taken = {"gloo": facts.gloo_interface, "NCCL": facts.nccl_interface}
        text = ", ".join(f"{user} would take {'none' if each is None else each.name}" for user, each in taken.items())
        alike.setdefault(text, []).insert(0, facts.host)
    for text, hosts in alike.items():
        print_text(f"{list_some(hosts, _HOSTS_SHOWN)}: {text}", console)


def list_unchecked(everybody: Sequence[Facts]) -> list[str]:
    """Returns what was not looked at, and why."""
    hosts = {facts.host: facts for facts in reversed(everybody)}
    found = []
    if len(hosts) == 1:
        found.append("connections to other hosts: torchrun, srun or --hosts a,b on each host")
    if without := _names(facts for facts in hosts.values() if facts.no_topology is not None):
        found.append(f"links between GPUs: no GPU on {without}")
    if without := _names(facts for facts in hosts.values() if not facts.ports):
        found.append(f"InfiniBand, RoCE and GPUDirect RDMA: no adapter in /sys/class/infiniband of {without}")
    elif not any(facts.environment.get("NCCL_COLLNET_ENABLE") == "1" for facts in everybody):
        found.append("SHARP: NCCL_COLLNET_ENABLE is not 1")
    return found


def _names(some: Iterator[Facts]) -> str:
    names = [facts.host for facts in some][::-1]
    return list_some(names)

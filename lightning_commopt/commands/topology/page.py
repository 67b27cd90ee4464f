"""A topology as a page: one HTML file that asks no server for anything."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_commopt.commands.topology.expectations import expect_all_reduce
from lightning_commopt.commands.topology.machine import Machine, cpus_text
from lightning_commopt.commands.topology.rings import find_ring
from lightning_commopt.commands.topology.summary import by_link, by_node, gpu_pairs, nic_pairs
from lightning_commopt.text.findings import Finding


def write_page(machine: Machine, findings: list[Finding], path: Path) -> None:
    """Writes the page.

    Args:
        machine: what it shows.
        findings: about it.
        path: of the file.

    Raises:
        OSError: it cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("lightning_commopt.commands.topology", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = [("between GPUs", by_link(gpu_pairs(machine))), ("between GPU and NIC", by_link(nic_pairs(machine)))]
    page = environment.get_template("topology.html").render(
        machine=machine,
        findings=findings,
        names=list(dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.name is not None)),
        nodes=by_node(machine),
        columns=[*(gpu.label for gpu in machine.gpus), *(nic.label for nic in machine.nics)],
        nic_names={nic.label: nic.name for nic in machine.nics},
        rows=[(title, pairs[0], pairs) for title, group in groups for pairs in group.values()],
        ring=find_ring(machine),
        all_reduce=expect_all_reduce(machine),
        cpus_text=cpus_text,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")

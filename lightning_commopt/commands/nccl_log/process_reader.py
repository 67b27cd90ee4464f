"""Reads messages that hold for a process: its version, network and environment."""

from __future__ import annotations

import re

from lightning_commopt.commands.nccl_log import grammar
from lightning_commopt.commands.nccl_log.facts import Fact, Process
from lightning_commopt.commands.nccl_log.lines import Message

_NOTES = {
    "no_ib": ("NET/IB : No device found", "NET/IB: No device found"),
    "no_ibverbs": ("Failed to open libibverbs.so", "NET/IB : Failed to open libibverbs"),
    "no_plugin": ("NET/Plugin : No plugin found", "NET/Plugin: Could not find", "NET/Plugin : Plugin load"),
    "no_open": ("NET/IB : Unable to open device",),
    "ofi": ("NET/OFI ",),
    "dmabuf": ("DMA-BUF is available on GPU device",),
    "p2p_disabled": ("P2P is disabled between",),
    "p2p_refused": ("Could not enable P2P between", "P2P not supported between"),
}
_BEGINNINGS = re.compile(
    r"NCCL_|Bootstrap|NET|Using (?:network|internal N|external N)|[NR]CCL v|cudaD|DMA-BUF|GPU Direct|Failed to open lib"
    r"|P2P|Could not enable P2P|[\w/]+\.(?:cc|cu|h):"
)

_ABORTED = re.compile(r"\S*socket\.cc:\d+ -> 3\b")  # sockets fail so once the communicator is being aborted


def read_process_line(process: Process, message: Message) -> bool:
    """Adds what a message says of a process.

    Args:
        process: changed.
        message: a line of ``NCCL INFO`` or ``NCCL WARN``.

    Returns:
        Whether the message was of this kind.
    """
    text = message.text
    if not _BEGINNINGS.match(text):
        return False
    for name, beginnings in _NOTES.items():
        if text.startswith(beginnings):
            process.notes.setdefault(name, message.line)
            return True
    if found := grammar.GDR.search(text):
        state = "gdr_enabled" if found[1].lower().startswith("enable") else "gdr_disabled"
        process.notes.setdefault(state, message.line)
        process.gdr[found[2] or found[3]] = message.line
        return True
    if found := grammar.FAILED_AT.match(text):
        if not _ABORTED.match(text):
            process.failed_at = process.failed_at or Fact(found[1], message.line)
        return True
    if "disabling GDR" in text:
        process.notes.setdefault("gdr_disabled", message.line)
        return True
    return message.is_whole and _read_value(process, message)


def _read_value(process: Process, message: Message) -> bool:
    """Adds a value; one that is cut off would be another value."""
    text, line = message.text, message.line
    if text.startswith("NCCL_") and (found := grammar.SETTING.match(text)):
        process.settings.setdefault(found[1], Fact(found[2], line))
    elif found := grammar.BOOTSTRAP.match(text):
        process.bootstrap = process.bootstrap or Fact(f"{found[1]}:{found[2]}", line)
        process.interfaces.setdefault(found[1], Fact(found[2], line))
        _read_interfaces(process, message)
    elif text.startswith("NET/Socket : Using"):
        _read_interfaces(process, message)
    elif text.startswith(("NET/IB : Using", "NET/IB: Using", "NET/IB: [")):
        for name in grammar.NIC.findall(text):
            process.nics.setdefault(name, line)
    elif found := grammar.NETWORK.match(text):
        process.network = Fact(found[1].removeprefix("Network "), line)
    elif found := grammar.VERSION.match(text):
        process.version = Fact(f"{found[1]} (RCCL)" if text.startswith("R") else found[1], line)
    elif found := grammar.DRIVER.match(text):
        process.driver = Fact(found[1], line)
    else:
        return False
    return True


def _read_interfaces(process: Process, message: Message) -> None:
    for name, address in grammar.INTERFACE.findall(message.text):
        process.interfaces.setdefault(name, Fact(address, message.line))

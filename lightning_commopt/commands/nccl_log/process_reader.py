"""Reads messages that hold for a process: its version, network and environment."""

from __future__ import annotations

from lightning_commopt.commands.nccl_log import grammar
from lightning_commopt.commands.nccl_log.facts import Fact, Process
from lightning_commopt.commands.nccl_log.sources import Message

_NOTES = {
    "no_ib": ("NET/IB : No device found", "NET/IB: No device found"),
    "no_ibverbs": ("Failed to open libibverbs.so",),
    "no_plugin": ("NET/Plugin : No plugin found", "NET/Plugin: Could not find", "NET/Plugin : Plugin load"),
    "dmabuf": ("DMA-BUF is available on GPU device",),
}
_GDR_NOTES = {"GPU Direct RDMA Disabled": "gdr_disabled", "GPU Direct RDMA Enabled": "gdr_enabled"}


def read_process_line(process: Process, message: Message) -> bool:
    """Adds what a message says of a process.

    Args:
        process: changed.
        message: a line of ``NCCL INFO``.

    Returns:
        Whether the message was of this kind.
    """
    text, line = message.text, message.line
    for name, beginnings in _NOTES.items():
        if text.startswith(beginnings):
            process.notes.setdefault(name, line)
            return True
    for part, name in _GDR_NOTES.items():
        if part in text:
            process.notes.setdefault(name, line)
            return True
    return message.is_whole and _read_value(process, message)


def _read_value(process: Process, message: Message) -> bool:
    """Adds a value; one that is cut off would be another value."""
    text, line = message.text, message.line
    if text.startswith("NCCL_") and (found := grammar.SETTING.match(text)):
        process.settings.setdefault(found[1], Fact(found[2], line))
    elif text.startswith("Bootstrap") and (found := grammar.BOOTSTRAP.match(text)):
        process.bootstrap = process.bootstrap or Fact(f"{found[1]}:{found[2]}", line)
    elif text.startswith("NET/Socket : Using"):
        for name, address in grammar.INTERFACE.findall(text):
            process.interfaces.setdefault(name, Fact(address, line))
    elif text.startswith(("NET/IB : Using", "NET/IB: Using")):
        for name in grammar.NIC.findall(text):
            process.nics.setdefault(name, line)
    elif found := grammar.NETWORK.match(text):
        process.network = Fact(found[1], line)
    elif found := grammar.VERSION.match(text):
        process.version = Fact(found[1], line)
    elif found := grammar.DRIVER.match(text):
        process.driver = Fact(found[1], line)
    else:
        return False
    return True

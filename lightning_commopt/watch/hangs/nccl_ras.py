"""Queries NCCL's RAS threads: which ranks of a job are missing, and how many collectives each has called.

Protocol: lines of text over TCP. Each command has one line as its answer, but STATUS has the rest of the connection.
Since NCCL 2.24, with JSON since 2.28.7; older versions answer ``SET FORMAT`` with an error and continue.

Source: NVIDIA/nccl, ``src/ras``: ``client.cc``, ``client_support.cc``, ``ras_internal.h``; ``troubleshooting/ras.rst``
of its user guide.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping
from typing import Any

from lightning_commopt.watch import times

_HOST, _PORT = "localhost", 28028
"""Address at which NCCL listens unless ``NCCL_RAS_ADDR`` is set."""

_PROTOCOL = 2
"""The version of NCCL's protocol that this module speaks."""

_MAX_BYTES, _MAX_LINE_BYTES = 16 * 2**20, 256
"""Maximum length of the status, and of the short answers before it. It is a judgement: far more than a table of some
thousand ranks needs, and little if another program listens at the port."""


class RasError(RuntimeError):
    """NCCL has not answered; the message has the reason."""


def ras_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns where NCCL listens, according to ``NCCL_RAS_ENABLE`` and ``NCCL_RAS_ADDR``.

    Raises:
        RasError: RAS is switched off, or the address is invalid.
    """
    if environment.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        raise RasError("NCCL_RAS_ENABLE is 0")
    text = environment.get("NCCL_RAS_ADDR") or f"{_HOST}:{_PORT}"
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise RasError(f"NCCL_RAS_ADDR must be an address with a port, got {text!r}")
    return host.strip("[]"), int(port)


def ask_ras(address: tuple[str, int], limit_s: float) -> dict[str, Any] | str:
    """Returns the status of the job that listens at an address.

    Args:
        address: where NCCL listens, see `ras_address`.
        limit_s: seconds for each answer. NCCL may take five more than the timeout for its other processes, so with
            fewer than eight there may be no answer if one of them is stuck.

    Returns:
        NCCL's JSON, loaded, or the text of a version without JSON.

    Raises:
        RasError: nothing listens there, it is not NCCL, or it did not answer in time.
    """
    address_text = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=limit_s) as connection, connection.makefile("rb") as reader:

            def ask(command: str) -> str:
                connection.sendall(f"{command}\n".encode())
                return reader.readline(_MAX_LINE_BYTES).decode("utf-8", "replace").strip()

            if not ask(f"CLIENT PROTOCOL {_PROTOCOL}").upper().startswith("SERVER PROTOCOL "):
                raise RasError(f"what listens at {address_text} is not NCCL")
            ask(f"TIMEOUT {max(1, math.floor(limit_s - times.RAS_EXTRA_S))}")
            is_json = ask("SET FORMAT json") == "OK"
            connection.sendall(b"VERBOSE STATUS\n")
            text = reader.read(_MAX_BYTES).decode("utf-8", "replace")
    except ConnectionRefusedError as error:
        raise RasError(f"nothing listens at {address_text}") from error
    except OSError as error:
        reason = f" within {limit_s:g} s" if isinstance(error, TimeoutError) else f": {error}"
        raise RasError(f"no answer from {address_text}{reason}") from error
    try:
        status = json.loads(text) if is_json else text
    except (ValueError, RecursionError):
        status = text
    return status if isinstance(status, dict) and status else text

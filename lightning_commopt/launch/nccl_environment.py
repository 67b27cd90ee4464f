"""Mistakes in the environment variables of NCCL that a user has set."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher, get_close_matches

from lightning_commopt.launch.nccl_variables import PREFIX, Variable, nccl_variables
from lightning_commopt.text.findings import Finding

# torch renamed its own; the old names still work, with a warning, or not at all.
_RENAMED_BY_TORCH = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_TRACE_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}
_TIME_LIMIT = "the time limit of collectives is the process group's: CommOptDDP(timeout=timedelta(minutes=10))"
_NOT_NCCL_VARIABLES = {
    "NCCL_TIMEOUT": _TIME_LIMIT,
    "NCCL_COMM_TIMEOUT": _TIME_LIMIT,
    "NCCL_LOG_LEVEL": "NCCL's log is NCCL_DEBUG=INFO",
    "NCCL_VERBOSE": "NCCL's log is NCCL_DEBUG=INFO",
    "NCCL_INTERFACE": "interfaces are NCCL_SOCKET_IFNAME",
    "NCCL_IFNAME": "interfaces are NCCL_SOCKET_IFNAME",
}
# Set by containers, build systems and tests; NCCL does not read them.
_THIRD_PARTY = re.compile(
    r"NCCL_(VERSION|HOME|ROOT|DIR|PATH|PREFIX|INCLUDE|LIB|LIBRARY|LIBRARIES|SRC|VER|TESTS?|CUDA)(_\w+)?$"
    r"|NCCL_(OFI|FASTRAK|GPUDIRECTTCPX|TCPX|SHIM|SHIMNET|UCX|SHARP|MSCCL|RCCL|MPI|EXT|PLUGIN|IBEXT|AWS)_\w+$"
)
_NEAR = 0.8


def find_mistakes(
    environment: Mapping[str, str], *, version: tuple[int, ...] | None = None, known: Collection[str] = ()
) -> list[Finding]:
    """Looks for misspelt, obsolete and never-existing variables of NCCL, and for values that it does not take.

    Args:
        environment: all variables of a process.
        version: of the NCCL that will read them; None for the newest.
        known: further names that this NCCL has, which its guide does not.

    Returns:
        The mistakes, by name; empty where there are none.
    """
    return [
        Finding(severity="error", what=message, advice=f"correct or unset {name}")
        for name, value in sorted(environment.items())
        if (message := _message(name, value, version, known)) is not None
    ]


def _message(name: str, value: str, version: tuple[int, ...] | None, known: Collection[str]) -> str | None:
    variables = nccl_variables()
    if name in variables:
        return _misuse(variables[name], value, version)
    if name in _RENAMED_BY_TORCH:
        return f"{name} is torch's, which calls it {_RENAMED_BY_TORCH[name]} now"
    if name in _NOT_NCCL_VARIABLES:
        return f"{name} is no variable of NCCL: {_NOT_NCCL_VARIABLES[name]}"
    for variable in variables.values():
        if name == variable.former_name:
            return f"{name} was renamed: it is {variable.name} now"
    if name in known or _THIRD_PARTY.match(name):
        return None
    if name.startswith(PREFIX):
        return f"{name} is no variable of NCCL{_near(name, [*variables, *known])}"
    return _misspelt_prefix(name, variables)


def _misuse(variable: Variable, value: str, version: tuple[int, ...] | None) -> str | None:
    name = variable.name
    if variable.removed_in is not None and (version is None or version >= parse_version(variable.removed_in)):
        return f"{name} has no effect since NCCL {variable.removed_in}, which removed it"
    if variable.since is not None and version is not None and version < parse_version(variable.since):
        return f"{name} has no effect before NCCL {variable.since}; this is {'.'.join(map(str, version))}"
    if not variable.accepts(value):
        return f"{name} must be {variable.allowed}, got {value!r}"
    return None


def _near(name: str, names: list[str]) -> str:
    near = get_close_matches(name.upper(), names, n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def _misspelt_prefix(name: str, variables: Mapping[str, Variable]) -> str | None:
    """Finds a variable whose prefix is wrong, such as NCLL_DEBUG, nccl_debug or NCCLDEBUG."""
    prefix = re.match(r"[A-Za-z]{3,5}", name)
    if prefix is None or SequenceMatcher(None, prefix[0].upper()[:4], "NCCL").ratio() < 0.75:
        return None
    near = get_close_matches(name.upper(), variables, n=1, cutoff=_NEAR)
    return f"{name} is no variable of NCCL; did you mean {near[0]}?" if near else None


def parse_version(text: str) -> tuple[int, ...]:
    """Returns a version as numbers.

    >>> parse_version("2.29U1")
    (2, 29)
    """
    return tuple(int(part) for part in re.findall(r"\d+", text)[: text.count(".") + 1])

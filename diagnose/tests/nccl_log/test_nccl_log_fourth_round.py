"""nccl-log on logs of a fourth round: kept by Docker and clouds."""

from __future__ import annotations

import json

import pytest

from commopt_diagnose.nccl_log.summary import extras_of, networks_of
from diagnose_support.nccl_sample_logs import HEALTHY, read, told, watchdog


def _collected(kind: str, line: str) -> str:
    """Returns a line as something that collects logs keeps it."""
    if kind == "docker":  # whose JSON has no < and >
        kept = json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-03-18T11:13:09.1Z"})
        return kept.replace("<", r"\u003c").replace(">", r"\u003e")
    if kind == "cloud":
        return json.dumps({"insertId": "a1", "resource": {"labels": {"pod": "w-0"}}, "textPayload": line})
    if kind == "pretty":
        return f'    "message": {json.dumps(line)},'
    return f'2026-03-18T11:13:09Z,w-0,"{line}"'


@pytest.mark.parametrize("kind", ["docker", "cloud", "pretty", "csv"])
def test_logs_kept_as_json_or_csv_are_read_as_they_were_written(kind: str) -> None:
    """What follows the message in its line must not become a part of it."""
    lines = [*HEALTHY.text().splitlines(), watchdog(0, 7).strip(), '[rank3]: KeyError: a "b"']
    plain, kept = read(*lines), read(*(_collected(kind, line.replace('"', "'")) for line in lines))
    [before], [after] = plain.communicators, kept.communicators
    assert networks_of(after) == ["IB"]
    assert extras_of(after) == extras_of(before)
    assert after.machines == before.machines
    assert [connection.path for connection in after.connections] == [c.path for c in before.connections]
    assert [process.interfaces.keys() for process in kept.processes] == [{"eth0"}] * len(kept.processes)
    assert [timeout.call for timeout in kept.timeouts.values()] == [timeout.call for timeout in plain.timeouts.values()]
    assert [warning.rank for warning in kept.warnings] == [3]


def test_quotes_in_a_line_that_nothing_has_quoted() -> None:
    line = told('NCCL_TOPO_FILE set by environment to "a", "b"')
    [process] = read(line).processes
    assert process.settings["NCCL_TOPO_FILE"].value == '"a", "b"'

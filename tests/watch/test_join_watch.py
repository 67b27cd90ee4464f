"""Ranks that wait for others while the process group is made say for whom, and why."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_commopt import CommOptDDP
from lightning_commopt.launch.interfaces import Interface, Listening, PortFailure, find_listening, list_interfaces
from lightning_commopt.watch import join_watch, times
from lightning_commopt.watch.join_texts import Arrival, activity_text, find_misplaced, missing_text, unconnected_text
from lightning_commopt.watch.join_watch import JoinWatch
from support.ranks import run_ranks, run_ranks_or_raise
from support.strategy_models import Tiny, loader, trainer

_LIMIT_S = 120
_STORE = "10.0.0.1:29500"


def _arrival(rank: int, address: str | None = None, **changes: object) -> Arrival:
    address = address or f"10.0.0.{rank + 1}/24"
    interfaces = {"lo": "127.0.0.1/8", "eth0": f"10.0.0.{rank + 1}/24"}
    listening = Listening(variable="GLOO_SOCKET_IFNAME", value=None, interface="eth0", address=address)
    arrival = Arrival(rank=rank, host=f"h{rank}", network=str(rank), listening=listening, interfaces=interfaces)
    return replace(arrival, **changes)  # type: ignore[arg-type]


_NOWHERE = Listening(variable="NCCL_SOCKET_IFNAME", value="eth7", interface=None, address=None)
_TWO_NETWORKS = {"wrong0": "9.9.9.9/24", "eth0": "10.0.0.1/24"}
_UNCONNECTED: dict[str, tuple[list[Arrival], list[int], list[int], str | None]] = {
    **{
        name: ([_arrival(0), _arrival(1, address), _arrival(2)], [2], odd, "10.0.0.1")
        for name, address, odd in (
            ("loopback", "127.0.1.1/8", [1]),
            ("another network", "9.9.9.9/24", [1]),
            ("the same address twice", "10.0.0.1/24", [0, 1]),
            ("addresses that fit", "10.0.0.77/24", []),
        )
    },
    "of two networks that of the store": (
        *([_arrival(0, "9.9.9.9/24", interfaces=_TWO_NETWORKS), _arrival(1)], [], [0], "10.0.0.1"),
    ),
    "an interface that is not there": ([_arrival(0), _arrival(1, listening=_NOWHERE, network="0")], [], [1], None),
}
"""Who has come, who of them has connected, who is blamed, and the address of the store."""


def test_ranks_that_are_waited_for_are_named(golden: Callable[[str, str], None]) -> None:
    """If it fails, one looks for the wrong rank, or the wrong interface, or a misspelt one is taken for a firewall."""
    blocks = [
        missing_text(_STORE, [_arrival(0), _arrival(1)], [2, 3], {}),
        missing_text(_STORE, [_arrival(0)], [1], {}),
    ]
    for name, (arrivals, connected, odd, store) in _UNCONNECTED.items():
        assert [arrival.rank for arrival in find_misplaced(arrivals, store)[0]] == odd
        blocks.append(f"[{name}]\n{unconnected_text(_STORE, arrivals, connected, store)}")
    golden("join_texts", "\n\n".join(blocks))


@pytest.mark.parametrize(
    ("backend", "variables", "interface"),
    [
        ("gloo", {"GLOO_SOCKET_IFNAME": "ib0,eth0"}, "ib0"),
        ("gloo", {"GLOO_SOCKET_IFNAME": "eth"}, None),
        ("nccl", {}, "ib0"),
        ("cpu:gloo,cuda:nccl", {"NCCL_SOCKET_IFNAME": "ib,eth"}, "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=ib"}, None),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=ib0"}, "ib0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^lo,docker,eth"}, "ib0"),
    ],
)
def test_variables_choose_the_interface(backend: str, variables: dict[str, str], interface: str | None) -> None:
    """If it fails, addresses are told that the ranks do not use."""
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    interfaces = [Interface(name, address, 24) for name, address in addresses.items()]
    listening = find_listening(backend, interfaces, variables)
    assert listening.interface == interface
    assert listening.address == (None if interface is None else f"{addresses[interface]}/24")


def test_interfaces_of_this_host() -> None:
    """If it fails, no address of any rank is known."""
    assert Interface("lo", "127.0.0.1", 8) in list_interfaces()


def _come_late(folder: Path, port: int) -> int:
    """Rank 1 is told that it cannot reach rank 0 before rank 0 comes, which is told of rank 2 before that comes."""
    dist.barrier()  # else one leaves the group before the others have joined it
    dist.destroy_process_group()
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["MASTER_PORT"] = str(port)
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)
    times.JOIN_REPORT_AFTER_S, times.JOIN_LOOK_S = 0.2, 0.05
    for waiting, told, late in ((1, "refuses connections", 0), (0, "for rank 2; ranks 0, 1 are here", 2)):
        while rank == late and told not in (folder / str(waiting)).read_text():
            time.sleep(0.02)
    fit = trainer(CommOptDDP(), devices=3, max_epochs=1)
    fit.fit(Tiny(), loader(24))
    assert not [thread for thread in threading.enumerate() if thread.name == "commopt-join-watch"]
    return int(fit.global_step)


@pytest.mark.exhaustive
def test_late_ranks_are_named_and_then_train(tmp_path: Path, port: int) -> None:
    """If it fails, a start that waits says nothing, or the watch breaks a start that is only slow."""
    for rank in range(3):
        (tmp_path / str(rank)).touch()
    assert run_ranks(_come_late, tmp_path, port, world_size=3, limit_s=_LIMIT_S) == [6, 6, 6]
    lines = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(3)]
    told = [[line for line in each if " s in init_process_group: " in line] for each in lines]
    assert len(told[1]) == 1
    assert "cannot reach rank 0: 127.0.0.1 refuses connections to port" in told[1][0]
    assert "waits at 127.0.0.1" in told[0][-1]
    assert len(told[0]) == len(set(told[0])) <= 2  # of ranks 1 and 2 before rank 1 has come, then of rank 2 alone
    assert told[2] == []


def _fail_on(failing: int, folder: Path, port: int) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)
    times.JOIN_LOOK_S, times.JOIN_GRACE_S = 0.05, 0.2
    server = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)  # rank 1 waits for that of rank 0
    tries = iter([PortFailure("the store does not listen yet", is_refused=True)])
    join_watch.try_port = lambda *_, **__: next(tries, None)
    with JoinWatch("127.0.0.1", port, rank=rank, world_size=2, backend="gloo"):
        if rank == 0:
            server.wait(["commopt/join/ask/1"])
        if rank == failing:
            raise ArithmeticError("broken on purpose")
        threading.Event().wait(600)


@pytest.mark.parametrize(
    ("failing", "reason"),
    [(0, "rank 0 "), (1, f"rank 1 on {socket.gethostname()} has failed: ArithmeticError: broken")],
)
def test_ranks_end_when_another_has_failed(failing: int, reason: str, tmp_path: Path, port: int) -> None:
    """If it fails, one rank's error at the start leaves the others waiting, over gloo for five times the timeout."""
    ends = run_ranks_or_raise(_fail_on, failing, tmp_path, port, world_size=2, limit_s=_LIMIT_S)
    waiting = 1 - failing
    assert "ArithmeticError: broken on purpose" in str(ends[failing][1])
    assert ends[waiting][1] == "it died before it answered"
    said = (tmp_path / str(waiting)).read_text()
    assert f"in init_process_group: {reason}" in said
    assert said.endswith(f"[rank {waiting}] This rank has waited for 0.2 s, and ends.\n")


def test_a_port_of_another_program(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ranks wait in silence for a program that is no store."""
    monkeypatch.setattr(times, "JOIN_REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(times, "JOIN_LOOK_S", 0.01)
    monkeypatch.setattr(times, "JOIN_TRY_S", 0.05)
    said = ""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        JoinWatch("127.0.0.1", other.getsockname()[1], rank=1, world_size=2, backend="gloo"),
    ):
        deadline = time.monotonic() + _LIMIT_S
        while "[rank 1]" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.02)
    assert "accepts connections, but does not answer like torch's store" in said


def test_who_says_for_whom_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, several ranks say the same of a start, or none does, or a start that is about to succeed is told."""
    store = dist.HashStore()
    first, second = (JoinWatch("10.0.0.1", 29500, rank=rank, world_size=3, backend="gloo") for rank in (0, 1))

    def told() -> list[str | None]:
        return [watch._find_others(store) for watch in (first, second)]

    for rank, address in ((0, None), (1, "9.9.9.9/24"), (2, None)):
        if rank == 2:
            text, silent = told()
            assert text is not None
            assert "waits at 10.0.0.1:29500 for rank 2; ranks 0, 1 are here" in text
            assert silent is None
        store.set(f"here/{rank}", json.dumps(asdict(_arrival(rank, address))))
    assert told() == [None, None]  # they may be about to connect
    monkeypatch.setattr(times, "JOIN_REPORT_AFTER_S", 0.0)
    text, silent = told()
    assert text is not None
    assert "but ranks 0-2 have not connected to the others: rank 1 on h1 listens on 9.9.9.9" in text
    assert silent is None
    store.set("joined/0", "")
    assert "but ranks 1, 2 have not connected" in str(told()[1])


def test_a_process_that_still_starts_is_told() -> None:
    """If it fails, one is asked whether a rank was started at all while it imports."""
    starting = {1: os.getpid()}
    assert activity_text(starting).startswith(f". Now: process {os.getpid()} is ")
    assert activity_text({}) == ""
    text = missing_text(_STORE, [_arrival(0)], [1, 2], starting)
    assert "waits at 10.0.0.1:29500 for ranks 1, 2; only rank 0 is here. Rank 1 still starts: its process" in text
    assert text.endswith("cannot reach 10.0.0.1:29500: its own output of rank 2 shows it")

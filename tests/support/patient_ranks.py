"""Ranks that train a small model in rounds, and may be frozen or killed; the store's host is none of them."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt.compressors.channel import Channel
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.members import Members
from lightning_commopt.sync.diloco.mesh import Mesh
from lightning_commopt.sync.diloco.patient import PatientExchange
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.groups import default_group
from lightning_commopt.sync.store import poll
from support.ranks import PROCESSES

WIDTH = 16


@dataclass(frozen=True)
class Job:
    """What each rank does.

    Attributes:
        plan: options of a `DiLoCoPlan`.
        num_steps: number of optimizer steps.
        patience_s: see `PatientExchange`; None for an `Exchange` among all ranks.
        barrier_step: the step before which all ranks wait for each other, also those that have missed an exchange.
        pauses_s: for each rank, the longest of its random pauses between steps; none for all if it is empty.
        stops: for each rank that freezes itself, where: the name of a point, and how often it is passed before.
        seed: of data and pauses.
    """

    plan: dict[str, Any]
    num_steps: int = 40
    patience_s: float | None = 30.0
    barrier_step: int | None = None
    pauses_s: tuple[float, ...] = ()
    stops: dict[int, tuple[str, int]] = field(default_factory=dict)
    seed: int = 0


class Result(NamedTuple):
    """What a rank returns: final weights, the loss of them, steps that it has trained, and what it has logged."""

    weights: Tensor
    loss: float
    num_trained: int
    log: list[str]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _batch(generator: torch.Generator, number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(number, WIDTH, generator=generator)
    noise = torch.randn(number, 1, generator=generator)  # so that the loss ends at about 1 whatever the weights
    return x, torch.tanh(x[:, :4].sum(1, keepdim=True)) + noise


def train(rank: int, world_size: int, store: dist.Store, job: Job) -> Result:
    """Trains on one rank."""
    torch.manual_seed(0)
    model = _Model()
    log: list[str] = []
    plan = DiLoCoPlan(**job.plan)
    exchange = _make_exchange(rank, world_size, store, job, log)
    rounds = Rounds(plan, model, exchange)
    if rank in job.stops:
        assert isinstance(exchange, PatientExchange)
        _stop_at(*job.stops[rank], exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    generator = torch.Generator().manual_seed(1000 * job.seed + rank)
    pauses = torch.Generator().manual_seed(77_777 + 1000 * job.seed + rank)
    num_trained = 0
    for step in range(job.num_steps):
        if step == job.barrier_step:
            store.set(f"barrier/{rank}", "")
            assert poll(lambda: store.check([f"barrier/{other}" for other in range(world_size)]), 240)
        x, y = _batch(generator, 64 + 16 * rank)
        if job.pauses_s:
            time.sleep(job.pauses_s[rank] * float(torch.rand(1, generator=pauses)))
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / job.num_steps)
        if not rounds.is_behind:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            rounds.counts.samples += len(x)
            num_trained += 1
        rounds.step()
    rounds.finish()
    rounds.finish_again()
    assert rounds.close()
    weights = torch.cat([x.detach().reshape(-1).double() for x in (*model.parameters(), *model.buffers())])
    x, y = _batch(torch.Generator().manual_seed(5), 4096)
    with torch.no_grad():
        return Result(weights, float((model.eval()(x) - y).square().mean()), num_trained, log)


def _make_exchange(rank: int, world_size: int, store: dist.Store, job: Job, log: list[str]) -> Exchange:
    compressor = DiLoCoPlan(**job.plan).comm_hook
    if job.patience_s is None:
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world_size)
        return Exchange(Channel(default_group()), compressor)
    options: dict[str, Any] = {"patience_s": job.patience_s, "timeout_s": 240.0, "log": log.append}
    members = Members(dist.PrefixStore("members", store), rank, world_size, **options)
    return PatientExchange(members, dist.PrefixStore("mesh", store), compressor, patience_s=job.patience_s)


def _stop_at(point: str, passes: int, exchange: PatientExchange) -> None:
    """Makes this process freeze itself when it comes to a point for the time after ``passes``."""
    members = exchange._members
    owner, name = {
        "meeting": (members, "meet"),
        "connecting": (exchange, "_connect"),
        "exchange": (Mesh, "all_reduce"),
        "passing on": (exchange, "_transfer"),
        "end": (members, "conclude"),
    }[point]
    inner, left = getattr(owner, name), [passes]

    def stopping(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return inner(*args, **kwargs)

    setattr(owner, name, stopping)


class Ranks:
    """The processes of all ranks, each of which runs a function; a context that ends them.

    Attributes:
        store: the store that they share, hosted here.
        answers: what each has returned so far, or its traceback.
    """

    def __init__(self, fn: Callable[..., Any], world_size: int, *args: Any) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.answers: dict[int, Any] = {}
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(world_size)]
        self._pipes = [pipe for pipe, _ in pipes]
        self._processes = [
            PROCESSES.Process(target=_run, args=(fn, rank, world_size, self.store.port, pipe, args))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, pipe) in zip(self._processes, pipes, strict=True):
            process.start()
            pipe.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()

    def signal(self, rank: int, number: int) -> None:
        process = self._processes[rank]
        assert process.pid is not None
        with suppress(ProcessLookupError):  # it has ended already
            os.kill(process.pid, number)

    def is_frozen(self, rank: int) -> bool:
        with open(f"/proc/{self._processes[rank].pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def wait_until(self, condition: Callable[[], bool], limit_s: float = 240) -> None:
        """Waits for a condition; raises an AssertionError if it does not come true, or a rank raises before."""
        end = time.monotonic() + limit_s
        while not condition():
            self.collect(0.01)
            assert time.monotonic() < end, f"waited in vain; answers of {sorted(self.answers)}"

    def wait_for(self, ranks: Collection[int], limit_s: float = 240) -> list[Any]:
        """Returns what ranks have returned."""
        self.wait_until(lambda: {*ranks} <= self.answers.keys(), limit_s)
        return [self.answers[rank] for rank in ranks]

    def outcome(self, rank: int, limit_s: float = 240) -> tuple[Any, str | None]:
        """Waits for a rank; returns what it has returned, or None with its traceback if it has one."""
        pipe = self._pipes[rank]
        if rank in self.answers:
            return self.answers[rank], None
        assert pipe.poll(limit_s), f"rank {rank} has not answered"
        try:
            self.answers[rank], trace = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):  # it was killed
            self.answers[rank], trace = None, None
        return self.answers[rank], trace

    def collect(self, limit_s: float) -> None:
        """Reads the answers that come in time; raises an AssertionError with the traceback of a rank that raised."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self.answers}
        for pipe in wait([*waiting], timeout=limit_s):
            assert isinstance(pipe, Connection)
            _, trace = self.outcome(waiting[pipe])
            assert trace is None, f"rank {waiting[pipe]} raised\n{trace}"


def _run(
    fn: Callable[..., Any], rank: int, world_size: int, port: int, pipe: Connection, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        answer = pickle.dumps((fn(rank, world_size, store, *args), None))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()
    os._exit(0)  # threads that wait for a dead peer must not keep the process

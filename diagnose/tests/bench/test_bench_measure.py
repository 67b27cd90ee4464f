"""Every collective on real ranks: each call does what it says, and a wrong element is counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from commopt_diagnose.bench import measure as measuring
from commopt_diagnose.bench import operations
from commopt_diagnose.bench.measure import measure
from commopt_diagnose.bench.operations import Ranks
from commopt_diagnose.bench.result import Case, Row
from commopt_diagnose.bench.settings import COLLECTIVES, PLACES, BenchSettings
from support.ranks import run_ranks


def _measure(settings: BenchSettings, ranks_per_node: int) -> tuple[list[Row], list[tuple[int, int, str]]]:
    seen: list[tuple[int, int, str]] = []
    rows = measure(settings, torch.device("cpu"), ranks_per_node, lambda *step: seen.append(step))
    return rows, seen


def _quick(**options: object) -> BenchSettings:
    usual = {"sizes_bytes": (8, 70_000), "num_repetitions": 2, "block_s": 0.001, "num_warmups": 1}
    return BenchSettings(**{**usual, **options})  # type: ignore[arg-type]


def _everything(ranks_per_node: int) -> None:
    settings = _quick(collectives=COLLECTIVES, places=PLACES, root=1, comm_hooks=["int8", "powersgd"])
    rows, seen = _measure(settings, ranks_per_node)
    assert len(rows) == 2 * (7 * 2 + 2 + 2)
    for row in rows:
        assert row.error is None, row
        assert row.num_wrong == 0, row.case
        assert len(row.times_s) == 2
        assert all(0 < time_s < 60 for time_s in row.times_s)
    assert [step[0] for step in seen] == list(range(3 * len(rows)))
    times = [row.times_s for row in rows]
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, times)
    assert everywhere == [times] * len(everywhere)


def test_wrong_elements_are_found_wherever_they_are() -> None:
    """If it fails, #wrong is 0 for a message whose end, or whose middle, is wrong."""
    numel = 2 * 4096 * 1021 + 1500  # of several chunks, and of no whole period
    part = torch.empty(numel, dtype=torch.uint8)
    operations.fill(part, 1, offset=77)
    assert operations.num_wrong(part, [1], offset=77) == 0
    for place in (0, 4096 * 1021 - 1, 4096 * 1021, numel - 1):
        part[place] ^= 1
    assert operations.num_wrong(part, [1], offset=77) == 4
    assert operations.num_wrong(part, [1], offset=78) > numel / 2
    assert operations.num_wrong(part, [0], offset=77) > numel / 2
    assert operations.num_wrong(part.roll(2**16), [1], offset=77) > numel / 3


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_every_collective_and_hook_gives_what_it_must(world_size: int) -> None:
    """If it fails, times are of something else than the collective, or ranks report different results."""
    run_ranks(_everything, world_size, world_size=world_size)


def _dtypes_and_scopes() -> None:
    collectives = ("all_reduce", "reduce_scatter", "all_to_all")
    dtypes = ("float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
    settings = _quick(
        collectives=collectives, dtypes=dtypes, redops=("sum", "min", "max"), scopes=("all", "node", "across"),
        sizes_bytes=(4100,), num_repetitions=1, num_iters=1,
    )  # fmt: skip
    rows, _ = _measure(settings, 2)
    assert {(row.case.scope, row.case.num_ranks) for row in rows} == {("all", 4), ("node", 2), ("across", 2)}
    assert len(rows) == 3 * 7 * (3 + 3 + 1)
    assert [row for row in rows if row.error is not None or row.num_wrong != 0] == []
    rows, _ = _measure(_quick(comm_hooks=[{"name": "hierarchical", "inner": "int8"}], collectives=()), 2)
    assert [(row.error, row.num_wrong) for row in rows] == [(None, 0)] * 2


@pytest.mark.exhaustive
def test_all_dtypes_reductions_and_scopes_are_exact() -> None:
    """If it fails, #wrong counts what is right, or a scope is over other ranks than it says."""
    run_ranks(_dtypes_and_scopes, world_size=4)


def _under_compute() -> None:
    rows, _ = _measure(_quick(sizes_bytes=(4096,), loads=("idle", "compute")), 2)
    assert [(row.case.load, row.num_wrong) for row in rows] == [("idle", 0), ("compute", 0)]


def _faults() -> None:
    def prepare(case: Case, ranks: Ranks, memory: Sequence[torch.Tensor], root: int) -> operations.Call:
        if case.operation == "reduce" and ranks.index == 1:
            raise RuntimeError("not here\nbecause")
        call = operations.prepare(case, ranks, memory, root)
        received, _ = operations.views(memory, torch.float32, case.count)

        def run() -> None:
            call.run()
            received[7] += ranks.index if case.operation == "broadcast" else 0  # one element, wrong on rank 1 only

        return operations.Call(run, call.fill, call.num_wrong)

    measuring.prepare = prepare
    rows, _ = _measure(_quick(collectives=("broadcast", "reduce"), sizes_bytes=(4096,)), 2)
    assert [row.num_wrong for row in rows] == [1, None]
    assert rows[1].error == ("not here" if dist.get_rank() == 1 else "failed on another rank")


def _busy_later() -> None:
    now_s, num_calls = 0.0, 0
    seen: list[int] = []

    def prepare(case: Case, ranks: Ranks, memory: Sequence[torch.Tensor], root: int) -> operations.Call:
        call = operations.prepare(case, ranks, memory, root)

        def run() -> None:
            nonlocal now_s, num_calls
            num_calls += 1
            now_s += 0.001 if num_calls <= 2 else 0.1

        return operations.Call(run, call.fill, lambda: 0)

    measuring.prepare = prepare
    measuring.time = SimpleNamespace(perf_counter=lambda: now_s)  # type: ignore[assignment]
    settings = _quick(sizes_bytes=(8,), num_repetitions=4, block_s=0.1)
    (row,) = measure(settings, torch.device("cpu"), 2, lambda *_: seen.append(num_calls))
    # An untimed call goes before each block.
    assert [after - before - 1 for before, after in pairwise([*seen, num_calls])] == [1, 100, 2, 2, 2]
    assert row.num_iters == 2
    assert row.times_s == pytest.approx([0.1] * 4)


def test_calls_that_become_slower_make_no_longer_blocks() -> None:
    """If it fails, a bench takes many times as long as it says on a machine that becomes busy while it runs."""
    run_ranks(_busy_later)


def _alone_and_wrong() -> None:
    _under_compute()
    with pytest.raises(ValueError, match="root must be below the number of ranks, 2, got 2"):
        _measure(_quick(root=2), 2)
    with pytest.raises(ValueError, match="scope 'across' needs several nodes"):
        _measure(_quick(scopes=("across",)), 2)
    _faults()


def test_a_wrong_element_is_counted_and_a_refused_case_is_a_row() -> None:
    """If it fails, a link that changes bits looks well, or one collective that a backend lacks ends the whole bench."""
    run_ranks(_alone_and_wrong)


@pytest.mark.timeout(30)
def test_a_load_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a bench on a GPU whose memory is full waits forever, or shows times without the load."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"), measuring.compute_load(torch.device("cpu")):
        pass

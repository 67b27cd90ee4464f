"""Collectives that timed out: whom ranks wait for, in a part of the job too, and where Ray left out lines."""

from __future__ import annotations

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from diagnose_support.nccl_sample_logs import SampleJob, findings, read, told, watchdog


def _of_worker(rank: int, text: str, repeats: str = "") -> str:
    return f"(Worker pid={rank}7, ip=10.0.0.{rank}) {told(text, host=f'node-{rank}').strip()}{repeats}\n"


@pytest.mark.parametrize("color", ["", "\x1b[32m", "ESC[32m"])
def test_lines_that_ray_left_out_prove_nothing(color: str) -> None:
    """If it fails, what Ray appends is read as part of a value, or its gaps as what ranks do not have."""
    times = f"{color} [repeated 3x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to)"
    comm = "comm 0x7f rank {0} nranks 4 cudaDev 0 busId 1000 commId 0xa - Init"
    lines = [
        *(
            _of_worker(0, text)
            for text in ("Bootstrap : Using eth0:10.0.0.1<0>", "NCCL_P2P_LEVEL set by environment to SYS")
        ),
        _of_worker(0, "Using network Socket"),
        *(_of_worker(0, f"{comm.format(0)} {end}") for end in ("START", "COMPLETE")),
        _of_worker(1, "Bootstrap : Using eth0:10.0.0.2<0>", times),
        _of_worker(1, "Using network Socket", times),
        _of_worker(1, f"{comm.format(1)} START"),
        _of_worker(1, "Channel 00/0 : 1[0] -> 2[0] [send] via NET/Socket/0", times),
        _of_worker(1, f"{comm.format(1)} COMPLETE", times),
        _of_worker(2, f"{comm.format(2)} START", times),
    ]
    log = read("".join(lines))
    assert [connection.path for connection in log.communicators[0].connections] == ["NET/Socket"]
    found = {finding.code: finding for finding in find_all(log)}
    assert not found.keys() & {"different_network", "different_settings", "unfinished_init"}
    assert found["left_out_lines"].what.startswith("Ray left out 10 lines")


def _in_group(
    rank: int, place: int, *, sizes: str = "NumelIn=8, NumelOut=16", group: str = "PG ID 5 PG GUID 37(TP)"
) -> str:
    """Returns lines of a rank that counts otherwise in its group."""
    failed = watchdog(place, 49, "_ALLGATHER_BASE").replace("NumelIn=8, NumelOut=8", sizes)
    status = "failure detected by watchdog at work sequence id: 49 PG status: last enqueued work: 60, last completed"
    lines = (
        failed
        + f"[rank{place}]:[E129 16:38:47.7 ProcessGroupNCCL.cpp:2241] [{group} Rank {place}]  {status} work: 48\n"
    )
    return lines.replace(f"[rank{place}]", f"[rank{rank}]")


def test_ranks_are_those_of_the_job() -> None:
    """If it fails, a timeout in a part of the job is put down to ranks that have nothing to do with it."""
    whole = findings(_in_group(8, 0), _in_group(9, 1))["collective_timeout"]
    assert "PG ID 5 PG GUID 37(TP): ranks 8, 9 in _ALLGATHER_BASE 49" in whole.what
    assert whole.why.startswith("all ranks wait")
    part = findings(*(_in_group(8 + n, n, sizes="NumelIn=8, NumelOut=32") for n in (0, 1, 3)))["collective_timeout"]
    assert "rank 2 of the group did not time out: they never came" in part.why
    alone = findings(_in_group(9, 1, sizes="NumelIn=8, NumelOut=8"))["collective_timeout"]
    assert "all ranks of this log (rank 9) wait" in alone.why


def test_equal_sizes_of_a_gather_do_not_count_ranks() -> None:
    """If it fails, one rank that waits is called all ranks, as a gather of a list shows one tensor's size twice."""
    line = watchdog(0, 49, "ALLGATHER")
    assert "NumelIn=8, NumelOut=8" in line
    assert findings(line)["collective_timeout"].why.startswith("all ranks of this log (rank 0) wait")


def test_a_rank_that_failed_in_the_same_collective_waits_too() -> None:
    """If it fails, a rank whose own timeout is missing counts as one whose collective no line names."""
    whole, lost = _in_group(8, 8, group="PG ID 1 PG GUID 1"), _in_group(9, 9, group="PG ID 1 PG GUID 1")
    failed = "[rank9]:[E129 16:38:47.9 ProcessGroupNCCL.cpp:667] [Rank 9] Some NCCL operations have failed\n"
    timeout = findings(whole, lost.splitlines(keepends=True)[1], failed)["collective_timeout"]
    assert timeout.why.startswith("all ranks of this log (ranks 8, 9) wait")
    other = lost.splitlines(keepends=True)[1].replace("id: 49", "id: 50")
    assert "rank 9 wrote errors of PyTorch too" in findings(whole, other, failed)["collective_timeout"].why


def test_what_a_process_prints_as_it_ends_is_no_other_rank() -> None:
    """That line has only the rank in the group."""
    ended = watchdog(1, 49, "_ALLGATHER_BASE", group="PG ID 5 PG GUID 37(TP)").partition("] ")[2]
    ended = f"  what():  {ended}".replace("NumelIn=8, NumelOut=8", "NumelIn=8, NumelOut=16")
    for lines in ((ended, _in_group(9, 1)), (_in_group(9, 1), ended)):
        assert "37(TP): rank 9 in" in findings(*lines)["collective_timeout"].what


def test_a_rank_that_only_heard_of_the_timeout_explains_nothing() -> None:
    signal = (
        "[rank0]:[E a.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 0] Observed flight recorder dump signal from another"
    )
    assert "begin with the warnings" not in findings(_in_group(9, 1), signal)["collective_timeout"].advice


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "program_out_of_memory"),
        ("2: [rank3]: ValueError: batch of 7 samples", "raised"),
        ("[rank3]: torch._dynamo.exc.BackendCompilerFailed: x", None),
        (
            "[rank3]: torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
            None,
        ),
        ("[rank3]: RuntimeError: [../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer", None),
    ],
)
def test_what_a_rank_raised_is_why_others_wait(line: str, code: str | None) -> None:
    """If it fails, a rank whose error stands in the log is said to be unknown, or one that failed later is blamed."""
    found = findings(*(watchdog(rank, 7) for rank in range(3)), line + "\n")
    timeout = found.pop("collective_timeout")
    assert list(found) == ([code] if code else [])
    assert timeout.why.startswith("rank 3 did not time out, but failed") is (code is not None)


def test_an_error_of_an_unknown_rank_is_likelier_than_the_network() -> None:
    found = findings(
        *(watchdog(rank, 7) for rank in range(3)), "3: RuntimeError: CUDA out of memory. Tried to allocate\n"
    )
    assert found["collective_timeout"].advice == "begin with the warnings"


def progress(rank: int, enqueued: int, group: int = 0) -> str:
    return f"[PG ID {group} PG GUID 0 Rank {rank}]  PG status: last enqueued work: {enqueued}, last completed work: 4\n"


def test_timeouts() -> None:
    start = SampleJob().mixed()
    alone = findings(start + "".join(watchdog(rank, 5) for rank in (0, 1, 3)))["collective_timeout"]
    assert alone.what == "a collective timed out after 600 s: ranks 0, 1, 3 in ALLREDUCE 5 (NumelIn=8, NumelOut=8)"
    assert alone.why.startswith("rank 2 did not time out")
    all_of_them = start + "".join(watchdog(rank, 5) * 3 for rank in range(4))
    assert findings(all_of_them)["collective_timeout"].why.startswith("all ranks wait in the same collective")
    other = findings(start + watchdog(0, 5) + watchdog(1, 5) + watchdog(2, 5, numel=9) + watchdog(3, 5))
    assert "different operations or sizes" in other["collective_timeout"].why
    other_group = progress(0, 90, group=1)
    behind = findings(all_of_them + other_group + "".join(progress(rank, 5 - (rank == 2)) for rank in range(4)))[
        "collective_timeout"
    ]
    assert behind.why == "rank 2 had not started it: the last collective there is number 4, 5 elsewhere"


def test_ranks_of_which_one_names_its_group_are_compared() -> None:
    """As in rmaphoh/RETFound#39, where one rank reduced a metric and the other its gradients."""
    at = "Timeout at NCCL work: 5769, last enqueued NCCL work: 5769, last completed NCCL work: 5768."
    named = f"[rank0]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 0] {at}"
    found = findings(watchdog(0, 5769, numel=1), watchdog(1, 5769, numel=2958336), named)["collective_timeout"]
    assert "the same number with different operations or sizes" in found.why


def timed_out(rank: int, group: str) -> str:
    at = "Timeout at NCCL work: 5, last enqueued NCCL work: 7, last completed NCCL work: 4."
    return f"{watchdog(rank, 5)}[rank{rank}]:[E] [{group} Rank {rank}] {at}\n"


def test_ranks_without_a_line_are_not_blamed_for_a_timeout() -> None:
    start = told("comm 0x7f rank 2 nranks 16 cudaDev 2 busId 41000 commId 0x44 - Init COMPLETE")
    found = findings(start, watchdog(4, 5))["collective_timeout"]
    assert "did not time out" not in found.why
    assert "what the others of " in found.why


@pytest.mark.parametrize(("group", "is_sure"), [("PG ID 0 PG GUID 0(default_pg)", True), ("PG 3", False)])
def test_a_rank_may_be_outside_of_a_group(group: str, is_sure: bool) -> None:
    lines = [timed_out(rank, group) for rank in (0, 1, 3)]
    assert ("are not in this group" not in findings(*lines)["collective_timeout"].why) is is_sure


def test_all_ranks_whose_watchdog_hangs_are_named() -> None:
    """If it fails, a job in which all ranks hang is put down to the one whose second line is in the log."""
    lines = [
        f"[rank{rank}]:[E1019 01:04:03.3 ProcessGroupNCCL.cpp:1413] [PG 3 Rank 0] Heartbeat monitor timed out! Process"
        f" will be terminated after dumping debug info. workMetaList_.size()={rank}"
        for rank in (4, 6)
    ]
    lines.append(
        "[rank6]:[F1019 01:04:03.3 a.cpp:1] [PG 3 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 seconds"
    )
    assert findings(*lines)["watchdog_stuck"].what.startswith("ranks 4, 6 warn: Heartbeat monitor timed out!")


def test_ranks_whose_collective_is_not_in_the_log_are_not_said_to_wait_with_the_others() -> None:
    other = (
        "[rank1]:[E1218 20:27:21.4 ProcessGroupNCCL.cpp:681] [Rank 1] Some NCCL operations have failed or timed out."
    )
    why = findings(watchdog(2, 7), other)["collective_timeout"].why
    assert "all ranks of this log" not in why
    assert why.startswith("rank 1 wrote errors of PyTorch too, but no line says in which collective")


@pytest.mark.parametrize(("operation", "is_unfinished"), [("BROADCAST", True), ("SEND", False)])
def test_a_rank_that_others_left_behind_in_a_broadcast_has_started_it(operation: str, is_unfinished: bool) -> None:
    """As in argonne-lcf/alcf-nccl-tests, where the network stops; if it fails, the program of that rank is blamed."""
    lines = []
    for rank, (work, enqueued) in enumerate([(56, 56), (5, 6), (48, 48), (7, 8)]):
        at = f"Timeout at NCCL work: {work}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {work - 1}."
        lines += [
            watchdog(rank, work, operation),
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank {rank}] {at}\n",
        ]
    why = findings(*lines)["collective_timeout"].why
    assert ("rank 1 started collective 5 and did not finish it, which ranks 0, 2, 3 did" in why) == is_unfinished

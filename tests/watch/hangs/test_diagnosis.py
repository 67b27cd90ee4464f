"""The sentence about a hang, from snapshots of all ranks."""

import re
from typing import Any

import pytest

from lightning_commopt.text.formatting import ranks_text
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    DATA,
    END,
    EPOCH_END,
    FORWARD,
    PHASES,
    first_of_stage,
)
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

NAMES = ["layer3.0.weight", "layer3.0.bias", "layer3.1.weight"]


def rank(number: int, **fields: Any) -> RankSnapshot:
    return RankSnapshot(rank=number, host="a", **{"pid": 100 + number, "step": 141, "phase": FORWARD, **fields})


def syncing(number: int, **fields: Any) -> RankSnapshot:
    return rank(number, **{"phase": BACKWARD, "bucket": 4, "bucket_names": NAMES, "all_ready": True, **fields})


def finished(number: int) -> RankSnapshot:
    return rank(number, state="finished")


def in_stack(file: str) -> dict[str, Any]:
    """Returns the fields of a rank whose thread is in a function of a file."""
    frame = f"{file}:3 in f"
    return {"innermost": frame, "pid": 1, "fit_thread": "0x1", "stacks": {"process 1": {"0x1": [frame]}}}


def recorded(calls: str) -> dict[str, Any]:
    """Returns the record of all_gather for every g and all_reduce for every x; capitals are not done."""
    return {
        "entries": [
            {
                "collective_seq_id": place + 1,
                "process_group": ["0", ""],
                "profiling_name": "gloo:" + ("all_gather" if call in "gG" else "all_reduce"),
                "input_sizes": [[3 if call in "gG" else 180]],
                "retired": call.islower(),
            }
            for place, call in enumerate(calls)
        ]
    }


WAITS = "waits in the gradient sync of bucket 4 (layer3.*) of step 141"
WAIT = "wait" + WAITS.removeprefix("waits")
LOST = "RuntimeError: [pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer"


TIMED_OUT = "DistBackendError: Watchdog caught collective operation timeout: NCCL operation timed out"


@pytest.mark.parametrize(
    ("snapshots", "kind", "at_fault", "sentence"),
    [
        (
            [syncing(0), syncing(1), rank(2, phase=DATA, place="data.py:33 in __getitem__"), syncing(3)],
            "late",
            (2,),
            f"rank 2 is still in the dataloader of step 141 (data.py:33 in __getitem__); ranks 0, 1, 3 {WAIT}",
        ),
        (
            [syncing(0), rank(1, phase=DATA, innermost="x.py:1 in f", worker_places=["data.py:9 in read"])],
            "late",
            (1,),
            f"rank 1 is still in the dataloader of step 141 (worker: data.py:9 in read); rank 0 {WAITS}",
        ),
        (
            [rank(0, state="stopped"), syncing(1)],
            "stopped",
            (0,),
            "rank 0 is stopped (process 100 on a, by a signal or a debugger) in forward of step 141; rank 1 " + WAITS,
        ),
        (
            [rank(0, state="failed", detail=LOST, ended_unix_s=1.0), rank(1, state="died", ended_unix_s=2.0)],
            "died",
            (1,),
            "rank 1 has died in forward of step 141: process 101 on a is gone; rank 0 has lost the connection",
        ),
        (
            [
                rank(0, state="failed", detail="KeyError: 'x'", ended_unix_s=1.0),
                rank(1, state="died", ended_unix_s=2.0),
                syncing(2),
            ],
            "failed",
            (0,),
            "rank 0 has failed in forward of step 141: KeyError: 'x'; rank 1 has died in forward of step 141: process"
            f" 101 on a is gone; rank 2 {WAITS}",
        ),
        (
            [
                rank(0, state="died", ended_unix_s=1.0),
                syncing(1, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxgxgxx")),
            ],
            "mismatch",
            (1,),
            "rank 1 has called all_reduce (180,) in backward of step 141, after what all_gather (3,) followed before;"
            " rank 0 has died in forward of step 141: process 100 on a is gone",
        ),
        (
            [
                rank(0, state="died", ended_unix_s=1.0),
                syncing(1, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxgxgxgx")),
            ],
            "died",
            (0,),
            "rank 0 has died in forward of step 141: process 100 on a is gone; rank 1 has lost the connection in"
            " the gradient sync of bucket 4 (layer3.*) of step 141",
        ),
        (
            [
                syncing(0, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxx")),
                rank(1, state="died", ended_unix_s=1.0),
                syncing(2, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxx")),
            ],
            "died",
            (1,),
            "rank 1 has died in forward of step 141: process 101 on a is gone; ranks 0, 2 have lost the connection in"
            " the gradient sync of bucket 4 (layer3.*) of step 141",
        ),
        (
            [
                rank(0, state="failed", detail=LOST, called="all_gather", collectives=recorded("gxg")),
                rank(1, state="failed", detail="KeyError: 'x'", place="a/b.py:3 in f", ended_unix_s=1.0),
                rank(2, phase=BACKWARD, state="failed", detail=LOST, collectives=recorded("gx")),
            ],
            "failed",
            (1,),
            "rank 1 has failed in forward of step 141: KeyError: 'x' (a/b.py:3 in f); rank 0 has lost the connection in"
            " all_gather (3,) (number 3 of group default) of step 141; rank 2 has lost the connection in"
            " all_reduce (180,) (number 2 of group default) of step 141",
        ),
        (
            [
                syncing(0, collectives=recorded("gxgX")),
                rank(1, phase=DATA, step=142, called="broadcast", collectives=recorded("gxgG")),
                syncing(2, collectives=recorded("gxgX")),
            ],
            "mismatch",
            (1,),
            "rank 1 has gone on to step 142 without the gradient sync of bucket 4 (layer3.*) of step 141, and waits in"
            f" all_gather (3,) (number 4 of group default); ranks 0, 2 {WAIT}",
        ),
        (
            [rank(0, state="failed", detail=LOST, ended_unix_s=2.0), rank(1, state="finished", step=140)],
            "ended",
            (1,),
            "rank 1 has ended the fit after step 140; rank 0 has lost the connection",
        ),
        (
            [rank(0, state="interrupted", detail="KeyboardInterrupt", ended_unix_s=1.0), syncing(1)],
            "interrupted",
            (0,),
            f"rank 0 has been interrupted (Ctrl-C or SIGINT) in forward of step 141; rank 1 {WAITS}",
        ),
        (
            [rank(0, state="terminated", detail="SIGTERM", ended_unix_s=1.0), syncing(1)],
            "terminated",
            (0,),
            f"rank 0 has been ended by SIGTERM in forward of step 141; rank 1 {WAITS}",
        ),
        (
            [rank(0, called="broadcast", stop_reason="SIGTERM"), syncing(1)],
            "terminated",
            (0,),
            "rank 0 has received SIGTERM in forward of step 141, and waits for the others in Lightning's handler;"
            f" rank 1 {WAITS}",
        ),
        (
            [rank(0, state="failed", detail="SystemExit: 3", place="a/b.py:3 in f", ended_unix_s=1.0), syncing(1)],
            "failed",
            (0,),
            f"rank 0 has called sys.exit(3) in forward of step 141 (a/b.py:3 in f); rank 1 {WAITS}",
        ),
        (
            [rank(0, state="died", detail="was killed by SIGSEGV", ended_unix_s=1.0), syncing(1)],
            "died",
            (0,),
            f"rank 0 has died in forward of step 141: process 100 on a was killed by SIGSEGV; rank 1 {WAITS}",
        ),
        (
            [rank(0, phase=CALLBACKS, hook="Upload.on_train_batch_end", innermost="ssl.py:5 in read"), syncing(1)],
            "late",
            (0,),
            f"rank 0 is still in Upload.on_train_batch_end of step 141 (ssl.py:5 in read); rank 1 {WAITS}",
        ),
        (
            [syncing(0, state="failed", detail=TIMED_OUT, ended_unix_s=1.0), rank(1, innermost="a.py:1 in f")],
            "late",
            (1,),
            "rank 1 is still in forward of step 141 (a.py:1 in f); rank 0 has timed out in the gradient sync of bucket"
            " 4 (layer3.*) of step 141",
        ),
        (
            [rank(0, phase=END, called="barrier", stop_reason="trainer.should_stop"), syncing(1)],
            "ended",
            (0,),
            "rank 0 has left training's batches after step 141, as trainer.should_stop was set there, and is in the end"
            f" of the run; rank 1 {WAITS}",
        ),
        (
            [rank(0, phase=END, innermost="ssl.py:5 in read"), rank(1, phase=END, called="barrier"), finished(2)],
            "late",
            (0,),
            "rank 0 is still in the end of the run of step 141 (ssl.py:5 in read); rank 1 waits in barrier of step 141;"
            " rank 2 has ended the fit after step 141",
        ),
        (
            [syncing(0, **in_stack("b.py")), syncing(1, **in_stack("a.py")), syncing(2, **in_stack("a.py"))],
            "waiting",
            (0,),
            f"rank 0 {WAITS}, unlike the others; ranks 1, 2 {WAIT}",
        ),
        (
            [rank(0, phase=DATA, **in_stack("b.py")), *(rank(n, phase=DATA, **in_stack("a.py")) for n in (1, 2))],
            "late",
            (0,),
            "rank 0 is still in the dataloader of step 141 (b.py:3 in f); ranks 1, 2 are still in the dataloader of"
            " step 141 (a.py:3 in f)",
        ),
        (
            [rank(0, phase=BACKWARD, innermost="graph.py:5 in run"), rank(1, innermost="a.py:1 in f")],
            "late",
            (1,),
            "rank 1 is still in forward of step 141 (a.py:1 in f); rank 0 is still in backward of step 141"
            " (graph.py:5 in run)",
        ),
        (
            [rank(0, phase=BACKWARD, innermost="graph.py:5 in run", collectives=recorded("xx")), rank(1, step=140)],
            "late",
            (0, 1),
            "rank 0 is still in backward of step 141 (graph.py:5 in run); rank 1 is still in forward of step 140",
        ),
        (
            [syncing(0), rank(1, state="unreachable", detail="b does not answer at 10.0.0.2:4000 within 8 s")],
            "unreachable",
            (1,),
            f"rank 1 cannot be reached: b does not answer at 10.0.0.2:4000 within 8 s; rank 0 {WAITS}",
        ),
        (
            [syncing(0), RankSnapshot(rank=1, host="b", state="silent", detail="b does not answer"), syncing(2)],
            "unreachable",
            (1,),
            f"rank 1 cannot be asked: b does not answer; ranks 0, 2 {WAIT}",
        ),
        (
            [syncing(0), RankSnapshot(rank=1, host="b", state="silent"), syncing(2, step=140)],
            "late",
            (2,),
            "rank 2 is behind: waits in the gradient sync of bucket 4 (layer3.*) of step 140; rank 0 "
            f"{WAITS}; rank 1 cannot be asked: ",
        ),
        (
            [syncing(0), rank(1, state="finished", step=141)],
            "ended",
            (1,),
            f"rank 1 has ended the fit after step 141; rank 0 {WAITS}",
        ),
        (
            [syncing(0), rank(1, phase=first_of_stage("validation"), step=140, called="all_reduce")],
            "ended",
            (1,),
            "rank 1 has left training's batches after step 140, and is in the start or end of validation;"
            f" rank 0 {WAITS}",
        ),
        (
            [rank(0, phase=CHECKPOINT, innermost="io.py:5 in write"), rank(1, called="barrier")],
            "late",
            (0,),
            "rank 0 is still writing a checkpoint of step 141 (io.py:5 in write); rank 1 waits in barrier of step 141",
        ),
        (
            [syncing(0), syncing(1), syncing(2)],
            "waiting",
            (0, 1, 2),
            f"ranks 0-2 {WAIT}",
        ),
        (
            [syncing(0, ready=5), syncing(1, ready=5), syncing(2, ready=4, bucket=3)],
            "late",
            (2,),
            "rank 2 is behind: waits in the gradient sync of bucket 3 (layer3.*) of step 141; ranks 0, 1 " + WAIT,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_sentence(snapshots: list[RankSnapshot], kind: str, at_fault: tuple[int, ...], sentence: str) -> None:
    """If it fails, the wrong rank is blamed, or the sentence does not name for what."""
    found = diagnose(snapshots[::-1])
    assert (found.sentence, found.kind, found.ranks) == (sentence, kind, at_fault)
    first = next(each for each in snapshots if each.rank == at_fault[0])
    if kind == "unreachable" or "has gone on" in sentence:
        assert (found.phase, found.step) == ("backward", 141)
    else:
        assert (found.phase, found.step) == (PHASES[first.phase].name, first.step)
    assert bool(found.hints) == (kind != "interrupted")
    is_in_one = re.search(r"(waits?|connection|timed out) in|Lightning's handler|has called", sentence) is not None
    assert (found.operation is not None) == is_in_one


@pytest.mark.parametrize(
    ("snapshots", "verdict"),
    [
        ([syncing(0), syncing(1)], "communication hang"),
        ([syncing(0), rank(1, phase=DATA)], "non-communication hang"),
        ([syncing(0), rank(1, is_computing=True)], "non-communication slow"),
        ([syncing(0), rank(1, state="died")], None),
    ],
)
def test_verdict(snapshots: list[RankSnapshot], verdict: str | None) -> None:
    """If it fails, a slow rank is taken for the network, or the network for a slow rank."""
    assert diagnose(snapshots).verdict == verdict


@pytest.mark.parametrize(
    ("detail", "hint"),
    [
        ("", "out of memory"),
        ("was killed by SIGKILL", "out of memory"),
        ("was killed by SIGBUS", "/dev/shm"),
        ("was killed by SIGSEGV", "PYTHONFAULTHANDLER"),
        ("was killed by signal 41", "PYTHONFAULTHANDLER"),
        ("exited with status 3", "os._exit"),
    ],
)
def test_hints_for_a_rank_that_died(detail: str, hint: str) -> None:
    """If it fails, every death is taken for a lack of memory."""
    assert hint in diagnose([rank(0, state="died", detail=detail), syncing(1)]).hints[0]


_BATCH = ("loops/training_epoch_loop.py", "advance")
_OWN = ("project/train.py", "on_train_batch_end")
_ZERO = ("core/rank_zero.py", "wrapped_fn")
_EVALUATION = ("loops/evaluation_loop.py", "on_run_end")
_SAVE = ("trainer/trainer.py", "save_checkpoint")
_METRIC = ("torchmetrics/metric.py", "wrapped_func")
_LOG = ("logger_connector/result.py", "compute")


def calling(number: int, *functions: tuple[str, str], **fields: Any) -> RankSnapshot:
    """Returns a rank that waits in a collective; ``functions`` are around it, the innermost first."""
    functions = (("distributed/distributed_c10d.py", "all_reduce"), *functions)
    stack = [f"{file}:7 in {function}" for file, function in functions]
    place = next((frame for frame in stack if frame.startswith("project/")), None)
    return rank(
        number,
        **{
            "called": "all_reduce",
            "place": place,
            "pid": 100 + number,
            "fit_thread": "0x1",
            "stacks": {f"process {100 + number}": {"0x1": stack}},
            **fields,
        },
    )


_HOOK = {"hook": "Mine.on_train_batch_end", "phase": CALLBACKS}
_ENDED = "same number of batches"


@pytest.mark.parametrize(
    ("alone", "hint"),
    [
        pytest.param(calling(0, _SAVE, _OWN, _ZERO, _BATCH, phase=CHECKPOINT), "trainer.save_checkpoint", id="save"),
        pytest.param(calling(0, _SAVE, _OWN, _BATCH, phase=CHECKPOINT), "trainer.save_checkpoint", id="save, if"),
        pytest.param(calling(0, _SAVE, _OWN, _ZERO, phase=EPOCH_END), "trainer.save_checkpoint", id="save at the end"),
        pytest.param(calling(0, _METRIC, _OWN, _ZERO, _BATCH, **_HOOK), "A metric's compute()", id="metric"),
        pytest.param(calling(0, _METRIC, _OWN, _BATCH), "A metric's compute()", id="metric in a step"),
        pytest.param(
            calling(0, _METRIC, _OWN, _ZERO, _EVALUATION, phase=first_of_stage("validation")),
            "A metric's compute()",
            id="metric of a validation",
        ),
        pytest.param(calling(0, _METRIC, _LOG, _OWN, _BATCH), "Logging with sync_dist=True", id="log"),
        pytest.param(calling(0, _METRIC, _LOG, _BATCH), "Logging with sync_dist=True", id="log by Lightning"),
        pytest.param(calling(0, ("trainer/trainer.py", "log_dir"), _OWN, _BATCH), "trainer.log_dir", id="log_dir"),
        pytest.param(
            calling(
                0,
                _OWN,
                _BATCH,
                **_HOOK,
            ),
            "A collective needs all ranks",
            id="own collective",
        ),
        pytest.param(
            calling(0, ("strategies/ddp.py", "broadcast"), _OWN, _ZERO, **_HOOK),
            "A collective needs all ranks",
            id="objects",
        ),
        pytest.param(
            calling(0, ("checkpoint/state_dict.py", "get_model_state_dict"), _OWN, _BATCH, **_HOOK),
            "A whole state dict",
            id="sharded state",
        ),
        pytest.param(calling(0, ("tensor/_api.py", "full_tensor"), _OWN, _BATCH), "A whole state dict", id="tensor"),
        pytest.param(
            calling(0, ("_fully_shard/_fsdp_state.py", "_pre_forward"), _OWN, _BATCH, **_HOOK),
            "A sharded module",
            id="sharded forward",
        ),
        pytest.param(calling(0, _EVALUATION, phase=first_of_stage("validation")), _ENDED, id="uneven, validating"),
        pytest.param(calling(0, _SAVE, phase=CHECKPOINT), _ENDED, id="uneven, Lightning saves"),
        pytest.param(calling(0, phase=END), _ENDED, id="uneven, at the end"),
    ],
)
@pytest.mark.parametrize("has_records", [True, False])
def test_advice_belongs_to_the_operation(alone: RankSnapshot, hint: str, has_records: bool) -> None:
    """If it fails, a user looks for uneven batches who has called on one rank what needs all of them."""
    if has_records:
        alone.collectives = recorded("gxG")
    others = [syncing(number, collectives=recorded("gxX") if has_records else None) for number in (1, 2)]
    found = diagnose([alone, *others])
    assert hint in found.hints[0]
    assert (hint == _ENDED) == any(_ENDED in other for other in found.hints)
    assert found.ranks == (0,)


def test_what_follows_an_end_of_the_same_batches_is_not_uneven() -> None:
    """If it fails, a metric that one rank computes at the end of an epoch is taken for fewer batches."""
    alone = calling(0, _METRIC, _OWN, phase=EPOCH_END, passed=[EPOCH_END], collectives=recorded("gxG"))
    gone_on = syncing(1, passed=[EPOCH_END], collectives=recorded("gxX"))
    assert "A metric's compute()" in diagnose([alone, gone_on]).hints[0]
    assert _ENDED in diagnose([alone, syncing(1, collectives=recorded("gxX"))]).hints[0]
    assert _ENDED in diagnose([alone, syncing(1, passed=[EPOCH_END], step=144)]).hints[0]


def test_what_all_ranks_are_in_is_not_called_alone() -> None:
    """If it fails, a network that does not deliver while all save is blamed on the program."""
    saving = [calling(number, _SAVE, _OWN, collectives=recorded("gxG")) for number in range(3)]
    found = diagnose(saving)
    assert found.kind == "waiting"
    assert "the network does not deliver" in found.hints[0]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([3, 0, 1], "ranks 0, 1, 3"),
        ([*range(63), 64], "ranks 0-62, 64"),
    ],
)
def test_ranks_text(ranks: list[int], text: str) -> None:
    """If it fails, a sentence about a thousand ranks is a page."""
    assert ranks_text(ranks) == text


def test_snapshots_survive_their_files() -> None:
    """If it fails, what a rank has reported is lost between processes, or a file of something else is taken for it."""
    before = syncing(3, stacks={"process 103": {"0x1": ["a.py:1 in f"]}}, missing=["x"])
    assert RankSnapshot.from_plain(before.to_plain()) == before
    for plain in ({}, {"rank": 1}, {"rank": 1, "host": "a", "phase": 99}, {"rank": 1, "host": "a", "phase": "x"}):
        with pytest.raises((ValueError, TypeError)):
            RankSnapshot.from_plain(plain)

"""The sentence about a hang, from snapshots of all ranks."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.text.formatting import ranks_text
from lightning_commopt.watch.hangs import operations
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    DATA,
    END,
    EPOCH_END,
    FORWARD,
    first_of_stage,
)
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from support.known import known
from support.lightnings import PACKAGE

NAMES = ["layer3.0.weight", "layer3.0.bias", "layer3.1.weight"]


def rank(number: int, **fields: Any) -> RankSnapshot:
    return RankSnapshot(rank=number, host="a", **{"pid": 100 + number, "step": 141, "phase": FORWARD, **fields})


def syncing(number: int, **fields: Any) -> RankSnapshot:
    return rank(number, **{"phase": BACKWARD, "bucket": 4, "bucket_names": NAMES, "all_ready": True, **fields})


def exchanging(number: int, **fields: Any) -> RankSnapshot:
    return rank(number, **{"phase": BACKWARD, "fragment": 1, "exchange": 7, "fragment_names": NAMES, **fields})


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


LOST = "RuntimeError: [pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer"


TIMED_OUT = "DistBackendError: Watchdog caught collective operation timeout: NCCL operation timed out"


CASES: dict[str, list[RankSnapshot]] = {
    "a slow dataloader": [syncing(0), syncing(1), rank(2, phase=DATA, place="data.py:33 in __getitem__"), syncing(3)],
    "a rank that comes late to an exchange of DiLoCo": [
        exchanging(0),
        exchanging(1),
        rank(2, step=139, place="model.py:20 in training_step"),
    ],
    "a rank that died before an exchange of DiLoCo": [
        exchanging(0),
        rank(1, state="died", detail="was killed by SIGKILL"),
    ],
    "a slow worker of a dataloader": [
        syncing(0),
        rank(1, phase=DATA, innermost="x.py:1 in f", worker_places=["data.py:9 in read"]),
    ],
    "a stopped process": [rank(0, state="stopped"), syncing(1)],
    "a killed rank whose peer lost its connection": [
        rank(0, state="failed", detail=LOST, ended_unix_s=1.0),
        rank(1, state="died", ended_unix_s=2.0),
    ],
    "an error before another rank died": [
        rank(0, state="failed", detail="KeyError: 'x'", ended_unix_s=1.0),
        rank(1, state="died", ended_unix_s=2.0),
        syncing(2),
    ],
    "a dead rank, and a mismatch recorded by the other": [
        rank(0, state="died", ended_unix_s=1.0),
        syncing(1, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxgxgxx")),
    ],
    "a dead rank, and a broadcast of the other in Lightning's handler of SIGTERM": [
        rank(0, state="died", detail="was killed by SIGKILL", ended_unix_s=1.0),
        syncing(
            1,
            state="failed",
            detail=LOST,
            ended_unix_s=2.0,
            stop_reason="SIGTERM",
            collectives=recorded("gxgxgxgxx"),
        ),
    ],
    "a dead rank, and an epoch of the other that goes on after what has ended the last one": [
        rank(0, state="died", detail="was killed by SIGKILL", ended_unix_s=1.0),
        syncing(1, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxgxgxxgxgxg")),
    ],
    "a dead rank, and regular records": [
        rank(0, state="died", ended_unix_s=1.0),
        syncing(1, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxgxgxgx")),
    ],
    "a dead rank between two": [
        syncing(0, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxx")),
        rank(1, state="died", ended_unix_s=1.0),
        syncing(2, state="failed", detail=LOST, ended_unix_s=2.0, collectives=recorded("gxgxx")),
    ],
    "an error that others notice in different collectives": [
        rank(0, state="failed", detail=LOST, called="all_gather", collectives=recorded("gxg")),
        rank(1, state="failed", detail="KeyError: 'x'", place="a/b.py:3 in f", ended_unix_s=1.0),
        rank(2, phase=BACKWARD, state="failed", detail=LOST, collectives=recorded("gx")),
    ],
    "one rank has gone on to the next step": [
        syncing(0, collectives=recorded("gxgX")),
        rank(1, phase=DATA, step=142, called="broadcast", collectives=recorded("gxgG")),
        syncing(2, collectives=recorded("gxgX")),
    ],
    "one rank has ended the fit": [
        rank(0, state="failed", detail=LOST, ended_unix_s=2.0),
        rank(1, state="finished", step=140),
    ],
    "Ctrl-C on one rank": [rank(0, state="interrupted", detail="KeyboardInterrupt", ended_unix_s=1.0), syncing(1)],
    "SIGTERM ended a rank": [rank(0, state="terminated", detail="SIGTERM", ended_unix_s=1.0), syncing(1)],
    "SIGTERM reached one rank alone": [rank(0, called="broadcast", stop_reason="SIGTERM"), syncing(1)],
    "sys.exit": [rank(0, state="failed", detail="SystemExit: 3", place="a/b.py:3 in f", ended_unix_s=1.0), syncing(1)],
    "a segmentation fault": [rank(0, state="died", detail="was killed by SIGSEGV", ended_unix_s=1.0), syncing(1)],
    "a slow callback": [
        rank(0, phase=CALLBACKS, hook="Upload.on_train_batch_end", innermost="ssl.py:5 in read"),
        syncing(1),
    ],
    "a time-out that NCCL reports": [
        syncing(0, state="failed", detail=TIMED_OUT, ended_unix_s=1.0),
        rank(1, innermost="a.py:1 in f"),
    ],
    "should_stop on one rank": [rank(0, phase=END, called="barrier", stop_reason="trainer.should_stop"), syncing(1)],
    "a slow end of the run": [
        rank(0, phase=END, innermost="ssl.py:5 in read"),
        rank(1, phase=END, called="barrier"),
        finished(2),
    ],
    "one rank waits elsewhere in its stack": [
        syncing(0, **in_stack("b.py")),
        syncing(1, **in_stack("a.py")),
        syncing(2, **in_stack("a.py")),
    ],
    "a dataloader of one rank is elsewhere": [
        rank(0, phase=DATA, **in_stack("b.py")),
        *(rank(n, phase=DATA, **in_stack("a.py")) for n in (1, 2)),
    ],
    "backward against a slow forward": [
        rank(0, phase=BACKWARD, innermost="graph.py:5 in run"),
        rank(1, innermost="a.py:1 in f"),
    ],
    "two ranks that compute": [
        rank(0, phase=BACKWARD, innermost="graph.py:5 in run", collectives=recorded("xx")),
        rank(1, step=140),
    ],
    "a host that does not answer": [
        syncing(0),
        rank(1, state="unreachable", detail="b does not answer at 10.0.0.2:4000 within 8 s"),
    ],
    "a silent host": [
        syncing(0),
        RankSnapshot(rank=1, host="b", state="silent", detail="b does not answer"),
        syncing(2),
    ],
    "a silent host, and a rank behind": [
        syncing(0),
        RankSnapshot(rank=1, host="b", state="silent"),
        syncing(2, step=140),
    ],
    "one rank has ended after the same step": [syncing(0), rank(1, state="finished", step=141)],
    "one rank validates": [syncing(0), rank(1, phase=first_of_stage("validation"), step=140, called="all_reduce")],
    "a checkpoint that one rank writes": [
        rank(0, phase=CHECKPOINT, innermost="io.py:5 in write"),
        rank(1, called="barrier"),
    ],
    "all wait for the same": [syncing(0), syncing(1), syncing(2)],
    **{
        f"a rank of which the kernel says {detail!r}": [rank(0, state="died", detail=detail), syncing(1)]
        for detail in (
            *("", "was killed by SIGKILL", "was killed by SIGBUS", "was killed by SIGSEGV"),
            *("was killed by signal 41", "exited with status 3"),
        )
    },
    "one rank is buckets behind": [syncing(0, ready=5), syncing(1, ready=5), syncing(2, ready=4, bucket=3)],
}


def test_diagnoses(golden: Callable[[str, str], None]) -> None:
    """If it fails, the wrong rank is blamed, or the sentence does not name for what."""
    blocks = []
    for name, snapshots in CASES.items():
        found = diagnose(snapshots[::-1])
        place = f"{found.kind}, {ranks_text(found.ranks)}, {found.phase} of step {found.step}"
        lines = [place, found.sentence, f"operation: {found.operation}", *(f"try: {hint}" for hint in found.hints)]
        blocks.append("\n".join([f"[{name}]", *lines]))
    golden("diagnoses", "\n\n".join(blocks))


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


ALONE: dict[str, RankSnapshot] = {
    "save": calling(0, _SAVE, _OWN, _ZERO, _BATCH, phase=CHECKPOINT),
    "save, if": calling(0, _SAVE, _OWN, _BATCH, phase=CHECKPOINT),
    "save at the end": calling(0, _SAVE, _OWN, _ZERO, phase=EPOCH_END),
    "metric": calling(0, _METRIC, _OWN, _ZERO, _BATCH, **_HOOK),
    "metric in a step": calling(0, _METRIC, _OWN, _BATCH),
    "metric of a validation": calling(0, _METRIC, _OWN, _ZERO, _EVALUATION, phase=first_of_stage("validation")),
    "log": calling(0, _METRIC, _LOG, _OWN, _BATCH),
    "log by Lightning": calling(0, _METRIC, _LOG, _BATCH),
    "log_dir": calling(0, ("trainer/trainer.py", "log_dir"), _OWN, _BATCH),
    "own collective": calling(0, _OWN, _BATCH, **_HOOK),
    "objects": calling(0, ("strategies/ddp.py", "broadcast"), _OWN, _ZERO, **_HOOK),
    "sharded state": calling(0, ("checkpoint/state_dict.py", "get_model_state_dict"), _OWN, _BATCH, **_HOOK),
    "tensor": calling(0, ("tensor/_api.py", "full_tensor"), _OWN, _BATCH),
    "sharded forward": calling(0, ("_fully_shard/_fsdp_state.py", "_pre_forward"), _OWN, _BATCH, **_HOOK),
    "uneven, validating": calling(0, _EVALUATION, phase=first_of_stage("validation")),
    "uneven, Lightning saves": calling(0, _SAVE, phase=CHECKPOINT),
    "uneven, at the end": calling(0, phase=END),
}


@pytest.mark.parametrize("has_records", [True, False])
def test_advice_belongs_to_the_operation(has_records: bool, golden: Callable[[str, str], None]) -> None:
    """If it fails, a user looks for uneven batches who has called on one rank what needs all of them."""
    others = [syncing(number, collectives=recorded("gxX") if has_records else None) for number in (1, 2)]
    blocks = []
    for name, alone in ALONE.items():
        found = diagnose([replace(alone, collectives=recorded("gxG") if has_records else None), *others])
        assert found.ranks == (0,)
        assert name.startswith("uneven") == any(_ENDED in hint for hint in found.hints)
        blocks.append("\n".join([f"[{name}]", *found.hints]))
    golden("advice", "\n\n".join(blocks))


_OF_LIBRARIES = {
    PACKAGE: (_BATCH, _SAVE, _LOG, ("trainer/trainer.py", "log_dir")),
    "lightning_utilities": (_ZERO,),
    "torchmetrics": (_METRIC,),
    "torch.distributed": (*operations._FUNCTIONS["state"], *operations._FUNCTIONS["sharded"]),
}


@pytest.mark.parametrize("package", _OF_LIBRARIES)
def test_the_functions_of_operations_exist(package: str) -> None:
    """If it fails, a new version of a library has moved what an operation is known by, and no advice is given."""
    folder = Path(known(known(importlib.util.find_spec(package)).origin)).parent
    for file, function in _OF_LIBRARIES[package]:
        texts = [path.read_text() for path in folder.rglob(file.rpartition("/")[2]) if path.match(f"*/{file}")]
        assert any(f"def {function}" in text for text in texts), file


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


def test_snapshots_survive_their_files() -> None:
    """If it fails, what a rank has reported is lost between processes, or a file of something else is taken for it."""
    before = syncing(3, stacks={"process 103": {"0x1": ["a.py:1 in f"]}}, missing=["x"])
    assert RankSnapshot.from_plain(before.to_plain()) == before
    for plain in ({}, {"rank": 1}, {"rank": 1, "host": "a", "phase": 99}, {"rank": 1, "host": "a", "phase": "x"}):
        with pytest.raises((ValueError, TypeError)):
            RankSnapshot.from_plain(plain)

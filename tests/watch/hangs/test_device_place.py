"""Where a rank waits whose host is ahead of its GPU, from what torch has recorded of real runs on one."""

import os
import threading
import time
from typing import Any

import pytest

from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import BACKWARD, CALLBACKS, DATA, FORWARD, OPTIMIZER, MarkWriter
from lightning_commopt.watch.hangs.observation import Observation, WatcherSettings
from lightning_commopt.watch.hangs.operations import kind_of
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.transport import RankLink

NAMES = ["extra.bias", "extra.weight", "first.bias", "first.weight"]
PACKAGES = "/x/site-packages"
TRAINER = [
    (f"{PACKAGES}/lightning/pytorch/loops/training_epoch_loop.py", 300, "advance"),
    (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", 1079, "_run"),
]
IN_BROADCAST = [(f"{PACKAGES}/lightning/pytorch/loops/training_epoch_loop.py", 261, "_broadcast_sigterm_tensor")]
IN_SAVE = [
    ("/me/project/train.py", 7, "training_step"),
    (f"{PACKAGES}/lightning/trainer/trainer.py", 1, "save_checkpoint"),
]
SIGTERM = ("broadcast", [1], "Long")
"""Lightning's broadcast of SIGTERM before a batch."""
SYNC = ("all_reduce", [330], "Float")
"""The gradient sync of a model with 330 parameters in one bucket."""


class Rank(RankLink):
    """A rank whose host calls collectives in phases of a step, in the format that torch 2.11 has written of NCCL."""

    def __init__(self, number: int = 0, *, stack: list[tuple[str, int, str]], num_buckets: int = 0) -> None:
        self._entries: list[dict[str, Any]] = []
        self._writer = MarkWriter()
        self._stack = [*stack, *TRAINER]
        self._events: dict[str, Any] = {"device_step": None, "device_bucket": None}
        self._speaks = True
        settings = WatcherSettings(
            rank=number, host="a", pid=os.getpid(), fit_thread=(7, threading.get_native_id()), after_s=5.0, has_gpu=True
        )
        self.observation = Observation(settings, marks_fd=self._writer.fd, stacks_fd=-1, link=self)
        self.observation.learn({"buckets": [[0, NAMES], [1, ["last"]]][: num_buckets or 2], "are_all": num_buckets > 0})

    def enter(self, phase: int, step: int) -> None:
        time.sleep(0.001)
        self._writer.write(kinds.PHASE, phase, step)

    def mark_bucket(self, index: int, *, is_last: bool) -> None:
        """Marks all of a bucket, which the host has called, but the device not done."""
        self._writer.write(kinds.BUCKET_READY, is_last, index)
        self._writer.write(kinds.BUCKET_END, 0, index)

    def call(self, operation: tuple[str, list[int], str], *, is_done: bool = True) -> None:
        time.sleep(0.001)
        name, size, dtype = operation
        number = len(self._entries) + 1
        entry = {
            "collective_seq_id": number,
            "input_dtypes": [dtype],
            "input_sizes": [size],
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "profiling_name": f"nccl:{name}",
            "retired": is_done,
            "state": "completed" if is_done else "scheduled",
            "time_created_ns": time.time_ns(),
            "time_discovered_completed_ns": time.time_ns() if is_done else 0,
        }
        self._entries.append(entry)

    def run_steps(self, *, is_done: bool = True) -> None:
        """Runs steps 2 and 3, and goes on to the next batch, as ranks 0 and 2 did when rank 1 was stopped in step 3."""
        for step in (2, 3):
            self.enter(DATA, step)
            self.call(SIGTERM)
            self.enter(FORWARD, step)
            self.enter(BACKWARD, step)
            self.call(SYNC, is_done=is_done or step < 3)
            self.enter(OPTIMIZER, step)
            self.enter(CALLBACKS, step)
        self.enter(DATA, 4)

    def keep_busy(self, step: int, bucket: int) -> None:
        """Lets the device not have reached the end of a bucket."""
        self._events = {"device_step": step, "device_bucket": bucket}

    def fall_silent(self) -> None:
        """Answers no question for collectives any more."""
        self._speaks = False

    def look(self) -> RankSnapshot:
        self.observation.update()
        found = self.observation.snapshot()
        assert RankSnapshot.from_plain(found.to_plain()) == found
        return found

    def send(self, **message: Any) -> None:
        pass

    def request(self, limit_s: float | None, **message: Any) -> dict[str, Any] | None:
        if "stacks" in message:
            return {"stacks": {"7": self._stack}}
        return {"owner": None, "collectives": {"entries": self._entries}, **self._events} if self._speaks else None


STOPPED = RankSnapshot(rank=1, host="a", pid=9, state="stopped", phase=FORWARD, step=3)
IN_SYNC = "the gradient sync of bucket 0 (extra.bias ... first.weight)"
IN_SIGTERM = "Lightning's broadcast of SIGTERM before a batch"


def described(*ranks: RankSnapshot) -> str:
    """Returns what is reported of ranks that wait for one that is stopped in forward of step 3."""
    return diagnose([STOPPED, *ranks]).sentence.partition("; ")[2]


def test_ranks_that_are_a_batch_ahead_of_their_gradient_sync() -> None:
    """If it fails, ranks with GPUs seem to wait in Lightning's broadcast of the next step, which none has called."""
    found = []
    for number in (0, 2):
        rank = Rank(number, stack=IN_BROADCAST, num_buckets=1)
        rank.run_steps(is_done=False)
        found.append(rank.look())
    first = found[0]
    assert (first.phase, first.step, first.batch, first.bucket, first.ready) == (BACKWARD, 3, -1, 0, 1)
    assert first.is_syncing
    assert (first.hook, first.is_ahead) == (None, True)
    assert described(*found) == f"ranks 0, 2 wait in {IN_SYNC} of step 3"
    assert diagnose([STOPPED, *found]).operation == IN_SYNC


def test_the_second_of_two_buckets_without_marks() -> None:
    """If it fails, buckets of other steps count, or a backward that the host has left seems not to be all ready."""
    rank = Rank(stack=IN_BROADCAST, num_buckets=2)
    rank.enter(BACKWARD, 2)
    rank.call(SYNC)
    rank.call(SYNC)
    rank.enter(BACKWARD, 3)
    rank.call(SYNC)
    rank.call(SYNC, is_done=False)
    found = rank.look()
    assert (found.step, found.bucket, found.ready, found.all_ready, found.is_ahead) == (3, 1, 2, True, False)
    rank.enter(DATA, 4)
    found = rank.look()
    assert (found.phase, found.step, found.bucket, found.ready) == (BACKWARD, 3, 1, 2)
    assert (found.is_syncing, found.is_ahead) == (True, True)


def test_a_backward_that_is_over_without_marks() -> None:
    """If it fails, a bucket that a step has not used keeps a rank from waiting, or later all-reduces count as one."""
    rank = Rank(stack=IN_BROADCAST, num_buckets=2)
    rank.enter(BACKWARD, 3)
    rank.call(SYNC, is_done=False)
    found = rank.look()
    assert (found.bucket, found.ready, found.is_syncing) == (0, 1, False)
    rank.enter(CALLBACKS, 3)
    rank.call(("all_reduce", [1], "Float"), is_done=False)
    found = rank.look()
    assert (found.phase, found.bucket, found.ready, found.is_syncing) == (BACKWARD, 0, 1, True)


def test_marked_buckets_of_the_step_before() -> None:
    """If it fails, with a compressor a bucket of an earlier step is shown as one of the step that the host is in."""
    rank = Rank(stack=IN_BROADCAST)
    rank.enter(BACKWARD, 3)
    for index in (0, 1):
        rank.mark_bucket(index, is_last=index == 1)
        rank.call(("all_gather_into_tensor", [90], "Byte"), is_done=index == 0)
    rank.keep_busy(3, 1)
    assert rank.look().bucket_names == ["last"]
    rank.enter(DATA, 4)
    found = rank.look()
    assert (found.phase, found.step, found.bucket, found.ready, found.is_syncing) == (BACKWARD, 3, 1, 2, True)
    assert described(found) == "rank 0 waits in the gradient sync of bucket 1 (last) of step 3"
    rank.enter(BACKWARD, 4)
    found = rank.look()
    assert (found.step, found.bucket, found.is_syncing) == (3, 1, True)
    rank.keep_busy(2, 0)  # its gradients are still being unpacked
    found = rank.look()
    assert (found.step, found.bucket, found.is_syncing, found.called) == (3, None, False, "all_gather_into_tensor")


def test_a_gather_of_parameters_in_an_earlier_forward() -> None:
    """If it fails, FSDP2's ranks seem to wait where their hosts are, and a checkpoint there is blamed."""
    rank = Rank(stack=IN_SAVE)
    rank.enter(FORWARD, 3)
    rank.call(("_allgather_base", [64], "Float"), is_done=False)
    rank.enter(BACKWARD, 3)
    rank.call(("_reduce_scatter_base", [128], "Float"), is_done=False)
    rank.enter(CALLBACKS, 3)
    found = rank.look()
    assert (found.phase, found.step, found.bucket, found.called) == (FORWARD, 3, None, "allgather_base")
    assert (found.hook, found.place, found.frames, kind_of(found)) == (None, None, [], None)
    assert found.stacks
    assert described(found) == "rank 0 waits in allgather_base (64,) (number 1 of group default) of step 3"


def test_a_collective_of_the_phase_that_the_host_is_in() -> None:
    """If it fails, the line that has called a collective is not reported with it."""
    rank = Rank(stack=IN_SAVE[:1])
    rank.enter(FORWARD, 3)
    rank.call(("all_reduce", [3], "Float"), is_done=False)
    found = rank.look()
    assert (found.phase, found.is_ahead, found.place) == (FORWARD, False, "project/train.py:7 in training_step")
    assert described(found).endswith("of step 3 (project/train.py:7 in training_step)")


def test_a_rank_that_waits_in_the_broadcast_itself() -> None:
    """If it fails, a rank that waits for Lightning's broadcast seems to be in something else."""
    rank = Rank(stack=IN_BROADCAST, num_buckets=1)
    rank.run_steps()
    rank.call(SIGTERM, is_done=False)
    found = rank.look()
    assert (found.phase, found.step, found.called, found.is_ahead) == (DATA, 4, "broadcast", False)
    assert described(found) == f"rank 0 waits in {IN_SIGTERM} of step 4"


def test_a_collective_before_the_broadcast_in_the_same_phase() -> None:
    """If it fails, a rank seems to wait in a broadcast that it has not called."""
    rank = Rank(stack=IN_BROADCAST, num_buckets=1)
    rank.run_steps()
    rank.call(("all_reduce", [3], "Float"), is_done=False)
    assert described(rank.look()) == "rank 0 waits in all_reduce (3,) (number 5 of group default) of step 4"


@pytest.mark.parametrize("num_buckets", [0, 1])
def test_a_device_that_only_computes(num_buckets: int) -> None:
    """If it fails, a rank with a long kernel counts as waiting, and a healthy job may be ended."""
    rank = Rank(stack=IN_BROADCAST, num_buckets=num_buckets)
    rank.enter(BACKWARD, 3)
    rank.call(SYNC)
    if not num_buckets:
        rank.keep_busy(3, 0)
    found = rank.look()
    assert (found.is_waiting, found.phase, found.step) == (False, BACKWARD, 3)
    rank.enter(DATA, 4)
    found = rank.look()
    assert (found.is_waiting, found.phase, found.step, found.is_ahead) == (False, DATA, 4, False)


def test_what_a_device_computes_before_a_batch() -> None:
    """If it fails, a dataloader is blamed for a long kernel, or a healthy job is ended as soon as if it did nothing."""
    rank, other = Rank(1, stack=IN_BROADCAST, num_buckets=1), Rank(0, stack=IN_BROADCAST, num_buckets=1)
    rank.run_steps()
    other.run_steps(is_done=False)
    found = diagnose([other.look(), rank.look()])
    assert found.sentence == f"rank 1 is still computing step 3 on its device; rank 0 waits in {IN_SYNC} of step 3"
    assert (found.kind, found.ranks, found.verdict) == ("late", (1,), "non-communication slow")
    assert found.hints[0].startswith("Compare that device with the others")
    rank.enter(FORWARD, 4)
    rank.enter(DATA, 4)  # of a batch whose gradients are accumulated in the same step
    sentence = diagnose([other.look(), rank.look()]).sentence
    assert sentence.startswith("rank 1 is still computing what it called before this batch of step 4 on its device; ")
    rank.fall_silent()
    assert not rank.look().is_computing


def test_a_rank_that_does_not_say_what_its_device_is_in() -> None:
    """If it fails, a rank whose NCCL has an error seems to be busy, or to be ahead of those that wait with it."""
    silent, other = (Rank(number, stack=IN_BROADCAST, num_buckets=1) for number in (0, 2))
    for rank in (silent, other):
        rank.run_steps(is_done=False)
    silent.fall_silent()
    found, known = silent.look(), other.look()
    assert found.is_waiting
    assert any("has not answered" in line for line in found.missing)
    assert described(found, known) == f"rank 0 waits in {IN_SIGTERM} of step 4; rank 2 waits in {IN_SYNC} of step 3"
    assert diagnose([STOPPED, found, known]).operation == IN_SYNC
    assert diagnose([found, known]).ranks == (0, 2)
    assert diagnose([found, found]).ranks == (0, 0)


def test_a_busy_rank_that_does_not_answer() -> None:
    """If it fails, a rank without an answer counts as waiting wherever it is."""
    rank = Rank(stack=IN_SAVE[:1])
    rank.enter(FORWARD, 3)
    rank.fall_silent()
    assert not rank.look().is_waiting


def test_a_rank_that_has_raised_while_its_device_was_behind() -> None:
    """If it fails, an exception in forward is reported as one in the backward before."""
    rank = Rank(stack=[])
    rank.enter(BACKWARD, 2)
    rank.call(SYNC, is_done=False)
    rank.enter(FORWARD, 3)
    raised = {"ended": "failed", "raised": [*IN_SAVE[:1], *TRAINER], "dump": rank.request(1.0, dump=True)}
    rank.observation.learn({**raised, "detail": "KeyError: 'x'"})
    found = rank.look()
    assert (found.phase, found.step, found.place) == (FORWARD, 3, "project/train.py:7 in training_step")
    rank.observation.learn({**raised, "detail": "ncclRemoteError: Connection closed by remote peer"})
    found = rank.look()
    assert (found.phase, found.step, found.place) == (BACKWARD, 2, None)

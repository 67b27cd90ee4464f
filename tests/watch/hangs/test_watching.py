"""What a watcher needs of a rank: marks in shared memory, limits of phases, stacks of a stuck process, files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import NUM_BYTES, MarkWriter, read_marks
from lightning_commopt.watch.hangs.native import catches, descendants, is_alive, process_state
from lightning_commopt.watch.hangs.phases import BACKWARD, CHECKPOINT, DATA, FORWARD, PhaseTimes
from lightning_commopt.watch.hangs.reading import read_left_behind
from lightning_commopt.watch.hangs.records import Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot, place_in_training
from lightning_commopt.watch.hangs.stacks import SIGNAL, Frame, collective_in, dump_stacks, parse_stacks, user_place


def test_marks_keep_the_newest() -> None:
    """If it fails, a rank that trains long is seen where it was, or a mark is read as another."""
    writer = MarkWriter()
    for step in range(5000):
        writer.write(kinds.PHASE, FORWARD, step)
    found = read_marks(os.pread(writer.fd, NUM_BYTES, 0))
    os.close(writer.fd)
    assert [mark.value for mark in found] == list(range(5000 - len(found), 5000))
    assert [mark.at_s for mark in found] == sorted(mark.at_s for mark in found)
    assert {(mark.kind, mark.code) for mark in found} == {(kinds.PHASE, FORWARD)}
    assert read_marks(b"\0" * 100) == []


def test_place_in_training() -> None:
    """If it fails, a rank is said to wait for a bucket that has arrived, or for one of an earlier step."""
    writer = MarkWriter()

    def place() -> dict[str, object]:
        found = place_in_training(read_marks(os.pread(writer.fd, NUM_BYTES, 0)), {0: ["a"], 1: ["b", "c"]})
        return {name: found[name] for name in ("phase", "step", "ready", "bucket", "bucket_names", "all_ready")}

    for step in (6, 7):
        writer.write(kinds.PHASE, BACKWARD, step)
        for bucket in (0, 1):
            writer.write(kinds.BUCKET_READY, bucket, bucket)
        writer.write(kinds.BUCKET_END, 0, 0)
        if step == 6:
            writer.write(kinds.BUCKET_END, 0, 1)
            writer.write(kinds.PHASE, DATA, 7)
            assert place() == {
                **dict.fromkeys(("bucket",)),
                "phase": DATA,
                "step": 7,
                "ready": 0,
                "bucket_names": [],
                "all_ready": False,
            }
    assert place() == {
        "phase": BACKWARD,
        "step": 7,
        "ready": 2,
        "bucket": 1,
        "bucket_names": ["b", "c"],
        "all_ready": True,
    }


def test_limits_follow_what_a_run_has_shown() -> None:
    """If it fails, a slow phase raises a false alarm, or a compiled first step makes later hangs last for hours."""
    times = PhaseTimes(after_s=60)
    assert times.limit_s(FORWARD) == 600
    times.add(FORWARD, 400)
    times.add(FORWARD, 1)
    assert times.limit_s(FORWARD) == 60
    times.add(FORWARD, 30)
    assert times.limit_s(FORWARD) == 90
    for _ in range(50):
        times.add(FORWARD, 0.1)
    assert times.limit_s(FORWARD) == 60
    times.add(CHECKPOINT, 1)
    assert times.limit_s(CHECKPOINT) == 600
    times.add(CHECKPOINT, 300)
    assert times.limit_s(CHECKPOINT) == 900


_STUCK = """
import sys, threading, time
from lightning_commopt.watch.hangs.stacks import make_dumpable
fd = make_dumpable()
def in_thread():
    threading.Event().wait()
def in_main():
    print(fd, threading.get_ident(), flush=True)
    time.sleep(600)
threading.Thread(target=in_thread, daemon=True).start()
in_main()
"""


def test_stacks_of_a_process_that_is_stuck() -> None:
    """If it fails, a report has no lines, or asking ends a process that does not know the signal."""
    with subprocess.Popen([sys.executable, "-c", _STUCK], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            fd, ident = map(int, process.stdout.readline().split())
            own = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDWR)
            stacks = parse_stacks(dump_stacks(process.pid, own, limit_s=60))
            os.close(own)
            assert [frame.function for frame in stacks.pop(ident)] == ["in_main", "<module>"]
            (frames,) = stacks.values()
            assert ("<string>", "in_thread") in [(frame.file, frame.function) for frame in frames]
            assert process.pid in descendants(os.getpid())
            assert process_state(process.pid).state == "sleeping"
            assert process_state(process.pid).num_threads == 2
        finally:
            process.kill()
    assert not is_alive(process.pid)
    assert process_state(process.pid).state == "dead"
    assert not catches(process.pid, SIGNAL)


def test_frames_that_matter() -> None:
    """If it fails, a sentence points into a library, or a rank that waits is taken for one that works."""
    trainer = Frame("/x/site-packages/lightning/pytorch/trainer/trainer.py", 9, "fit")
    own = Frame("/home/me/project/train.py", 3, "training_step")
    script = Frame("/home/me/project/main.py", 1, "<module>")
    wait = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 5, "all_gather")
    inner = Frame("/x/lib/python3.11/threading.py", 2, "wait")
    assert user_place([wait, own, trainer, script]) == own
    assert user_place([inner, wait, trainer, script]) is None
    assert collective_in([inner, wait, own]) == "all_gather"
    assert collective_in([inner, own]) is None
    assert str(own) == "project/train.py:3 in training_step"


def test_files_of_a_job_that_was_killed(tmp_path: Path) -> None:
    """If it fails, what ranks left cannot be read, or a file that was cut breaks the doctor."""
    writer = MarkWriter()
    writer.write(kinds.PHASE, FORWARD, 3)
    marks = read_marks(os.pread(writer.fd, NUM_BYTES, 0))
    os.close(writer.fd)
    for rank in (0, 1):
        snapshot = RankSnapshot(rank=rank, host="a", phase=FORWARD, step=3 - rank)
        Records(tmp_path / "hangs", rank).keep(snapshot, marks)
    found = read_left_behind(tmp_path)
    assert not found.was_reported
    assert [each.step for each in found.snapshots] == [3, 2]
    assert [(mark.kind, mark.code, mark.value) for mark in found.marks[1]] == [(kinds.PHASE, FORWARD, 3)]
    path = tmp_path / "hangs" / "rank_1.json"
    whole = path.read_text()
    for text in (whole[:40], "", "[]", "{}", whole.replace('"marks"', '"other"')):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"rank_1\.json is not a file of HangMonitor, or was cut"):
            read_left_behind(tmp_path)
    Records(tmp_path / "hangs", 1).discard()
    Records(tmp_path / "hangs", 0).discard()
    with pytest.raises(FileNotFoundError, match=r"has no report\.json and no rank_"):
        read_left_behind(tmp_path)


def test_a_folder_that_is_used_again(tmp_path: Path) -> None:
    """If it fails, a new hang is explained with what another run has left."""
    folder = tmp_path / "hangs"
    left = [RankSnapshot(rank=rank, host="a", step=3) for rank in range(4)]
    for each in left:
        Records(folder, each.rank).keep(each, [])
    Records(folder, 0).report(diagnose(left), left, 1.0)
    assert read_left_behind(tmp_path).was_reported
    for rank in (1, 0):
        Records(folder, rank).begin(world_size=2)
    assert sorted(path.name for path in folder.iterdir()) == ["previous_report.json"]
    Records(tmp_path / "new", 0).begin(world_size=2)
    assert not (tmp_path / "new").exists()


def test_a_watcher_is_light() -> None:
    """If it fails, every rank costs another import of torch."""
    program = (
        "import sys, lightning_commopt.watch.hangs.watcher; print({'torch', 'lightning', 'rich'} & {*sys.modules})"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"

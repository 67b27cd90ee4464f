"""What a watcher needs of a rank: marks in shared memory, limits of phases, stacks of a stuck process, files."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import lightning_commopt
from lightning_commopt.callbacks import all_ranks
from lightning_commopt.compat.hooks import activity_of, handles_sigterm
from lightning_commopt.compat.torch import flight_records
from lightning_commopt.measure.observer import APPLIED, DUE, END, START, BucketInfo
from lightning_commopt.watch import epoch_ends
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs import rank_side
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    NUM_BYTES,
    MarkWriter,
    PhaseTimes,
    read_marks,
)
from lightning_commopt.watch.hangs.observation import Observation, WatcherSettings
from lightning_commopt.watch.hangs.process import (
    ComputingProbe,
    catches,
    descendants,
    find_exit,
    is_alive,
    is_asleep,
    process_state,
    thread_cpu_s,
)
from lightning_commopt.watch.hangs.rank_side import MarkedSync, WatchedRank
from lightning_commopt.watch.hangs.records import Records, read_hang_report
from lightning_commopt.watch.hangs.snapshot import RankSnapshot, fragment_key, place_in_training
from lightning_commopt.watch.hangs.stacks import (
    SIGNAL,
    Frame,
    collective_in,
    dump_stack,
    user_place,
)
from lightning_commopt.watch.hangs.transport import RankLink
from support.commopt import commopt
from support.ranks import run_ranks


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


def place(writer: MarkWriter, *fields: str) -> list[object]:
    """Returns fields of a snapshot that follow from marks."""
    names = {0: ["a"], 1: ["b", "c"], fragment_key(1): ["d", "e"]}
    found = place_in_training(read_marks(os.pread(writer.fd, NUM_BYTES, 0)), names)
    return [found[name] for name in fields]


def test_place_in_training() -> None:
    """If it fails, a rank seems to wait for a bucket that has arrived, or for one of an earlier step."""
    writer, fields = MarkWriter(), ("phase", "step", "ready", "bucket", "bucket_names", "all_ready")
    for step in (6, 7):
        writer.write(kinds.PHASE, BACKWARD, step)
        for bucket in (0, 1):
            writer.write(kinds.BUCKET_READY, bucket, bucket)
        writer.write(kinds.BUCKET_END, 0, 0)
        if step == 6:
            writer.write(kinds.BUCKET_END, 0, 1)
            writer.write(kinds.PHASE, DATA, 7)
            assert place(writer, *fields) == [DATA, 7, 0, None, [], False]
    assert place(writer, *fields) == [BACKWARD, 7, 2, 1, ["b", "c"], True]


def test_the_exchange_that_a_step_waits_for() -> None:
    """If it fails, a rank seems to wait for an exchange of DiLoCo that has arrived, or for none."""
    writer, fields = MarkWriter(), ("fragment", "exchange", "fragment_names", "bucket")
    observer = MarkedSync(SimpleNamespace(mark=writer.write, name_buckets=lambda names: None))  # type: ignore[arg-type]
    for number in range(2):
        sync = observer.exchange(BucketInfo(1, 8, ("d", "e"), True))
        sync.note(START)
        sync.note(DUE)
        assert place(writer, *fields) == [1, number, ["d", "e"], None]
        sync.note(END, 8)
        sync.note(APPLIED)
        assert place(writer, *fields) == [None, None, [], None]


def test_the_ends_that_a_rank_has_passed() -> None:
    """If it fails, ranks that have ended the same batches seem to have different numbers of them."""
    writer, validation = MarkWriter(), kinds.first_of_stage("validation")
    for code, step, expected in (
        (DATA, 6, []),
        (CHECKPOINT, 6, []),
        (validation, 6, [validation]),
        (kinds.EPOCH_END, 6, [kinds.EPOCH_END, validation]),
        (BACKWARD, 6, [kinds.EPOCH_END, validation]),
        (DATA, 7, []),
    ):
        writer.write(kinds.PHASE, code, step)
        assert place(writer, "passed") == [expected]


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
    while True:
        pass
def in_main():
    print(fd, thread.native_id, flush=True)
    time.sleep(600)
thread = threading.Thread(target=in_thread, daemon=True)
thread.start()
in_main()
"""


def test_stack_of_a_thread_that_is_stuck() -> None:
    """If it fails, a report has no lines, or asking ends a process that does not know the signal."""
    with subprocess.Popen([sys.executable, "-c", _STUCK], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            fd, busy = map(int, process.stdout.readline().split())
            own = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDWR)
            while not is_asleep(process.pid, process.pid):  # else the test ends at its time limit
                pass
            frames = dump_stack(process.pid, process.pid, own, limit_s=60)
            os.close(own)
            assert [frame.function for frame in frames] == ["in_main", "<module>"]
            assert not is_asleep(process.pid, busy)
            assert process.pid in descendants(os.getpid())
            assert process_state(process.pid).state == "sleeping"
            assert process_state(process.pid).num_threads == 2
        finally:
            process.kill()
    assert not is_alive(process.pid)
    assert process_state(process.pid).state == "dead"
    assert not catches(process.pid, SIGNAL)


_BUSY = """
import socket, sys, threading, time
from lightning_commopt.watch.hangs.stacks import make_dumpable, own_stacks
from lightning_commopt.watch.hangs.transport import RankLink
link = RankLink(socket.socket(fileno=int(sys.argv[1])))
link.start(lambda question: {"stacks": own_stacks()})
def deeper(n):
    return [deeper(n - 1) for _ in range(1)] if n else []
def busy():
    while True:
        deeper(20)
def starting():
    while True:
        threads = [threading.Thread(target=deeper, args=(10,)) for _ in range(5)]
        any(thread.start() for thread in threads)
        any(thread.join() for thread in threads)
threading.Thread(target=busy, daemon=True).start()
threading.Thread(target=starting, daemon=True).start()
print(threading.get_ident(), threading.get_native_id(), make_dumpable(), flush=True)
busy()
"""


@pytest.mark.parametrize("num_snapshots", [10, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_a_process_that_runs_python_survives_snapshots(num_snapshots: int) -> None:
    """If it fails, a healthy rank that is slow crashes because somebody looks at it."""
    own, theirs = socket.socketpair()
    command = [sys.executable, "-c", _BUSY, str(theirs.fileno())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]) as process:
        try:
            theirs.close()
            assert process.stdout is not None
            ident, thread, fd = map(int, process.stdout.readline().split())
            link = RankLink(own)
            link.start(lambda question: {})
            stacks_fd = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDWR)
            settings = WatcherSettings(rank=0, host="here", pid=process.pid, fit_thread=(ident, thread), after_s=60)
            observation = Observation(settings, marks_fd=MarkWriter().fd, stacks_fd=stacks_fd, link=link)
            for _ in range(num_snapshots):
                assert "busy" in observation.snapshot().frames[-2]
            assert process.poll() is None
            link.close()
            os.close(stacks_fd)
        finally:
            process.kill()


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
    launched = Frame("/x/site-packages/torch/distributed/elastic/multiprocessing/api.py", 9, "_wrap")
    sharded = Frame("/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", 9, "_pre_forward")
    saving = Frame("/x/site-packages/torch/distributed/checkpoint/filesystem.py", 9, "write_data")
    assert collective_in([own, sharded, trainer, launched]) is None
    assert collective_in([saving, trainer]) is None
    assert collective_in([sharded, own, trainer, launched]) == "_pre_forward"  # nothing else has been called
    ddp = Frame("/x/site-packages/torch/nn/parallel/distributed.py", 9, "_distributed_broadcast_coalesced")
    assert collective_in([ddp, trainer]) == "broadcast"
    assert collective_in([Frame("/x/site-packages/torch/nn/modules/linear.py", 9, "forward"), ddp, trainer]) is None
    for module in (epoch_ends, all_ranks):
        meeting = Frame(str(module.__file__), 9, "leave")
        assert collective_in([Frame("/x/store.py", 1, "check"), meeting, trainer]) == "a meeting of all ranks"
    assert str(own) == "project/train.py:3 in training_step"


def test_files_of_a_job_that_was_killed(tmp_path: Path) -> None:
    """If it fails, what ranks left cannot be read, or a file that was cut breaks the doctor."""
    folder, mark = tmp_path / "hangs", kinds.Mark(1.0, 1, kinds.PHASE, FORWARD, 3)
    for rank in (0, 1):
        Records(folder, rank).keep(RankSnapshot(rank=rank, host="a", phase=FORWARD, step=3 - rank), [mark])
    found = read_hang_report(tmp_path)
    assert not found.was_reported
    assert [each.step for each in found.snapshots] == [3, 2]
    assert [(mark.kind, mark.code, mark.value) for mark in found.marks[1]] == [(kinds.PHASE, FORWARD, 3)]
    path = folder / "rank_1.json"
    whole = path.read_text()
    assert found.at_unix_s == json.loads(whole)["written_unix_s"]
    for text in (whole[:40], "", "[]", "{}", whole.replace('"marks"', '"other"'), whole.replace('": 0.0', '": NaN')):
        path.write_text(text)
        found = read_hang_report(tmp_path)
        assert [each.rank for each in found.snapshots] == [0]
        (problem,) = found.problems
        assert problem.startswith(f"{path} is ")
    assert "rank_1.json is " in " ".join(commopt("doctor", tmp_path).output.split())
    path.with_name("rank_0.json").write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match=r"rank_0\.json is not a file of HangMonitor, or .*: it is binary; .*rank_1"):
        read_hang_report(tmp_path)
    for rank in (0, 1):
        Records(folder, rank).discard()
    with pytest.raises(FileNotFoundError, match=r"has no report\.json and no rank_"):
        read_hang_report(tmp_path)


def test_what_is_whole_of_a_report_and_its_ranks_is_read(tmp_path: Path) -> None:
    """If it fails, one file that was cut hides what the others say of a hang."""
    folder = tmp_path / "hangs"
    ranks = [RankSnapshot(rank=rank, host="a", step=3, state="running" if rank else "died") for rank in range(2)]
    for each in ranks:
        Records(folder, each.rank).keep(each, [])
    Records(folder, 0).report(diagnose(ranks), ranks, 1.0)
    whole, kept = read_hang_report(tmp_path), (folder / "report.json").read_bytes()
    assert (whole.problems, [*whole.marks]) == ((), [0, 1])
    for content in (kept[:-9], b"", b"\xff", b"[]", b"{}", kept.replace(b'"time_unix_s": ', b'"time_unix_s": -')):
        (folder / "report.json").write_bytes(content)
        found = read_hang_report(tmp_path)
        assert (found.was_reported, found.diagnosis, found.snapshots) == (True, whole.diagnosis, whole.snapshots)
        assert [problem.startswith(f"{folder / 'report.json'} is ") for problem in found.problems] == [True]
    (folder / "report.json").write_bytes(kept)
    (folder / "rank_1.json").write_text("{")
    found = read_hang_report(tmp_path)
    assert (found.diagnosis, found.at_unix_s, found.snapshots) == (whole.diagnosis, whole.at_unix_s, whole.snapshots)
    assert ([*found.marks], len(found.problems)) == ([0], 1)


def test_a_folder_that_is_used_again(tmp_path: Path) -> None:
    """If it fails, a new hang is explained with what another run has left."""
    folder = tmp_path / "hangs"
    left = [RankSnapshot(rank=rank, host="a", step=3) for rank in range(4)]
    for each in left:
        Records(folder, each.rank).keep(each, [])
    Records(folder, 0).report(diagnose(left), left, 1.0)
    assert read_hang_report(tmp_path).was_reported
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


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os._exit(3)", "exited with status 3"),
        ("os._exit(0)", "exited with status 0"),
    ],
)
def test_how_a_process_has_ended(ends: str, text: str) -> None:
    """If it fails, a rank that has called os._exit, or has crashed, is taken for one that is out of memory."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", f"import os, signal; input(); {ends}"], stdin=subprocess.PIPE
        ) as process,
        killing(process),
    ):
        assert find_exit(process.pid) is None
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert find_exit(process.pid) == text
    assert find_exit(process.pid) is None


@contextmanager
def killing(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


@pytest.mark.parametrize(("share", "computes"), [(1.0, True), (0.3, True), (0.0, False)])
def test_whether_a_thread_computes(share: float, computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a rank that computes for long on the CPU is ended as one that hangs, or one that sleeps is not."""
    now_s = 1000.0  # a clock of its own, as the samples of a busy machine may be any time apart
    module = "lightning_commopt.watch.hangs.process"
    monkeypatch.setattr(f"{module}.thread_cpu_s", lambda pid, thread: share * now_s)
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: now_s))
    probe = ComputingProbe(1, 1, after_s=0.04)
    for idle_s in (0.0, 1.0, 1.0):
        assert not probe.is_computing()
        probe.sample(idle_s, with_children=False)
        now_s += 0.003
    assert probe.is_computing() == computes
    probe.sample(0.0, with_children=False)
    assert not probe.is_computing()


def test_cpu_time_of_a_thread() -> None:
    """If it fails, no rank is ever seen to compute."""
    before_s, thread = thread_cpu_s(os.getpid(), threading.get_native_id()), threading.get_native_id()
    while thread_cpu_s(os.getpid(), thread) < before_s + 0.05:
        sum(range(10000))
    assert thread_cpu_s(os.getpid(), 2**22 + 1) == 0.0


_TRAINER = "/x/lightning/pytorch/trainer"
CALLBACK, MODULE = (
    ("/x/site-packages/lightning/pytorch/trainer/call.py", function)
    for function in ("_call_callback_hooks", "_call_lightning_module_hook")
)
STEP = ("/x/site-packages/lightning/pytorch/loops/training_epoch_loop.py", "advance")
READ, BROADCAST = ("/x/ssl.py", "read"), ("/x/torch/distributed/distributed_c10d.py", "broadcast")
SIGTERM = (f"{_TRAINER}/connectors/signal_connector.py", "_sigterm_notifier_fn")
LOGGER = (f"{_TRAINER}/connectors/logger_connector/logger_connector.py", "log_metrics")
SAVE = [
    (f"{_TRAINER}/trainer.py", "save_checkpoint"),
    ("/x/lightning/pytorch/callbacks/model_checkpoint.py", "on_train_batch_end"),
]
LOOPS = "/x/lightning/pytorch/loops/training_epoch_loop.py"


def own(function: str) -> tuple[str, str]:
    return "/me/a.py", function


@pytest.mark.parametrize(
    ("frames", "activity"),
    [
        ([READ, own("on_train_batch_end"), CALLBACK, STEP], ("hook", "callback", "on_train_batch_end")),
        ([own("on_fit_end"), ("/x/rank_zero.py", "wrapped_fn"), CALLBACK, STEP], ("hook", "callback", "on_fit_end")),
        ([own("on_train_epoch_end"), MODULE, STEP], ("hook", "module", "on_train_epoch_end")),
        ([BROADCAST, SIGTERM, own("on_train_batch_end"), CALLBACK], ("SIGTERM", "", "")),
        ([READ, own("_upload"), CALLBACK, STEP], ("hook", "callback", "_upload")),
        (
            [READ, own("log_metrics"), ("/x/lightning/fabric/utilities/rank_zero.py", "wrapped_fn"), LOGGER, STEP],
            ("hook", "logger", "log_metrics"),
        ),
        ([own("training_step"), own("optimizer_step"), MODULE], None),
        ([("/x/io.py", "write"), *SAVE, CALLBACK], ("checkpoint", "", "")),
        ([BROADCAST, (LOOPS, "_broadcast_sigterm_tensor"), STEP], ("SIGTERM broadcast", "", "")),
        ([("/x/queue.py", "get"), ("/x/pytorch_lightning/loops/fetchers.py", "__next__"), STEP], ("data", "", "")),
    ],
)
def test_the_hook_that_a_thread_is_in(frames: list[tuple[str, str]], activity: tuple[str, str, str] | None) -> None:
    """If it fails, another callback that takes long is reported as the dataloader."""
    assert activity_of(frames) == activity


@pytest.mark.parametrize(("name", "is_handler"), [("_sigterm_notifier_fn", True), ("teardown", False)])
def test_lightnings_handler_of_sigterm(name: str, is_handler: bool) -> None:
    """If it fails, what Lightning calls on SIGTERM passes for a mistake of the program."""
    namespace: dict[str, Any] = {}
    code = f"def {name}(inner): return inner()"
    exec(compile(code, "lightning/pytorch/trainer/connectors/signal_connector.py", "exec"), namespace)
    assert namespace[name](lambda: handles_sigterm(sys._getframe())) == is_handler


def test_a_gpu_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, an error of CUDA is hidden by a second one, out of ``on_exception``."""

    class Event:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    events: Any = [(3, 0, Event())]
    found = rank_side.describe_work(None, events)
    assert found["missing"] == (
        "buckets on the device: RuntimeError: CUDA error: an illegal memory access was encountered"
    )


@pytest.mark.parametrize("has_backends", [True, False])
def test_the_recorders_of_all_backends(has_backends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, collectives of NCCL are missing next to those of gloo, or come twice."""

    def entry(number: int, name: str) -> dict[str, Any]:
        return {"collective_seq_id": number, "profiling_name": name, "time_created_ns": number, "process_group": ["0"]}

    recorders = {"gloo": [entry(2, "gloo:all_reduce")], "nccl": [entry(1, "nccl:broadcast"), entry(3, "nccl:barrier")]}

    def dump(includeCollectives: bool, onlyActive: bool, backend: str = "gloo") -> bytes:  # noqa: N803
        return json.dumps({"entries": recorders[backend]} if backend in recorders else {}).encode()

    def dump_nccl(includeCollectives: bool, onlyActive: bool) -> bytes:  # noqa: N803
        return dump(includeCollectives, onlyActive, "nccl")

    dump.__doc__ = "dump(includeCollectives, onlyActive, backend='gloo')" if has_backends else "dump()"
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", dump, raising=False)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump_nccl, raising=False)
    assert [each["collective_seq_id"] for each in flight_records()["entries"]] == [1, 2, 3]


def test_where_a_watcher_listens_if_the_master_is_loopback_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, rank 0's watcher cannot be reached from other hosts, as its own name means 127.0.1.1 there."""
    ips = {"master": "127.0.1.1", "10.9.9.9": "10.9.9.1"}
    monkeypatch.setattr(rank_side, "find_own_ip", lambda towards, port=0: ips[towards])
    heard: list[dict[str, Any]] = []

    def request(limit_s: float | None, **question: Any) -> dict[str, Any]:
        heard.append(question)
        return {"port": 7}

    link: Any = SimpleNamespace(send=lambda **message: heard.append(message), request=request)
    of_the_other = {"ip": "10.9.9.9", "address": ["10.9.9.9", 8, "b"]}
    rank_side.exchange_addresses(("master", 1), lambda name, own: [own, of_the_other[name]], link)
    assert heard == [
        {"listen": "10.9.9.1"},
        {"peers": [["10.9.9.1", 7, socket.gethostname()], ["10.9.9.9", 8, "b"]]},
    ]


def test_other_ranks_are_no_workers() -> None:
    """If it fails, rank 0, which has started the others, is reported in a dataloader where another rank is."""
    sleep = "print(flush=True); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}, *sys.argv[1:]])"
    watcher = "lightning_commopt.watch.hangs.watcher"
    with (
        subprocess.Popen([sys.executable, "-c", start, watcher], stdin=PIPE, stdout=PIPE) as rank,
        subprocess.Popen([sys.executable, "-c", start], stdin=PIPE, stdout=PIPE) as worker,
    ):
        for process in (rank, worker):
            assert process.stdout is not None
            process.stdout.readline()
        found = descendants(os.getpid())
        own = descendants(worker.pid)
        assert len(own) == 1
        assert {worker.pid, *own} <= {*found}
        assert rank.pid not in found


def _meet_beside_files() -> bool:
    site = Path(f"site_{dist.get_rank()}")
    package = Path(lightning_commopt.__file__).parent
    copy = shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (Path(), site):
        (folder / "hmac.py").write_text("raise RuntimeError('no module of Python')")
    options: dict[str, Any] = {"after_s": 60.0, "action": "report", "main_address": ("localhost", 0)}
    with patch.object(rank_side, "__file__", str(copy / "watch" / "hangs" / "rank_side.py")):
        watched = WatchedRank(folder=Path("hangs"), device=torch.device("cpu"), **options)
    has_met = watched.meet()
    watched.close()
    return has_met


@pytest.mark.exhaustive
def test_a_watcher_imports_nothing_from_the_folders_of_its_rank_and_its_package() -> None:
    """If it fails, a file there that is named as a module of Python is run, and training waits for watchers."""
    assert run_ranks(_meet_beside_files) == [True, True]


def _meet_after_the_end_of_rank_0() -> bool:
    options: dict[str, Any] = {"after_s": 60.0, "action": "report", "main_address": ("localhost", 0)}
    with patch.object(rank_side, "exchange_addresses", side_effect=RuntimeError("Connection reset by peer")):
        watched = WatchedRank(folder=Path("hangs"), device=torch.device("cpu"), **options)
        is_over = watched.meet()
    watched.close()
    return is_over


def test_nobody_waits_for_watchers_once_the_store_has_ended() -> None:
    """If it fails, ranks wait a minute at the end of a short prediction or validation, of which rank 0 is through."""
    assert run_ranks(_meet_after_the_end_of_rank_0) == [True, True]

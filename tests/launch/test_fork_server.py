"""What a forked process finds, against what `python -m` finds; the module is one that only looks around."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.lab_traces import machine_traces
from support.process_groups import is_group_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server needs Linux")

LIMIT_S = 240

PROBE = """
import json, logging, os, random, signal, sys, threading
import numpy, torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
import __main__
found = {
    "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(), "path": sys.path, "spec": __main__.__spec__.name,
    "rank": rank_zero_only.rank, "threads": torch.get_num_threads(),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
    "stdin": sys.stdin.read(), "unbuffered": sys.stdout.write_through, "encoding": sys.stdout.encoding,
    "python_threads": threading.active_count(), "loggers": len(logging.getLogger().handlers),
    "cuda": torch.cuda.is_initialized(), "leads": os.getsid(0) == os.getpid(),
    "files": sorted(os.listdir("/proc/self/fd"))[:4],
}
drawn = [random.random(), float(numpy.random.rand()), torch.initial_seed()]
print(json.dumps([found, drawn]))
"""

SERVER = """
import json, os, sys
import numpy, torch, lightning.pytorch
from lightning_commopt.launch.fork_server import ForkServer
server = ForkServer("probe")
os.environ["OF_THE_PARENT"] = "1"
arguments = json.loads(sys.argv[1])
started = []
for env in arguments:
    command = [sys.executable, "-m", "probe", "a=1"]
    process = server.start(command, env=env, folder="inner", is_session=True)
    output = process.stdout.read().decode()
    started.append([output, process.wait()])
print(json.dumps(started))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    (folder / "inner").mkdir()
    (folder / "inner" / "probe.py").write_text(PROBE)
    (folder / "server.py").write_text(SERVER)
    return folder


@pytest.mark.exhaustive  # starts many processes that import everything
def test_a_forked_process_finds_what_a_new_one_finds(folder):
    """If it fails, a job of a sweep is not the run that the same command line makes."""
    base = {**os.environ, "PYTHONUNBUFFERED": "1"}
    base.pop("OMP_NUM_THREADS", None)
    envs = [base, {**base, "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}]
    # The module is found where the process starts, as with python -m.
    served = subprocess.run(
        [sys.executable, "server.py", json.dumps(envs)],
        cwd=folder,
        env=base,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert served.returncode == 0, served.stderr
    forked = json.loads(served.stdout)
    draws = []
    for env, (output, status) in zip(envs, forked, strict=True):
        new = subprocess.run(
            [sys.executable, "-m", "probe", "a=1"],
            cwd=folder / "inner",
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            start_new_session=True,
        )
        assert (status, new.returncode) == (0, 0), output + new.stderr
        (found, drawn), (expected, drawn_anew) = json.loads(output), json.loads(new.stdout)
        assert found.pop("env") == env
        assert expected.pop("env").items() >= env.items(), "importing adds to it, also in the process that asks"
        assert found == expected
        draws += [*drawn, *drawn_anew]
    assert len(set(draws)) == len(draws), "no two processes draw the same numbers"


JOB = """
import os, subprocess, sys, time
what = sys.argv[1]
if what == "child":
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    os.write(1, str(os.getpid()).encode())
elif what == "status":
    sys.exit(3)
elif what == "text":
    sys.exit("no such thing")
elif what == "interrupt":
    os.kill(os.getpid(), 2)
    time.sleep(600)
elif what == "last_words":
    import atexit, threading
    kept_open = open("last_words.txt", "w")
    kept_open.write("unflushed")
    print("out")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    atexit.register(print, "exit handler")
elif what == "signal":
    os.kill(os.getpid(), 9)
elif what == "error":
    raise ValueError("this value")
elif what == "wait":
    os.write(1, b"%d " % os.getpid())
    time.sleep(600)
elif what == "rank":
    from lightning_commopt.launch.fork_server import server_for
    command = [sys.executable, "-m", "probe", "of_rank"]
    rank = server_for(command).start(command, env={**os.environ, "LOCAL_RANK": "1"})
    print("rank ended with", rank.wait(), "in our group", os.getpgid(0) == os.getpid())
elif what == "of_rank":
    print("here", os.environ["LOCAL_RANK"], os.getpgid(0) == os.getppid(), flush=True)
    sys.exit(4)
elif what == "lab":
    from lightning_commopt.launch.lab import NetLab
    with NetLab(2, "1gbit") as lab:
        command = [sys.executable, "-m", "probe", "of_lab"]
        print(*lab.run(command, pin_to_cores=True, environment={"OF_LAB": "1"}), sep="")
elif what == "of_lab":
    import socket
    names = [name for _, name in socket.if_nameindex()]
    num_cores = len(os.sched_getaffinity(0))
    print(os.environ["RANK"], os.environ["OF_LAB"], sorted(names), num_cores, os.getcwd(), os.getpid() < 100)
elif what == "lab_fails":
    from lightning_commopt.launch.lab import NetLab, RankError
    with NetLab(2) as lab:
        try:
            lab.run([sys.executable, "-m", "probe", "of_lab_that_fails"])
        except RankError as error:
            print(error.rank, error.status)
elif what == "of_lab_that_fails":
    time.sleep(600) if os.environ["RANK"] == "0" else os.kill(os.getpid(), 9)
"""

# Imports little: what is tested is how processes begin and end.
RUN = """
import os, signal, sys
from lightning_commopt.launch.fork_server import ForkServer
from lightning_commopt.launch.process import InterruptedRun, run_in_group
server = ForkServer("probe")
what, *signals = sys.argv[1:]
output = []
def on_output(data):
    output.append(data)
    for name in signals:
        os.kill(os.getpid(), getattr(signal, name))
    signals.clear()
try:
    status = run_in_group([sys.executable, "-m", "probe", what], os.environ, on_output, 0.5, server)
except InterruptedRun as interrupted:
    status = interrupted.signal.name
print(status, b"".join(output).decode())
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "probe.py").write_text(JOB)
    (folder / "run.py").write_text(RUN)
    return folder


def run(jobs: Path, *what: str) -> tuple[str, str]:
    """Runs a job from a server; gives its status and what it said."""
    command = [sys.executable, "run.py", *what]
    done = subprocess.run(command, cwd=jobs, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    status, _, output = done.stdout.partition(" ")
    return status, output.strip()


def test_the_end_of_a_job_is_that_of_a_program(jobs):
    """If it fails, a job is taken for a finished one, or its last words are lost."""
    assert run(jobs, "status") == ("3", "")
    assert run(jobs, "signal") == ("-9", "")
    assert run(jobs, "text") == ("1", "no such thing")
    status, output = run(jobs, "interrupt")
    assert status == "-2"
    assert output.endswith("KeyboardInterrupt")
    assert run(jobs, "last_words") == ("0", "out\nthread\nexit handler")
    assert (jobs / "last_words.txt").read_text() == "unflushed"
    status, output = run(jobs, "error")
    assert status == "1"
    assert output.endswith("ValueError: this value")


def test_nothing_is_left_of_a_job(jobs):
    """If it fails, a job that ends or is stopped leaves processes that disturb the next one."""
    status, output = run(jobs, "child")
    assert status == "0"
    assert is_group_gone(int(output))
    for name in ("SIGINT", "SIGTERM"):
        status, output = run(jobs, "wait", name)
        assert status == name
        assert is_group_gone(int(output.split()[0]))


def test_a_job_starts_its_ranks_in_its_own_group(jobs):
    assert run(jobs, "rank") == ("0", "here 1 True\nrank ended with 4 in our group True")


@pytest.mark.usefixtures("lab_machine")
def test_ranks_are_forked_on_hosts_of_the_lab(jobs):
    before = machine_traces()
    status, output = run(jobs, "lab")
    assert status == "0", output
    assert output.splitlines() == [f"{rank} 1 ['eth0', 'lo'] 1 {jobs} True" for rank in range(2)]
    assert run(jobs, "lab_fails") == ("0", "1 -9")
    assert machine_traces() == before

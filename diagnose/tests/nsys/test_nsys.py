"""`commopt nsys` puts nsys between torch's launcher and the program; a script that stands in for nsys records that."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commopt_diagnose.nsys import make_ready, nsys_command, run
from support.commopt import commopt, refusal

OURS = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx,osrt,nccl"]
NSYS = ["nsys", "profile", *OURS, "--output=nsys/rank_%q{RANK}"]
PYTHON = [sys.executable, "-u"]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]

# Writes down its arguments and a report, as nsys names it, and runs what comes after the options.
FAKE_NSYS = """#!/bin/sh
if [ "$2" = --help ]; then
    echo "-t, --trace=  Possible values are 'cuda', 'nvtx', 'osrt'$FAKE_NSYS_ALSO_TRACES or 'none'."
    exit
fi
printf '%s\\n' "$@" > "$FAKE_NSYS_DIR/argv_$RANK"
shift
while true; do
    case "$1" in
        --output=*) report=$(echo "${1#--output=}" | sed "s/%q{RANK}/$RANK/").nsys-rep; shift ;;
        -*) shift ;;
        *) break ;;
    esac
done
[ -n "$FAKE_NSYS_IDLE" ] || touch "$report"
"$@"
"""


@pytest.fixture
def nsys_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake nsys is, and where it writes its arguments."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "nsys").write_text(FAKE_NSYS)
    (folder / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NSYS_DIR", str(folder))
    monkeypatch.setenv("FAKE_NSYS_ALSO_TRACES", ", 'nccl'")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.exhaustive
def test_every_rank_runs_under_its_own_nsys(nsys_dir, tmp_path):
    program = ["sh", "-c", 'echo x > "rank $RANK"']
    result = commopt("nsys", "--nproc-per-node", "2", "--output-dir", "deep/reports", "--", *program)
    for rank in (0, 1):
        assert (tmp_path / f"rank {rank}").read_text() == "x\n"
        argv = (nsys_dir / f"argv_{rank}").read_text().splitlines()
        assert argv == ["profile", *OURS, "--output=deep/reports/rank_%q{RANK}", *program]
    assert result.output == "commopt: reports: deep/reports/rank_0.nsys-rep, deep/reports/rank_1.nsys-rep\n"


def test_nccl_is_traced_only_where_nsys_can(nsys_dir, monkeypatch):
    """If it fails, an nsys older than 2026.1 refuses the command."""
    assert OURS[-1] in nsys_command(["./train"])
    monkeypatch.setenv("FAKE_NSYS_ALSO_TRACES", "")
    assert "--trace=cuda,nvtx,osrt" in nsys_command(["./train"])


@pytest.mark.exhaustive
def test_under_the_users_launcher_a_failure_is_passed_on(nsys_dir, tmp_path, monkeypatch):
    """The launcher's exit status is 1 for whatever its ranks end with."""
    monkeypatch.setenv("FAKE_NSYS_IDLE", "1")
    script = "import os, sys; open(f'rank {os.environ[\"RANK\"]}', 'w').write(sys.argv[1]); sys.exit(3)"
    (tmp_path / "train.py").write_text(script)
    output = commopt("nsys", *LAUNCHER, "--standalone", "--nproc-per-node=2", "train.py", "--lr=1", status=1).output
    assert "there are no reports: the command failed with status 1" in output
    written = [rank for rank in (0, 1) if (tmp_path / f"rank {rank}").exists()]  # the first failure ends the others
    assert written
    for rank in written:
        assert (tmp_path / f"rank {rank}").read_text() == "--lr=1"
        assert (nsys_dir / f"argv_{rank}").read_text().splitlines()[-4:] == [*PYTHON, "train.py", "--lr=1"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun train.py", ["torchrun", "--no-python", *NSYS, *PYTHON, "train.py"]),
        (
            "/opt/bin/torchrun --nnodes 2 train.py --nnodes 3 -m",
            ["/opt/bin/torchrun", "--nnodes", "2", "--no-python", *NSYS, *PYTHON, "train.py", "--nnodes", "3", "-m"],
        ),
        (
            "torchrun --standalone -m package.train -m 3",
            ["torchrun", "--standalone", "--no-python", *NSYS, *PYTHON, "-m", "package.train", "-m", "3"],
        ),
        (
            "torchrun --no-python --standalone -- ./train --no-python --",
            ["torchrun", "--standalone", "--no-python", *NSYS, "./train", "--no-python", "--"],
        ),
        (
            "python3 -u -m torch.distributed.run --nnodes 2 a.py",
            ["python3", "-u", *LAUNCHER[1:], "--nnodes", "2", "--no-python", *NSYS, *PYTHON, "a.py"],
        ),
    ],
)
def test_nsys_comes_after_the_launchers_options(command, expected):
    assert nsys_command(shlex.split(command)) == expected


@pytest.mark.parametrize(
    "command",
    [
        "python train.py torch.distributed.run",
        "python -m train -m torch.distributed.run",
        "python -m train --launcher torchrun",
        "uv run train.py torchrun",
        "conda run -n deepspeed python train.py",
        "conda run -p /envs/fabric python train.py",
        "python train.py nsys",
        "python -m accelerate_study.train",
    ],
)
def test_an_argument_that_names_the_launcher_is_no_launcher(command):
    assert nsys_command(shlex.split(command))[:4] == [*LAUNCHER, "--standalone"]


@pytest.mark.parametrize(("num_devices", "num_ranks"), [(0, "1"), (4, "4")])
def test_there_is_a_rank_for_each_device(monkeypatch, num_devices, num_ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    words = [*LAUNCHER, "--standalone", "--nproc-per-node", num_ranks, "--no-python", *NSYS, "python", "a.py"]
    assert nsys_command(["python", "a.py"]) == words
    assert nsys_command(["python", "a.py"], nproc_per_node=3)[5] == "3"


@pytest.mark.parametrize(
    ("nsys_args", "expected"),
    [
        ("", OURS),
        ("--trace=cuda,nvtx", [*OURS[:2], "--trace=cuda,nvtx"]),
        ("-t cuda --capture-range-end=repeat:2", [OURS[0], "-t", "cuda", "--capture-range-end=repeat:2"]),
        ("--session-new='a b' -f true", [*OURS, "--session-new=a b", "-f", "true"]),
    ],
)
def test_options_of_nsys_replace_ours(nsys_args, expected):
    words = nsys_command(["python", "a.py"], nproc_per_node=1, nsys_args=nsys_args, output_dir="100%")
    options = words[words.index("profile") + 1 : -2]
    assert sorted(options) == sorted([*expected, "--output=100%%/rank_%q{RANK}"])


def test_print_prints_a_shell_command_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    command = ["python", "a b.py", "--lr", "1"]
    result = commopt("nsys", "--print", "--nproc-per-node=2", "--output-dir=my reports", "--", *command)
    words = nsys_command(command, nproc_per_node=2, output_dir="my reports")
    assert result.output == f"{shlex.join(words)}\n"
    assert subprocess.run(
        ["/bin/sh", "-c", f"printf '%s|' {result.output}"], capture_output=True, check=True
    ).stdout == ("".join(f"{word}|" for word in words).encode())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--nproc-per-node=2 torchrun a.py",
            "--nproc-per-node=2 is for a command without a launcher: give it to torchrun",
        ),
        ("torchrun", "torchrun: the following arguments are required: training_script"),
        ("torchrun --speed 3 a.py", "torchrun --speed 3 a.py: unrecognized arguments: --speed"),
        ("torchrun --run-path a.py", "torchrun's --run-path starts no program"),
        ("--nsys-args='\"' python a.py", "--nsys-args='\"': No closing quotation"),
        ("--nsys-args='-o x' python a.py", "--nsys-args='-o x': the reports are written to --output-dir"),
        ("srun -n 2 python a.py", "srun starts the ranks by itself"),
        ("uv run /opt/bin/accelerate launch a.py", "accelerate starts the ranks by itself"),
        (
            "uv run torchrun --nproc-per-node 8 a.py",
            "uv run is in front of torchrun: put it in front of commopt nsys, as in uv run commopt nsys torchrun ...",
        ),
        ("fabric run --devices 2 a.py", "fabric starts the ranks by itself"),
        ("python -m accelerate.commands.launch a.py", "accelerate.commands.launch starts the ranks by itself"),
        ("python -u -m lightning.fabric.cli run a.py", "lightning.fabric.cli starts the ranks by itself"),
        ("nsys profile -o x python a.py", "commopt nsys starts nsys itself: leave it out"),
        ("uv run nsys profile torchrun a.py", "commopt nsys starts nsys itself: leave it out"),
        ("python -m torch.distributed.launch a.py", "torch.distributed.launch is deprecated: use torchrun"),
        ("env X=1 torchrun a.py", "env X=1 is in front of torchrun"),
        ("conda run -n python -v torchrun a.py", "conda run -n python -v is in front of torchrun"),
        ("poetry run python -u -m torch.distributed.run a.py", "poetry run is in front of python -u -m torch.dis"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    assert refusal("nsys", *shlex.split(arguments)).startswith(f"commopt: {message}")


def test_without_nsys_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    line = refusal("nsys", "python", "a.py")
    assert line.startswith("commopt: nsys is not on PATH. Install Nsight Systems (NVIDIA's package nsight-")
    assert "--print" in line
    assert list(tmp_path.iterdir()) == []


def test_reports_are_not_lost_to_those_that_are_there(nsys_dir, tmp_path):
    """nsys would find that out after the training, and leave its report in a temporary directory."""
    (tmp_path / "nsys").mkdir()
    (tmp_path / "nsys" / "rank_0.nsys-rep").touch()
    line = refusal("nsys", "python", "a.py", "-f")
    assert line.startswith("commopt: nsys/rank_0.nsys-rep exists, and nsys would not replace it")
    assert not (nsys_dir / "argv_0").exists()
    for nsys_args in ("-f true", "--force-overwrite=true"):
        make_ready("nsys", nsys_args)


@pytest.mark.parametrize(
    ("status", "files", "lines"),
    [
        (0, [], ["there are no reports: nsys collects between cudaProfilerStart and"]),
        (1, [], ["there are no reports: the command failed with status 1"]),
        (1, ["rank_0.nsys-rep"], ["reports: nsys/rank_0.nsys-rep"]),
        (0, ["rank_0.qdrep"], ["reports: nsys/rank_0.qdrep"]),
        (0, ["rank_0.1.nsys-rep", "rank_0.1.sqlite"], ["reports: nsys/rank_0.1.nsys-rep"]),
        (0, ["rank_0.qdstrm", "rank_1.qdstrm"], ["nsys/rank_0.qdstrm, nsys/rank_1.qdstrm: nsys collected this"]),
        (
            0,
            ["rank_0.nsys-rep", "rank_0.qdstrm", "rank_1.qdstrm"],
            ["reports: nsys/rank_0.nsys-rep", "nsys/rank_1.qdstrm: nsys collected this, but made no report"],
        ),
    ],
)
@pytest.mark.usefixtures("nsys_dir")
def test_what_nsys_has_left_is_named(status, files, lines, tmp_path, monkeypatch):
    """If it fails, data that an old nsys, or one without its importer, has collected counts as never collected."""

    def leave_files(command):
        for name in files:
            (tmp_path / "nsys" / name).touch()
        return status

    monkeypatch.setattr("commopt_diagnose.nsys.run", leave_files)
    output = commopt("nsys", "python", "a.py", status=status).output.splitlines()
    assert len(output) == len(lines)
    for line, words in zip(output, lines, strict=True):
        assert line.startswith(f"commopt: {words}")


def test_a_command_is_needed():
    commopt("nsys", "--print", status=2)
    commopt("nsys", "--nproc-per-node=0", "--print", "python", "a.py", status=2)


def test_signals_leave_the_end_to_the_command():
    """Ctrl-C reaches the launcher by itself; SIGTERM, as a scheduler sends it, comes through us."""
    before = signal.getsignal(signal.SIGTERM)
    loop = "while true; do sleep 0.05; done"
    assert run(["sh", "-c", f"trap 'exit 7' TERM; sleep 0.5; kill -INT $PPID; kill -TERM $PPID; {loop}"]) == 7
    assert signal.getsignal(signal.SIGTERM) == before
    assert run(["sh", "-c", "kill -KILL $$"]) == 137

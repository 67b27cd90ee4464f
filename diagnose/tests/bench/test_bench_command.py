"""The command ``commopt bench``: what it starts, prints and writes, and one line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commopt_diagnose.bench import job
from commopt_diagnose.bench.cases import messages_of
from commopt_diagnose.bench.job import bench_launched
from commopt_diagnose.bench.model import LinkModel
from commopt_diagnose.bench.result import BenchResult, Row
from commopt_diagnose.bench.run_result import result_of_run
from commopt_diagnose.bench.settings import BenchSettings
from commopt_diagnose.bench.start import available_bytes, start_bench
from commopt_diagnose.bench.terminal import against_link
from commopt_diagnose.rank_identity import RankIdentity
from diagnose_support.sample_bench import case, result_of, sample
from lightning_commopt.launch import process as processes
from lightning_commopt.launch.process import InterruptedRun, raise_signals
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.plan import CommPlan
from support.commopt import commopt, refusal
from support.marked_processes import Program
from support.sample_runs import SampleRun, write_run
from support.simulated_link import LATENCY_S, S_PER_BYTE, records_of_ranks

QUICK = ("-b", "64", "-e", "4K", "-f", "64", "-n", "2", "--repetitions", "1")
COMMAND = (sys.executable, "-c", "from lightning_commopt.commands.app import app; app()", "bench", *QUICK)


def _run(*arguments: object, status: int = 0) -> str:
    return commopt("bench", *arguments, status=status, columns=200).output


@pytest.mark.exhaustive
def test_the_command_measures_prints_and_writes(tmp_path: Path) -> None:
    """If it fails, ranks do not start, or what is printed and written is not what they measured."""
    files = [tmp_path / name for name in ("bench.json", "bench.csv", "bench.html", "model.json")]
    written = [word for name, path in zip(("output", "csv", "page", "model"), files, strict=True)
               for word in (f"--{name}", str(path))]  # fmt: skip
    ran = subprocess.run([*COMMAND, "send_recv", "--comm-hook", "bf16", "--predict", "2K", *written],
                         capture_output=True, text=True, timeout=200, check=True)  # fmt: skip
    result = BenchResult.load(files[0])
    assert [(row.case.name, row.case.size_bytes, row.num_wrong) for row in result.rows] == [
        ("send_recv", 64, 0), ("bf16", 64, 0), ("send_recv", 4096, 0), ("bf16", 4096, 0),
    ]  # fmt: skip
    assert (result.where["world_size"], result.where["backend"]) == (2, "gloo")
    assert "# Out of bounds values : 0 OK" in ran.stdout
    assert f"#     2K: {1e3 * LinkModel.load(files[3]).predict('send_recv', 2048).time_s:.3}"[:14] in ran.stdout
    assert ran.stderr == (f"commopt: 4 cases, 1 repetition of 2 calls each\nwritten to {', '.join(map(str, files))}\n")


@pytest.mark.exhaustive
def test_an_interface_that_is_not_there() -> None:
    """If it fails, a variable of another host in the environment ends in a traceback of torch's."""
    output = commopt("bench", *QUICK, status=1, env={"GLOO_SOCKET_IFNAME": "eth99"}).output
    assert "the ranks cannot meet: " in output
    assert "Unable to find address for: eth99; commopt doctor looks for causes" in output
    assert "Traceback" not in output


def test_a_meeting_place_that_is_not_there(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ranks of srun that cannot reach the first one say nothing for half an hour."""
    monkeypatch.setattr(job, "_MEETING_S", 0.1)
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    for address, message in (
        ("127.0.0.1", f"127.0.0.1 refuses connections to port {port}: nothing listens there"),
        ("no-such-host.invalid", "the name no-such-host.invalid cannot be resolved"),
    ):
        line = refusal("bench", *QUICK, status=1, env=launcher | {"MASTER_ADDR": address})
        assert line.startswith(f"commopt: {message}")


@pytest.mark.exhaustive
def test_under_torchrun_every_rank_runs_the_command_and_the_first_prints() -> None:
    """If it fails, torchrun's ranks start ranks of their own, hang, or all print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    ran = subprocess.run([*launcher, *COMMAND, "--json"], capture_output=True, text=True, timeout=200, check=True)
    assert [row["num_wrong"] for row in json.loads(ran.stdout)["rows"]] == [0, 0]


@pytest.mark.exhaustive
def test_under_srun_tasks_are_the_ranks(port: int) -> None:
    """If it fails, srun's tasks each measure alone, or do not find each other."""
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    envs = [{**os.environ, **job, "SLURM_PROCID": task, "SLURM_LOCALID": task} for task in ("0", "1")]
    tasks = [subprocess.Popen([*COMMAND, "--json"], env=env, stdout=subprocess.PIPE) for env in envs]
    first, second = (task.communicate(timeout=200)[0] for task in tasks)
    assert [row["num_wrong"] for row in json.loads(first)["rows"]] == [0, 0]
    assert second == b""
    assert [task.returncode for task in tasks] == [0, 0]


@pytest.mark.exhaustive
def test_an_interrupted_bench_leaves_no_process(tmp_path: Path) -> None:
    """If it fails, ranks go on measuring after the command is gone, and load the machine."""
    running = Program([*COMMAND[1:4], "-e", "1K", "--repetitions", "100000"], tmp_path)
    try:
        while len(running.processes()) < 3:  # the command and two ranks
            assert running.process.poll() is None, running.output
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(60)
        assert running.process.returncode == 128 + signal.SIGTERM
        assert running.output.splitlines()[-1] == "commopt: interrupted by SIGTERM"  # what is measured may be above
    finally:
        running.kill()


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, 8000 * 1024),
        ("0::/\n", {"memory.max": "4096000"}, 4096000),
        ("0::/job_7/step_0/task_0\n", {"job_7/memory.max": "4096000", "job_7/step_0/memory.max": "max"}, 4096000),
        ("5:cpu:/a\n4:memory:/docker/a\n0::/\n", {"memory/memory.limit_in_bytes": "4096000"}, 4096000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 8000 * 1024),
        ("0::/../..\n", {"memory.max": "4096000"}, 4096000),
    ],
)
def test_memory_that_a_container_or_a_job_may_use(
    groups: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    """If it fails, the kernel ends ranks whose messages fit into the host, but not into their container."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert available_bytes(tmp_path) == expected
    assert available_bytes(tmp_path / "none") is None


MISTAKES = [
    (("-b", "1X"), "-b must be a number of bytes"),
    (("-f", "1"), "-f must be above 1"),
    (("allreduce",), "did you mean 'all_reduce'"),
    (("-d", "float31"), "dtypes must be one of"),
    (("--link", "1gb"), "--link must be a number with kbit, mbit or gbit"),
    (("--hosts", "3"), "--hosts 3 needs a link"),
    (("--link", "1gbit", "--hosts", "1"), "number of ranks must be an integer of at least 2, got 1"),
    (("--link", "1gbit", "--device", "cuda"), "cuda"),
    (("--device", "tpu"), "device must be one of 'auto', 'cpu', 'cuda'"),
    (("--comm-hook", "int9"), "did you mean 'int8'"),
    (("--comm-hook", "{"), "--comm-hook is not JSON"),
    (("--scopes", "node"), "scope 'node' needs several nodes"),
    (("-b", "900G", "-e", "900G"), "messages of 900G on 2 ranks take 3865.5 GB of memory"),
    (("-r", "2"), "root must be below the number of ranks, 2"),
    (("--load", "missing.json"), "missing.json"),
    (("--load", "binary.json"), "binary.json is not a result of commopt bench, or was cut: it is binary"),
    (("--plan", "binary.json"), "binary.json"),
    (("--plan", "list.json"), "list.json holds no plan: a plan must be a JSON object"),
    (("--page", "missing/bench.html"), "missing/bench.html cannot be written"),
    (("--output", "."), ". cannot be written: it is a folder"),
    (("--load", "model.json", "--from-run", "."), "--load model.json and --from-run . are two sources"),
    (("--predict", "25X"), "--predict must be a number of bytes"),
    (("--buckets-of", "."), "needs --plan, the plan of that run"),
    (("--from-run", "."), "has no records of steps"),
    (("--load", "model.json", "--csv", "bench.csv"), "model.json is a link model: --output, --csv, --page and --model"),
    (("--load", "model.json"), "model.json is damaged"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_and_status_2(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a user sees a traceback, or a script goes on after a mistake."""
    monkeypatch.chdir(tmp_path)
    Path("binary.json").write_bytes(b"\x00\xff\xd5")
    Path("list.json").write_text("[]")
    Path("model.json").write_text('{"kind": "commopt link model", "format": 1}')
    line = refusal("bench", *arguments)
    assert line.startswith("commopt: ")
    assert said in line


def test_one_size_predicts_no_other(tmp_path: Path) -> None:
    """If it fails, 25 MB are said to take minutes, as many times as long as 64 bytes."""
    path = tmp_path / "bench.json"
    result_of(sample(lambda size: size / 1e8, [2**20])).save(path)
    refused = "commopt: --predict 25M needs the times of two sizes or more, got one, {}; -b and -e choose the sizes"
    assert refusal("bench", "--load", path, "--predict", "1M,25M").startswith(refused.format("1M"))
    assert refusal("bench", "-b", "64", "-e", "64", "--predict", "25M").startswith(refused.format("64"))
    assert "one size, whose times show neither a latency nor a bandwidth" in _run("--load", path, "--predict", "1M")


def test_a_kept_result_is_shown_again_and_a_wrong_one_fails(tmp_path: Path) -> None:
    """If it fails, a script does not see that a link changes bits."""
    rows = sample(lambda size: size / 1e8, [2**20, 2**21, 2**22])
    result_of(rows).save(tmp_path / "bench.json")
    shown = _run("--load", tmp_path / "bench.json", "--predict", "3M,1G")
    assert "1G: 10" in shown
    assert "extrapolated" in shown
    plain = json.loads((tmp_path / "bench.json").read_text())
    plain["rows"][1]["num_wrong"] = 5
    (tmp_path / "bench.json").write_text(json.dumps(plain))
    assert "Out of bounds values : 5 FAILED" in _run("--load", tmp_path / "bench.json", status=1)


def test_a_bench_that_failed_everywhere_is_kept(tmp_path: Path) -> None:
    """If it fails, the reasons of all failures are lost, and a script sees a mistake in its arguments."""
    failed = result_of([Row(case=case(64), error="not here")])
    failed.save(tmp_path / "bench.json")
    paths = {name: tmp_path / f"kept.{name}" for name in ("output", "csv", "page", "model")}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    shown = _run("--load", tmp_path / "bench.json", *options, status=1)
    assert "failed: not here" in shown
    assert "over the link's rate" not in shown
    assert f"commopt: {paths['model']} is not written: no case was measured\n" in shown
    assert shown.endswith(f"written to {', '.join(str(paths[name]) for name in ('output', 'csv', 'page'))}\n")
    assert [path.exists() for path in paths.values()] == [True, True, True, False]
    assert BenchResult.load(paths["output"]).to_plain() == failed.to_plain()


def test_hooks_alone_are_not_compared_with_the_link() -> None:
    """If it fails, the conclusions end in a comparison of nothing."""
    hook = sample(lambda size: 1e-3, [64], operation="comm_hook", comm_hook="int8", redop="mean")
    reduced = sample(lambda size: 2.0, [10**8], noise=0)
    assert against_link(result_of(hook)) == against_link(result_of(reduced, link_bits_per_s=None)) == []
    (line,) = against_link(result_of([*hook, *reduced]))
    assert line.endswith("over the link's rate, 0.125 GB/s each way: all_reduce 40.0 %")


def test_a_plan_is_measured_at_its_own_messages(tmp_path: Path) -> None:
    """If it fails, a plan is judged by messages that it never sends."""
    mib = 2**20
    assert messages_of(CommPlan()) == ([mib, 25 * mib], [])
    assert messages_of(CommPlan.from_dict({"bucket_cap_mb": 0.5, "comm_hook": "int8"})) == ([mib // 2], ["int8"])
    hook = {"name": "powersgd", "matrix_rank": 4}
    _, (comm_hook,) = messages_of(CommPlan.from_dict({"bucket_cap_mb": 4, "comm_hook": hook}))
    assert (comm_hook["name"], comm_hook["matrix_rank"]) == ("powersgd", 4)
    write_run(tmp_path, SampleRun(num_buckets=4, gradient_bytes=40_000_000))
    assert messages_of(CommPlan(), tmp_path) == ([10_000_000], [])


def test_a_run_tells_of_its_link_without_a_probe(tmp_path: Path) -> None:
    """If it fails, the model from training's own marks counts what ranks, or buckets, wait for each other."""
    for rank, records in enumerate(records_of_ranks(5, (10_000_000, 1_000_000))):
        header = {"rank": rank, "world_size": 2, "origin_unix_s": 1.7e9, "comm_hook": "none"}
        StepWriter(rank_file(tmp_path, rank), header).write(records)
    rows = result_of_run(tmp_path).rows
    assert [(row.case.operation, row.case.num_ranks) for row in rows] == [("all_reduce", 2)] * 2
    times_s = {row.case.size_bytes: row.time_s.median for row in rows}
    assert times_s == {size: pytest.approx(LATENCY_S + size * S_PER_BYTE) for size in (1_000_000, 10_000_000)}
    assert "5M: 54.4 ms" in _run("--from-run", tmp_path, "--predict", "5M")


def test_a_run_that_has_begun_to_compress_tells_of_its_compressor(tmp_path: Path) -> None:
    """If it fails, compressed buckets of ``plan="auto"`` count as all-reduces, on a link that is too fast."""
    for rank, records in enumerate(records_of_ranks(10, (10_000_000, 1_000_000))):
        header = {"rank": rank, "world_size": 2, "origin_unix_s": 1.7e9, "comm_hook": "none"}
        writer = StepWriter(rank_file(tmp_path, rank), header)
        writer.write(records[:6])
        writer.change({"comm_hook": "int8"})
        writer.write(records[6:])
    result = result_of_run(tmp_path)
    assert result.where["comm_hook"] == "int8"
    assert [(row.case.operation, row.case.comm_hook, len(row.times_s)) for row in result.rows] == [
        ("comm_hook", "int8", 4)
    ] * 2


@pytest.mark.parametrize("where", [{}, {"run": "first", "last_step": 49}])
def test_a_kept_model_predicts(where: dict[str, Any], tmp_path: Path) -> None:
    """If it fails, nobody can look at the model that a bench, or a run that trains, has written."""
    model = LinkModel.fit(result_of(sample(lambda size: 1e-3 + size / 1e8, noise=0.0), **where))
    model.save(tmp_path / "link_model.json")
    shown = _run("--load", tmp_path / "link_model.json", "--predict", "100K").splitlines()
    assert shown[0].startswith(
        "# run first: buckets of 2 ranks, up to step 49" if where else "# commopt bench: 2 ranks"
    )
    assert "#   all_reduce (2 ranks): 1.00 ms + size / 100 MB/s; sizes left out are off by 0 % (median)" in shown
    assert "#     100K: 2.02 ms (2.02 to 2.02)" in shown
    plain = json.loads(_run("--load", tmp_path / "link_model.json", "--predict", "100K", "--json"))
    assert plain["predictions"][0]["time_s"] == pytest.approx(1e-3 + 102400e-8)
    assert plain["curves"] == model.to_plain()["curves"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lab_machine")
def test_no_bandwidth_in_the_lab_is_above_the_rate() -> None:
    """If it fails, the clock starts too late, or counts what a rate limiter or a socket had saved up."""
    settings = BenchSettings(
        collectives=("all_reduce", "broadcast", "send_recv"), sizes_bytes=(2**20, 2**22), num_repetitions=3
    )
    result = start_bench(settings, link="200mbit", num_hosts=3)
    assert result.link_bytes_per_s == 25e6
    assert [row.case.label for row in result.rows if row.error is not None or row.num_wrong] == []
    assert max(row.busbw for row in result.rows) < 1.01 * 25e6
    assert "RANK" not in os.environ


def test_a_signal_while_ranks_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the rank that is just being started is lost, and waits for the others for half an hour."""
    started: list[subprocess.Popen[bytes]] = []

    def start_and_interrupt(command: Any, env: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, start_new_session=True))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(processes, "start_program", start_and_interrupt)
    settings = BenchSettings(collectives=("all_reduce",), sizes_bytes=(64,))
    try:
        with pytest.raises(InterruptedRun), raise_signals():
            start_bench(settings, ranks_per_host=2)
        assert [process.poll() for process in started] == [-signal.SIGKILL] * 2
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("num_seen", "variables", "expected"),
    [
        (1, {"SLURM_GPUS_ON_NODE": "4"}, "cuda"),
        (1, {"SLURM_GPUS_ON_NODE": "1"}, "cpu"),
        (0, {"SLURM_GPUS_ON_NODE": "4"}, "cpu"),
        (1, {"SLURM_GPUS_ON_NODE": "4", "RANK": "0"}, "cpu"),
        (4, {}, "cuda"),
    ],
)
def test_ranks_that_see_only_their_own_gpu_measure_nccl(
    num_seen: int, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, srun --gpus-per-task=1 measures gloo on the CPUs of a cluster with GPUs."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_seen)
    monkeypatch.setattr(job, "run_job", lambda *arguments, device_type, on_progress: chosen.append(device_type))
    for name in ("RANK", "SLURM_GPUS_ON_NODE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    identity = RankIdentity(
        rank=1, world_size=4, ranks_per_node=4, host="a", address="a", port=29500, hosts_store=False
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))  # bench writes its address there
    bench_launched(BenchSettings(sizes_bytes=(8,)), identity, device="auto", on_progress=lambda *step: None)
    assert chosen == [expected]


def test_gpus_that_refuse_the_first_rank_cost_only_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a bench ends without any result, as ranks have filled their GPUs or have them for themselves."""

    def refuse(num_bytes: int, **options: object) -> torch.Tensor:
        assert num_bytes <= 2**28
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "ones", refuse)
    assert job.copy_between_gpus(2**34) == []

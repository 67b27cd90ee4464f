"""Lines are read as they were written, whatever programs, terminals and collectors of logs have made of them."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from commopt_diagnose.nccl_log import skipping
from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import extras_of, networks_of, paths_of, rings_of, to_plain, versions_of
from diagnose_support.nccl_sample_logs import (
    HEALTHY,
    TRACEBACK,
    findings,
    read,
    read_file,
    told,
    watchdog,
)
from support.commopt import commopt, refusal


def facts(log: NcclLog) -> list[object]:
    """What must not depend on how the lines came into the file."""
    return [
        (c.num_ranks, len(c.machines), sorted(c.members), sorted(paths_of(c)), rings_of(c)) for c in log.communicators
    ]


def test_one_file_for_each_rank_or_all_in_one(tmp_path: Path) -> None:
    apart = read_log(HEALTHY.write(tmp_path))
    assert facts(apart) == facts(read(HEALTHY.mixed(seed=1))) == facts(read(HEALTHY.text()))
    assert find_all(apart) == []


@pytest.mark.parametrize(
    "prefix",
    [
        *("[1,0]<stdout>:", "(RayTrainWorker pid=581, ip=10.2.1.8) ", "3: ", "[155] ", "[default0]:"),
        *("[2026-05-05 06:16:47] ", "2026-05-05T06:16:47Z ", "06:16:47 ", "2026-05-05 06:16:47,123 INFO \n"),
        *("\x1b[36m(pid=12)\x1b[0m ", "2026-05-05T06:16:47.208-07:00", "2026-05-05-06:16:47-", "06:16:47,123-"),
        "epoch 1:   5%|         | 3/60 [00:01<00:30]\r",
    ],
)
def test_what_a_launcher_puts_in_front_does_not_matter(prefix: str) -> None:
    plain = read(HEALTHY.mixed())
    log = read("".join(f"{prefix}{line}\n" for line in HEALTHY.mixed().splitlines()))
    assert facts(log) == facts(plain)
    assert {process.host for process in log.processes} == {process.host for process in plain.processes}


def test_nccl_tests_name_the_library_that_they_use() -> None:
    """If it fails, the version is unknown in an output of nccl-tests that has no line of NCCL itself."""
    log = read("[1,0]<stdout>:# nccl-tests version 2.17.6 nccl-headers=22907 nccl-library=22809\n")
    assert list(log.versions) == ["2.28.9"]


def test_carriage_returns_alone_end_lines(tmp_path: Path) -> None:
    """If it fails, a file that an editor has written so is one line, torn by processes that interrupt each other."""
    path = tmp_path / "log"
    path.write_bytes(HEALTHY.mixed().replace("\n", "\r").encode())
    log = read_log([path])
    assert facts(log) == facts(read(HEALTHY.mixed()))
    assert find_all(log) == []


def test_dropped_heads(tmp_path: Path) -> None:
    """A file for each rank still tells everything but the host."""
    for path in HEALTHY.write(tmp_path):
        heads = path.read_text().splitlines()
        path.write_text("".join(f" [{line.partition(' [')[2]}\n" for line in heads))
    (communicator,) = read_log(sorted(tmp_path.iterdir())).communicators
    assert sorted(communicator.members) == list(range(8))
    assert sum(len(path.pairs) for path in paths_of(communicator)) == 8


def _collected(kind: str, line: str) -> str:
    """Returns a line as something that collects logs keeps it."""
    if kind == "docker":  # JSON of Docker has no < and >
        kept = json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-03-18T11:13:09.1Z"})
        return kept.replace("<", r"\u003c").replace(">", r"\u003e")
    if kind == "cloud":
        return json.dumps({"insertId": "a1", "resource": {"labels": {"pod": "w-0"}}, "textPayload": line})
    if kind == "nested":
        return json.dumps({"jsonPayload": {"body": line, "pod": "w-0"}})
    if kind in ("line", "@message"):  # Loki and CloudWatch
        return json.dumps({"timestamp": "1763", kind: line})
    if kind == "twice":
        return json.dumps({"message": _collected("docker", line), "pod": "w-0"})
    if kind == "pretty":
        return f'    "message": {json.dumps(line)},'
    return f'2026-03-18T11:13:09Z,w-0,"{line}"'


@pytest.mark.parametrize("kind", ["docker", "cloud", "pretty", "csv", "twice"])
def test_logs_kept_as_json_or_csv_are_read_as_they_were_written(kind: str) -> None:
    """What follows the message in its line must not become a part of it."""
    lines = [*HEALTHY.text().splitlines(), watchdog(0, 7).strip(), '[rank3]: KeyError: a "b"']
    plain, kept = read(*lines), read(*(_collected(kind, line.replace('"', "'")) for line in lines))
    [before], [after] = plain.communicators, kept.communicators
    assert networks_of(after) == ["IB"]
    assert extras_of(after) == extras_of(before)
    assert after.machines == before.machines
    assert [connection.path for connection in after.connections] == [c.path for c in before.connections]
    assert [process.interfaces.keys() for process in kept.processes] == [{"eth0"}] * len(kept.processes)
    assert [timeout.call for timeout in kept.timeouts.values()] == [timeout.call for timeout in plain.timeouts.values()]
    assert [warning.rank for warning in kept.warnings] == [3]


@pytest.mark.parametrize("kind", ["docker", "cloud", "pretty", "nested", "line", "@message", "twice"])
def test_errors_of_several_lines_are_read_from_json_and_from_wide_terminals(kind: str) -> None:
    """If it fails, JSON is shown in place of NCCL's error, or the stack behind an error hides it."""
    text = TRACEBACK.replace("[rank3]: ", "")
    stack = "Exception raised from f at a.cpp:1 (most recent call first):\nframe #0: f() + 0x1 (0x7f in libc10.so)"
    joined = f"{text}{stack}".replace("\n", " " * 40)
    kept = [_collected(kind, line) for line in text.splitlines()]
    for lines in (kept, [_collected(kind, text + stack)], [joined], [_collected(kind, joined)]):
        warned = {warning.text for warning in read(*lines).warnings} - {"invalid usage"}
        assert warned == {"Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000"}


@pytest.mark.parametrize(
    "prefix",
    ["#033[34m", r"\x1b[34m", r"\u001b[34m", "^[[34m", "level=info msg=", "rank-0|", "2026-03-18T11:13:09Z,w-0,"],
)
def test_what_stands_right_in_front_of_a_host_is_no_part_of_its_name(prefix: str) -> None:
    """Colours of a terminal reach logs as syslog and editors write them; logfmt and CSV put no space there."""
    [process] = read(prefix + told("Bootstrap : Using eth0:10.0.0.1<0>", host="node-3")).processes
    assert (process.host, process.pid) == ("node-3", 7)


def test_quotes_in_a_line_that_nothing_has_quoted() -> None:
    line = told('NCCL_TOPO_FILE set by environment to "a", "b"')
    [process] = read(line).processes
    assert process.settings["NCCL_TOPO_FILE"].value == '"a", "b"'


def test_nics_have_their_own_names() -> None:
    """And not those of the files by which libibverbs opens them."""
    opened = "NET/IB: [1] rocep1s0f1:uverbs1:1/RoCE provider=Mlx5 speed=200000 pciPath=/sys/a/0000:01:00.0 ar=0"
    using = "NET/IB : Using [0]rocep1s0f1:1/RoCE [1]mlx5_2:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    [process] = read(told(opened), told(using), told("Using network IB")).processes
    assert list(process.nics) == ["rocep1s0f1:1/RoCE", "mlx5_2:1/IB"]


def test_places_that_a_chat_has_made_links() -> None:
    linked = "[net_ib.cc](http://net_ib.cc)"
    log = read(told(f"{linked}:910 -> 2"), f"a:7:8 [0] transport/{linked}:1295 NCCL WARN Got completion from peer")
    [process] = log.processes
    assert (process.host, process.failed_at and process.failed_at.value) == ("a", "net_ib.cc:910 -> 2")
    assert log.warnings[0].place == "transport/net_ib.cc:1295"


def test_ncclx_names_a_thread_behind_the_device_and_warns_of_errors_that_it_passes_on() -> None:
    """As in meta-pytorch/torchcomms#523: the second is no warning without an explanation."""
    head = "W0202 17:44:47.289833 120755 a.cc:1] pcl-kini02:120755:120756 [1][main] NCCL WARN"
    log = read(f"{head} Call to ibv_create_qp failed", f"{head} /__w/comms/v2.28-a/transport/net_ib.cc:852 -> 3")
    [process] = log.processes
    assert (process.host, process.pid, process.failed_at is not None) == ("pcl-kini02", 120755, True)
    assert [warning.text for warning in log.warnings] == ["Call to ibv_create_qp failed"]


def test_quotes_are_no_part_of_a_host() -> None:
    log = read("log `node-a:10:11 [1] NCCL INFO Using network IB\nnode-a:10:11 [1] NCCL INFO Using network IB\n")
    assert [process.host for process in log.processes] == ["node-a"]


def test_a_cut_warning_is_left_out_unless_it_is_known(tmp_path: Path) -> None:
    unknown = told("Using network IB") + "a:7:8 [0] misc/ibvwrap.cc:63 NCCL WARN Fai"
    known = "node-a:10:11 [0] NCCL WARN Call to connect returned Connection refused, re"
    for name, text in (("unknown", unknown), ("known", known)):
        (tmp_path / name).write_text(text)
    assert "warning" not in [finding.code for finding in find_all(read_log([tmp_path / "unknown"]))]
    assert "unreachable" in [finding.code for finding in find_all(read_log([tmp_path / "known"]))]


def test_packages_name_the_version_where_nccl_does_not() -> None:
    """Such as in the output of pip or of torch's collect_env."""
    package, line = "[pip3] nvidia-nccl-cu12==2.19.3\n", told("Connected all rings")
    assert versions_of(read(package + line)) == ["2.19.3"]
    assert versions_of(read(package + line + "NCCL version 2.21.5+cuda12.4\n")) == ["2.21.5+cuda12.4"]
    assert versions_of(read(TRACEBACK)) == ["2.19.3"]


@pytest.mark.parametrize(
    "broken",
    [
        watchdog(2, 4).replace("OpType", "OpTy\npe"),
        watchdog(2, 4).replace("Watchdog caught", "Watchdog\ncaught").replace(" OpType", "\nOpType"),
        watchdog(2, 4).replace("Wor", "Wo\nr").replace("Numel", "Num\nel", 1).replace("Out", "Ou\nt"),
    ],
)
def test_a_line_of_the_watchdog_that_a_terminal_or_a_mail_broke(broken: str) -> None:
    (timeout,) = read(broken, "step 7: loss 0.1").timeouts.values()
    assert (timeout.rank, timeout.sequence, timeout.operation, timeout.limit_s) == (2, 4, "ALLREDUCE", 600.0)
    assert timeout.sizes == "NumelIn=8, NumelOut=8"


def test_a_terminal_s_window_around_lines() -> None:
    framed = "│ h:1:11 [0] NCCL INFO Channel 00 : 4[cb000] -> 0[92000] [send] via NET/IB/2        │\n"
    (communicator,) = read(framed).communicators
    assert [each.path for each in communicator.connections] == ["NET/IB"]


def test_versions_before_the_name_stood_in_front() -> None:
    text = "gpu:18:18 [0] INFO NET : Using interface enp3:10.0.0.3<0>\nNCCL version 2.2.13+cuda9.0\n"
    text += "gpu:18:19 [0] INFO comm 0x7f rank 0 nranks 2\n"
    text += "gpu:18:20 [0] include/socket.h:360 WARN Call to connect failed : Connection timed out\n"
    assert read(text).communicators[0].num_ranks == 2
    assert "unreachable" in findings(text)
    assert read("06:16:47 INFO nothing of NCCL's\n").num_lines == 0


@pytest.mark.parametrize("encoding", ["gzip", "utf-16", "utf-16-le", "stdin"])
def test_compressed_utf16_and_standard_input(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "log", HEALTHY.mixed()
    if encoding == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    elif encoding == "stdin":
        path = Path("-")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    else:
        path.write_bytes(text.encode(encoding))
    assert [len(each.members) for each in read_log([path]).communicators] == [8]


@pytest.mark.parametrize("fault", ["cut", "damaged", "checksum"])
def test_a_compressed_log_is_read_up_to_where_it_is_cut_or_damaged(fault: str, tmp_path: Path) -> None:
    """Such as one that was copied while the job was writing it."""
    path, whole = (
        tmp_path / "log.gz",
        bytearray(gzip.compress("".join(HEALTHY.mixed(seed) for seed in range(9)).encode())),
    )
    middle = len(whole) // 2
    if fault == "cut":
        del whole[middle:]
    else:
        begin = -8 if fault == "checksum" else middle
        whole[begin : begin + 4] = b"\xff" * 4
    path.write_bytes(whole)
    output = commopt("nccl-log", path, columns=300).output
    assert f"warning: {path} is cut or damaged, and was read up to there" in output
    assert "communicator 1: 8 ranks, 2 hosts" in output
    path.write_bytes(whole[:30])
    assert refusal("nccl-log", path) == f"commopt: {path}: no line of NCCL before {path} is cut or damaged"


@pytest.mark.parametrize(("encoding", "is_zipped"), [("utf-8", False), ("utf-16", True)])
def test_lines_of_a_large_file_keep_their_numbers(encoding: str, is_zipped: bool, tmp_path: Path) -> None:
    """A file is read in blocks, whose ends are anywhere in a line."""
    lines = [f"step {number} of a program that has no word for us\n" for number in range(30_000)]
    places = range(0, 30_000, 997)
    for number, place in enumerate(places):
        lines[place] = told(f"NCCL_SETTING_{number} set by environment to {number}.")
    content = "".join(lines).encode(encoding)
    path = tmp_path / "large.log"
    path.write_bytes(gzip.compress(content) if is_zipped else content)
    [process] = read_file(path).processes
    found = {name: (fact.value, fact.line.number) for name, fact in process.settings.items()}
    assert found == {f"NCCL_SETTING_{n}": (str(n), place + 1) for n, place in enumerate(places)}


def test_a_line_that_never_ends_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "odd.log"
    path.write_text("x" * 3_000_000 + "\n" + _BOOTSTRAP)
    assert read_log([path]).processes[0].address == "10.0.0.1"


_CHOICE = "AllReduce: {} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..7}}"


def test_choices_of_the_tuner_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "_MAX_CHOICES", 2)
    log = read(*(told(_CHOICE.format(size)) for size in (8, 16, 8, 8, 32, 64, 16)))
    assert {choice.num_bytes: times for choice, times in log.choices.items()} == {8: 3, 16: 2}
    assert log.num_choices_left_out == 2
    assert log.num_lines == 7


_BOOTSTRAP = told("Bootstrap : Using eth0:10.0.0.1<0>")


def test_lines_about_proxies_are_counted_unless_another_line_is_in_them() -> None:
    dull = told("New proxy send connection 4 from local rank 0, transport 2")
    torn = dull.strip() + told("NCCL_ALGO set by environment to Tree.", pid=9)
    log = read(_BOOTSTRAP, dull, dull, torn)
    assert log.num_lines == 5
    assert [process.settings.keys() for process in log.processes if process.settings] == [{"NCCL_ALGO"}]


def test_calls_have_the_number_of_ranks(tmp_path: Path) -> None:
    calls = [
        told(f"AllReduce: opCount {number:x} sendbuff 0x7f recvbuff 0x7f count 8 comm 0x7fa0 [nranks=8] stream 0x9")
        for number in range(3)
    ]
    path = tmp_path / "log"
    path.write_text("".join(calls))
    log = read_log([path])
    assert [(each.num_ranks, each.count) for each in log.communicators] == [(8, 1)]
    assert to_plain(log, [])["num_nccl_lines"] == 3


def test_a_call_into_which_another_line_was_written_is_read(tmp_path: Path) -> None:
    call = told("AllReduce: opCount 1 sendbuff 0x7f recvbuff 0x7f count 8 comm 0x7fa0 [nranks=8] stream 0x9")
    path = tmp_path / "log"
    path.write_text(call + call.rstrip() + told("NET/IB : No device found.", host=" node-b", pid=9000))
    assert {process.host for process in read_log([path]).processes} == {"a", "node-b"}


def test_the_version_of_a_process_that_only_warns() -> None:
    text = (
        told("NCCL version 2.26.2+cuda12.2")
        + "a:7:9 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'\n"
    )
    assert versions_of(read(text)) == ["2.26.2+cuda12.2"]


@pytest.mark.parametrize("place", ["a.cc:1", "tcpxResult_t tcpxProgress(tcpxComm*):1231", "int create(plugin**):418"])
def test_plugins_name_functions_as_places(place: str) -> None:
    log = read(f"vm-0:606:642 [ 6 ] {place} NCCL WARN Cannot get incoming CPU.")
    assert [(warning.host, warning.place) for warning in log.warnings] == [("vm-0", place)]


def test_a_line_that_lists_only_nics_names_its_process() -> None:
    """If it fails, what a log shows that was filtered for its transports is not reported."""
    using = "NET/IB : Using [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE [RO]; OOB enp1s0f1np1:169.254.207.1<0>"
    (process,) = read(told(using, host="promaxgb10-41b1")).processes
    assert process.host == "promaxgb10-41b1"
    assert list(process.nics) == ["rocep1s0f1:1/RoCE", "roceP2p1s0f1:1/RoCE"]

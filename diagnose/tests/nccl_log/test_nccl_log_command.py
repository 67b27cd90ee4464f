"""The command ``commopt nccl-log``: what it prints, and its exit status."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from diagnose_support.documented import is_documented
from diagnose_support.nccl_sample_logs import HEALTHY, SLOW, SampleJob, told
from support.commopt import commopt, refusal

FORBIDDEN = SampleJob(gpus=2, in_host="NET/Socket/0", settings={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})


def run(*arguments: object, **options: Any) -> str:
    return commopt("nccl-log", *arguments, **options).output


def test_nothing_to_find(tmp_path: Path) -> None:
    assert "nothing is wrong, slow or unequal" in run(*HEALTHY.write(tmp_path))


@pytest.mark.parametrize("columns", [30, 200])
def test_large_job_stays_short(columns: int, tmp_path: Path) -> None:
    """64 ranks: what does not fit a line is counted, and nothing is cut off."""
    job = dataclasses.replace(HEALTHY, hosts=[f"n{index}" for index in range(8)], gpus=8, num_channels=1)
    (tmp_path / "log").write_text(job.text())
    output = run(tmp_path / "log", columns=columns)
    assert "…" not in output
    assert "64 ranks, 8 hosts" in output
    assert len(output.splitlines()) < 60


def test_many_communicators_are_counted(tmp_path: Path) -> None:
    """A job with tensor and pipeline parallelism has dozens: the largest are shown."""
    sizes = (4, 1, 2, 2, 2, 2, 1)
    logs = [SampleJob(gpus=size).text().replace("0x9e37", f"0x{index}e37") for index, size in enumerate(sizes)]
    (tmp_path / "log").write_text("".join(logs).replace("comm 0x55d0", "comm 0x66d0"))
    output = run(tmp_path / "log")
    assert output.count("\ncommunicator ") == 4
    assert "communicator 1: 4 ranks" in output
    assert "3 more communicators, of 1, 2, 1 ranks: see --json" in output
    assert len(json.loads(run(tmp_path / "log", "--json"))["communicators"]) == 7


def test_json(tmp_path: Path) -> None:
    found = json.loads(run(*FORBIDDEN.write(tmp_path), "--json"))
    assert found["versions"] == ["2.21.5+cuda12.4"]
    assert found["processes"][1]["settings"] == {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    (finding,) = found["findings"]
    assert finding["code"] == "network_in_host"
    assert finding["evidence"][0]["file"].endswith("rank_0.log")


def test_a_file_without_nccl_among_others_is_named(tmp_path: Path) -> None:
    paths = HEALTHY.write(tmp_path)
    paths[3].write_text("Epoch 0\n")
    output = run(*paths)
    assert "rank_3.log has no line of NCCL" in output
    assert "no line names rank 3" in output


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "No such file"),
        ("folder", None, "is a directory; name the files in it"),
        ("empty", b"", "no line of NCCL; set NCCL_DEBUG=INFO"),
        ("text", b"Epoch 0: 100%\nloss 0.1\n", "no line of NCCL; set NCCL_DEBUG=INFO"),
        ("binary", bytes(range(256)) * 40, "no line of NCCL, and not a text file"),
    ],
)
def test_bad_input_is_one_line(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert words in refusal("nccl-log", tmp_path / name)


def test_docs_show_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.log").write_text(SLOW.mixed())
    assert is_documented("nccl_log.md", "commopt nccl-log slow.log", run("slow.log"))


def test_what_is_only_possible_is_printed_as_such(tmp_path: Path) -> None:
    path = tmp_path / "log"
    text = "ncclSocketInit: connecting to address with family 1 is neither AF_INET(2) nor AF_INET6(10)"
    path.write_text(f"h:1:2 [0] misc/socket.cc:8 NCCL WARN {text}\n")
    assert "error (possible): " in commopt("nccl-log", path).stdout
    assert json.loads(commopt("nccl-log", "--json", path).stdout)["findings"][0]["confidence"] == "possible"


def test_a_long_table_says_what_it_leaves_out(tmp_path: Path) -> None:
    lines = "".join(told(f"AllReduce: {1 << size} Bytes -> Algo RING proto LL time 5.0") for size in range(1, 20))
    (tmp_path / "log").write_text(lines)
    assert "and 7 more: see --json" in commopt("nccl-log", tmp_path / "log").output

"""No line breaks ``commopt nccl-log``, and the beginning of a log tells nothing that its end takes back."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.summary import to_plain
from commopt_diagnose.nccl_log.terminal import print_log
from diagnose_support.nccl_sample_logs import HEALTHY, SampleJob, read_file
from lightning_commopt.text.findings import Finding

JOBS = [
    dataclasses.replace(HEALTHY, gpus=2),
    dataclasses.replace(HEALTHY, gpus=2, version="2.8.4+cuda11.0", between="NET/IB/0"),
    SampleJob(in_host="SHM/direct/direct", gpus=2, settings={"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}),
    SampleJob(in_host="NET/Socket/0", nics=(), network="Socket", gpus=2, version="2.5.7+cuda10.2"),
    dataclasses.replace(HEALTHY, gpus=2, stops=1, rank_versions={2: "2.18.3+cuda12.1"}),
]
OTHERS = [
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)",
    "[PG 0 Rank 2] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last completed NCCL work: 76280750235782912.",
    "n:1:2 [0] NCCL INFO AllReduce: opCount ffffffffffffffffffffff count 1 datatype 7 op 0 root 0 comm 0x1 x",
    "n:1:2 [0] NCCL INFO comm 0x1 rank 99999999999999999999 nranks 999999999999999999999 cudaDev 0 - Init COMPLETE",
    "n:1:2 [0] NCCL INFO comm 0x1 rank 5 nranks 2 - Init COMPLETE",
    "n:1:2 [0] NCCL INFO Channel 999999999999/0 : 0[0] -> 99999999999999[1] via P2P/IPC",
    "n:1:2 [0] NCCL INFO Trees [0] 1/2/3->->-1 [1] x->y->z [99999] 1/1/1->1->1|",
    "n:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->1 [0] 0/-1/-1->1->0",
    "n:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 1.2.3/..., type SYS/SYS, sameChannels 1",
    "n:1:2 [0] NCCL INFO Init timings - ncclCommInitRank: rank 0 nranks 2 total 1.2.3 (kernels ..., x 1)",
    "n:1:2 [0] NCCL INFO 99999999999 coll channels, 1 nvls channels",
    "n:1:2 [0] NCCL INFO AllReduce: 99999999999999999999999 Bytes -> Algo 77 proto 9",
    "NCCL INFO ", "NCCL WARN", "NCCL version ", "NCCL WARN NCCL INFO NCCL WARN ", "NCCL INFO " + "9" * 9000,
]  # fmt: skip


def everything(content: bytes, folder: Path) -> list[Finding]:
    """Does all that the command does, and returns the findings."""
    path = folder / "log"
    path.write_bytes(content)
    log = read_file(path)
    found = find_all(log)
    with Console(file=(folder / "out").open("w"), width=100) as console:
        print_log(log, found, console)
    console.file.close()
    json.dumps(to_plain(log, found))
    return found


def damaged(chance: random.Random) -> Iterator[bytes]:
    """Gives logs that were cut, mixed and written over."""
    lines = [line.encode() for job in chance.sample(JOBS, 2) for line in job.mixed(chance.randrange(99)).splitlines()]
    lines += [line.encode() for line in chance.choices(OTHERS, k=20)]
    yield b"\n".join(chance.sample(lines, len(lines)))
    yield b"\n".join(line[chance.randrange(len(line)) :] for line in lines)
    yield b"\n".join(line[: chance.randrange(len(line))] for line in lines)
    content = bytearray(b"\n".join(lines))
    for _ in range(len(content) // 40):
        content[chance.randrange(len(content))] = chance.randrange(256)
    yield bytes(content)
    yield b"".join(chance.choice((line, line + b"\n", line[:30])) for line in lines)
    yield chance.randbytes(20_000)
    yield b"\n".join(b"NCCL INFO " + chance.randbytes(60) for _ in range(100))
    yield "\n".join(OTHERS).encode()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 40))])
def test_no_line_breaks_it(seed: int, tmp_path: Path) -> None:
    for content in damaged(random.Random(seed)):
        for finding in everything(content, tmp_path):
            assert finding.what
            assert finding.why
            assert finding.advice


def codes(content: bytes, folder: Path) -> set[str]:
    """Returns what is found; where a host or communicator is not known, some findings are more careful."""
    careful = {"network_in_host": "socket_network", "several_versions": "different_version"}
    path = folder / "log"
    path.write_bytes(content)
    found = {finding.code for finding in find_all(read_file(path))}
    return {careful.get(code, code) for code in found} - {"unknown"}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 10))])
def test_a_part_of_a_log(job: SampleJob, seed: int, tmp_path: Path) -> None:
    """The beginning or the end may show that ranks are missing or not ready; all else is in the whole log too."""
    content = job.mixed(seed).encode()
    whole = codes(content, tmp_path)
    for cut in random.Random(seed).sample(range(len(content)), 10):
        for part in (content[:cut], content[cut:]):
            assert codes(part, tmp_path) - whole <= {"missing_ranks", "unfinished_init", "torn_lines"}

"""Reports of ``ncclras -f json``: whole, in one line, cut, and without the comma that NCCL 2.28.9 leaves out."""

from __future__ import annotations

import json

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.summary import versions_of
from diagnose_support.nccl_sample_logs import read

STATUS = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}


def _rank(rank: int, **status: object) -> dict[str, object]:
    place = {"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank}
    return {**place, "status": status}


def _report(*numbers: int, absent: tuple[dict[str, object], ...] = (), **changed: object) -> dict[str, object]:
    """Returns the object about ranks with these numbers of all-reduces; ``changed`` is the status of the first."""
    ranks = [
        {
            **_rank(rank, **{**STATUS, **({} if rank else changed)}),
            "collective_counts": {"Broadcast": 4, "AllReduce": number},
        }
        for rank, number in enumerate(numbers)
    ]
    communicator = {"hash": "0xa1", "secondary_hash": "0xb2:0xc3", "size": 9, "ranks": ranks, "missing_ranks": absent}
    end = {"ras": {"collection_time_sec": 0.001, "timeouts_count": 0}}
    return {"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [communicator], **end}


DEAD = _rank(2, unresponsive=True, considered_dead=True)
LOST = _rank(3, unresponsive=True, considered_dead=False)
LEFT = _rank(4, unresponsive=False, considered_dead=False)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (_report(12, 12), []),
        (
            _report(12, 11, 12),
            [
                "warning: RAS reports MISMATCH for communicator 0xa1: Communicator ranks have different AllReduce"
                " operation counts, 2 ranks have launched up to operation 12, Rank 1 (process 101 on 10.0.0.1) has"
                " launched up to operation 11"
            ],
        ),
        (
            _report(1, 1, absent=(DEAD, LOST)),
            [
                "error: RAS reports DEAD for communicator 0xa1: Dead process of 1 rank,"
                " Rank 2 (process 102 on 10.0.0.1)",
                "error: RAS reports INCOMPLETE for communicator 0xa1: Missing communicator data from 1 rank,"
                " Rank 3 (process 103 on 10.0.0.1)",
            ],
        ),
        (
            _report(1, 1, absent=(LEFT,)),
            [
                "warning: RAS reports MISMATCH for communicator 0xa1: Not yet, or no longer, a member: 1 rank,"
                " Rank 4 (process 104 on 10.0.0.1)"
            ],
        ),
        (
            _report(1, 1, async_error=6, abort_flag=True),
            [
                "error: RAS reports ERROR for communicator 0xa1: Rank 0 (process 100 on 10.0.0.1): init_state 0,"
                " async_error 6",
                "warning: RAS reports MISMATCH for communicator 0xa1: abort_flag is set on rank 0 only",
            ],
        ),
    ],
)
@pytest.mark.parametrize("form", ["pretty", "compact", "damaged"])
def test_a_report_in_json_says_what_its_text_would(form: str, report: dict[str, object], said: list[str]) -> None:
    """If it fails, a job that hangs looks healthy, or a healthy one is blamed."""
    text = json.dumps(report, indent=None if form == "compact" else 2)
    if form == "damaged":
        text = text.replace(',\n          "status"', '\n          "status"').partition('"ras"')[0]
    log = read(f"step 7\n{text}\nstep 8: the loss is 0.1")
    assert versions_of(log) == ["2.28.9"]
    found = [finding for finding in find_all(log) if finding.code != "unknown"]
    assert sorted(f"{finding.severity}: {finding.what}" for finding in found) == said


def test_a_rank_that_is_cut_is_no_mismatch() -> None:
    text = json.dumps(_report(12, 12), indent=2).partition('"AllReduce": 12')
    assert not read(text[0] + text[1] + text[2].partition('"AllReduce"')[0]).ras

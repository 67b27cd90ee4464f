"""What a rank of ``commopt bench`` runs where the command starts its ranks itself: ``python -m ... JOB.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightning_commopt.commands.bench.job import run_job
from lightning_commopt.commands.bench.start import PROGRESS
from lightning_commopt.launch.rank_identity import find_rank_identity
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.bench_settings import BenchSettings


def main() -> None:
    """Reads the job and measures; rank 0 writes the result to the job's file."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    identity = find_rank_identity()
    assert identity is not None

    def print_progress(num_done: int, total: int, label: str) -> None:
        if identity.rank == 0:
            print(PROGRESS + json.dumps([num_done, total, label]), flush=True)

    result: BenchResult = run_job(
        BenchSettings.from_dict(job["settings"]),
        identity,
        device_type=job["device_type"],
        on_progress=print_progress,
        notes=job["notes"],
        init_method=f"file://{job['store']}",
    )
    if identity.rank == 0:
        result.save(Path(job["result"]))


if __name__ == "__main__":
    main()

"""What a rank of ``commopt bench`` runs where the command starts its ranks itself: ``python -m ... JOB.json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lightning_commopt.commands.bench.job import RankPlace, run_job
from lightning_commopt.commands.bench.rank_lines import progress_line
from lightning_commopt.measure.link.bench_settings import BenchSettings


def main() -> None:
    """Reads the job, measures, and on rank 0 leaves the result where the job says."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    place = RankPlace.from_environment(os.environ, f"file://{job['store']}")

    def say(num_done: int, total: int, label: str) -> None:
        if place.rank == 0:
            print(progress_line(num_done, total, label), flush=True)

    result = run_job(
        BenchSettings.from_dict(job["settings"]),
        place,
        device_type=job["device_type"],
        on_progress=say,
        notes=job["notes"],
    )
    if place.rank == 0:
        result.save(Path(job["result"]))


if __name__ == "__main__":
    main()

"""The names of the files in the directories of runs and sweeps, each defined once."""

from __future__ import annotations

RUN_FILE = "run.json"
"""Of a run: its `RunRecord`."""

LOSS_FILE = "loss.jsonl"
"""Of a run: its loss against steps and seconds."""

LINK_MODEL_FILE = "link_model.json"
"""Of a run: the link model that its steps tell, refreshed while it trains."""

CONFIG_FILE = "config.yaml"
"""Of a run: what it was configured with, resolved."""

LOG_FILE = "job.log"
"""Of a job of a sweep: what its processes printed."""

SUMMARY_FILE = "sweep.json"
"""Of a sweep: what became of all its jobs."""

EARLIER_FOLDER = "earlier"
"""Of a sweep: runs that were in the directory of a job that ran again."""

PAGE_FILE = "report.html"
"""Of a sweep: its report."""

TABLE_FILE = "report.csv"
"""Of a sweep: its report, for other programs."""

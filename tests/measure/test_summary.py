"""What `commopt summary` reads from files: the numbers of the records, without torch and whatever is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
from sample_steps import header, step_record, write_run

from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.statistics import Steps, row
from lightning_commopt.measure.summary import summarize_run


def test_the_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    ranks = write_run(tmp_path, num_steps=15)
    summary, notices = summarize_run(tmp_path)
    steps = Steps.of([[row(record) for record in records[10:]] for records in ranks])
    assert summary.metrics == pytest.approx(steps.statistics(), rel=1e-4)
    assert summary.scope == "5 steps and 2 ranks"
    assert notices == []
    assert "communication" in summary.verdict.headline.lower()


def test_the_header_says_what_was_left_out_and_what_averaged(tmp_path: Path) -> None:
    first_line = header(world_size=1, num_warmup_steps=2, comm_hook="bf16", is_lossy=True)
    StepWriter(rank_file(tmp_path, 0), first_line).write([step_record(step) for step in range(6)])
    assert summarize_run(tmp_path)[0].scope == "4 steps and 1 rank"
    assert summarize_run(tmp_path, num_warmup_steps=5)[0].scope == "1 step and 1 rank"


def test_a_rank_that_is_missing_or_behind(tmp_path: Path) -> None:
    """If it fails, a run that was killed, or whose nodes have disks of their own, has no summary."""
    write_run(tmp_path, num_steps=14)
    path = rank_file(tmp_path, 1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:30])
    summary, notices = summarize_run(tmp_path)
    assert summary.scope == "2 steps and 2 ranks"
    assert "its last line is cut off" in notices[0]
    path.unlink()
    summary, notices = summarize_run(tmp_path)
    assert summary.scope == "4 steps and 1 of 2 ranks"
    assert "ranks without records: 1" in notices[0]


def test_fewer_steps_than_the_warm_up(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=4)
    with pytest.raises(ValueError, match=r"has 4 step.*all of them are warm-up .num_warmup_steps=10"):
        summarize_run(tmp_path)


def commopt(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = (
        "import sys, lightning_commopt.commands.app\n"
        "try:\n    lightning_commopt.commands.app.app(sys.argv[1:])\n"
        "finally:\n    print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_the_command_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    """If it fails, `commopt summary` takes seconds before it says anything."""
    write_run(tmp_path, num_steps=12)
    result = commopt("summary", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "over 2 steps and 2 ranks" in result.stdout
    assert "communication" in result.stdout
    imported = set(result.stderr.split())
    assert "lightning_commopt" in imported
    assert not imported & {"torch", "lightning", "pytorch_lightning", "torchmetrics", "scipy"}

"""Text in files that somebody sent reaches no terminal as control characters."""

import re
import time
from pathlib import Path

import pytest

import commopt_diagnose
from commopt_diagnose.bench.model import LinkModel
from diagnose_support.nccl_sample_logs import SLOW
from diagnose_support.sample_bench import result_of, sample
from diagnose_support.topology_samples import PRINTED
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import Mark
from lightning_commopt.watch.hangs.records import Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from support.cross_section import sampled
from support.hostile import HOSTILE, check, plant_everywhere


def hung_run(folder: Path) -> None:
    now_s = time.monotonic()
    marks = [Mark(now_s, number, kinds.PHASE, code, 3) for number, code in enumerate((kinds.DATA, kinds.BACKWARD))]
    snapshots = [
        RankSnapshot(
            rank=0, host="a", phase=kinds.BACKWARD, called="all_reduce", place="a.py:1 in f", hook="Callback.f"
        ),
        RankSnapshot(rank=1, host="b", state="failed", detail="ValueError: x", place="b.py:2 in step", stop_reason="y"),
        RankSnapshot(rank=2, host="c", bucket=1, bucket_names=["a.b", "a.c"], all_ready=True, phase=kinds.BACKWARD),
    ]
    for snapshot in snapshots:
        Records(folder / "hangs", snapshot.rank).keep(snapshot, marks)
    Records(folder / "hangs", 0).report(diagnose(snapshots), snapshots, 30.0)


@pytest.mark.parametrize("name", sampled(["report.json", "rank_1.json"], by_default=["report.json"]))
def test_reports_of_hangs(name: str, tmp_path: Path) -> None:
    """If it fails, a run that somebody sent writes to the reader's terminal what it wants."""
    hung_run(tmp_path)
    plant_everywhere(tmp_path / "hangs" / name, lambda: check("doctor", tmp_path))
    assert check("doctor", tmp_path)[0] == 0


@pytest.mark.exhaustive
def test_other_files(tmp_path: Path) -> None:
    """If it fails, logs, topologies and results of benches that somebody sent do that."""
    rows = [*sample(lambda size: 1e-3 + size / 1e9), *sample(lambda size: 1e-3 + size / 2e9, place="out")]
    result_of(rows).save(tmp_path / "bench.json")
    LinkModel.fit(result_of(rows)).save(tmp_path / "model.json")
    for name in ("bench.json", "model.json"):
        plant_everywhere(tmp_path / name, lambda name=name: check("bench", "--load", tmp_path / name))  # type: ignore[misc]
    log = tmp_path / "log.txt"
    lines = SLOW.text().splitlines()
    log.write_text("".join(f"{line}{HOSTILE}\n" for line in lines), errors="replace")
    check("nccl-log", log)
    matrix = tmp_path / "topology.txt"
    for text in (next(iter(PRINTED.values())).tabbed(),):
        for sent in (text.replace("GPU0", f"GPU0{HOSTILE}"), HOSTILE + text, text.replace("\t", f"{HOSTILE}\t")):
            matrix.write_text(sent, errors="replace")
            check("topo", "--from", matrix)


def test_output_has_no_other_way() -> None:
    """If it fails, a command prints text from files without escapes."""
    package = Path(commopt_diagnose.__file__).parent
    for path in package.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(package).as_posix()
        assert not re.search(r"(?<!\w)Console\(", text), name
        assert len(re.findall(r"typer\.echo\(", text)) == {"commands.py": 1}.get(name, 0), name

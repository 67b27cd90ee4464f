"""What is advised where one rank alone calls what needs all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from alone_fits import fit_alone
from torch.torch_version import TorchVersion

from support.ranks import RankError, run_ranks

_NEEDS = {
    "save": r"^trainer\.save_checkpoint needs all ranks",
    "metric": r"^A metric's compute\(\) needs all ranks",
    "log": r"^Logging with sync_dist=True",
    "log_dir": r"^trainer\.log_dir is sent",
    "barrier": r"^A collective needs all ranks",
    "objects": r"^A collective needs all ranks",
    "own": r"^A collective needs all ranks",
    "uneven": r"^Ranks must have the same number of batches",
}
_FAULTS = (
    "batch: save",
    "batch: metric",
    "batch: barrier",
    "batch: objects",
    "batch: log_dir",
    "epoch: save",
    "epoch: metric",
    "validation: metric",
    "step: log",
    "step: own",
    "rank: uneven",
)


@pytest.mark.exhaustive
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="this torch records no collectives of gloo")
@pytest.mark.parametrize("fault", _FAULTS)
def test_the_advice_belongs_to_the_operation(fault: str, tmp_path: Path) -> None:
    """If it fails, a user looks for uneven batches who has saved a checkpoint on one rank."""
    with pytest.raises(RankError):
        run_ranks(fit_alone, tmp_path, fault)
    report = json.loads((tmp_path / "hangs" / "report.json").read_text())
    operation = fault.partition(": ")[2]
    assert re.search(_NEEDS[operation], report["hints"][0]), report
    assert (operation == "uneven") == any("same number of batches" in hint for hint in report["hints"]), report
    if operation != "uneven":
        assert "alone_fits.py" in report["sentence"], report

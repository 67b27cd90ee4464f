"""The command passes here, and refuses what it cannot do; `tests/testing` has the laws that it checks."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from support.commopt import commopt, refusal


@pytest.mark.exhaustive
def test_the_command(tmp_path: Path) -> None:
    """If it fails, gradient sync is broken on this machine, or the command is."""
    commopt("selftest", "--device", "cpu", "--output", tmp_path / "selftest.json", "--limit-s", 3000)
    written = json.loads((tmp_path / "selftest.json").read_text())
    num_of_fsdp2 = sum(outcome["name"].startswith("FSDP2") for outcome in written["outcomes"])
    assert num_of_fsdp2
    num_passed = 11 + (num_of_fsdp2 if hasattr(FSDPModule, "set_custom_reduce_scatter") else 0)
    statuses = Counter(outcome["status"] for outcome in written["outcomes"])
    assert statuses == {"passed": num_passed, "not checked": len(written["outcomes"]) - num_passed}
    assert len(written["outcomes"]) == 13 + num_of_fsdp2
    assert written["info"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(("output", "words"), [(".", "it is a folder"), ("nowhere/self.json", "there is no folder")])
def test_a_file_that_cannot_be_written_is_reported_first(output: str, words: str) -> None:
    """If it fails, minutes of checks end in an error, and nobody sees what they found."""
    line = refusal("selftest", "--device", "cpu", "--output", output)
    assert line.startswith(f"commopt: {output} cannot be written: {words}")


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_device_that_there_is_not(device: str) -> None:
    """If it fails, a wrong --device ends in a traceback."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    assert device in commopt("selftest", "--device", device, status=2).output

"""What CommTimeMonitor writes goes on where one of its files cannot be written."""

from pathlib import Path

import pytest

from diagnose_support.sample_bench import result_of, sample
from lightning_commopt.callbacks.publisher import StepFiles
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.record import Phase, StepRecord
from lightning_commopt.measure.runs.files import LINK_MODEL_FILE


@pytest.mark.parametrize(("rank", "num_warnings"), [(0, 1), (1, 0)])
def test_a_model_that_cannot_be_written_is_warned_of_once(
    rank: int, num_warnings: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """If it fails, a file in the way ends a training, or costs the steps as well."""
    (tmp_path / LINK_MODEL_FILE).mkdir()
    model = LinkModel.fit(result_of(sample(lambda size: size / 1e8)))
    files = StepFiles(tmp_path, {"rank": rank, "world_size": 2, "origin_unix_s": 0.0})
    for step in range(3):
        files.save_model(model)
        record = StepRecord(step=step, num_samples=1, phases=(Phase("backward", 0, 1),), buckets=())
        files.save_steps([record])
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == num_warnings
    assert all("saving the link model failed" in message for message in messages)
    assert [step.step for step in read_run(tmp_path)[0].steps] == [0, 1, 2]

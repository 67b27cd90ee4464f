"""What CommTimeMonitor writes goes on where one of its files cannot be written."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from lightning_commopt import CommPlan
from lightning_commopt.callbacks.all_ranks import AllRanks
from lightning_commopt.callbacks.publisher import StepFiles, gathering_group
from lightning_commopt.compat.torch import flight_records
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.workload import Workload
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.link.link import Link
from lightning_commopt.measure.record import Phase, StepRecord
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.watch.hangs.flight_recorder import parse_collectives
from support.ranks import run_ranks
from support.strategy_models import trainer


def test_a_prediction_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """If it fails, a file in the way ends a training, or costs the steps as well."""
    (tmp_path / PREDICTION_FILE).mkdir()
    workload = Workload(gradients=(), forward_s=1.0, backward_s=1.0, rest_s=1.0)
    basis = Basis(plan=CommPlan(), workload=workload, link=Link(hop_s=0.0, s_per_byte=0.0), costs={}, step_s=1.0)
    files = StepFiles(tmp_path, {"rank": 0, "world_size": 2, "origin_unix_s": 0.0})
    for step in range(3):
        files.save_basis(basis, [])
        record = StepRecord(step=step, num_samples=1, phases=(Phase("backward", 0, 1),), buckets=())
        files.save_steps([record])
    (message,) = [str(warning.message) for warning in recwarn]
    assert "could not save the prediction" in message
    assert [step.step for step in read_run(tmp_path)[0].steps] == [0, 1, 2]


@pytest.mark.parametrize(("rank", "is_kept"), [(0, False), (1, True)])
def test_the_prediction_of_an_earlier_fit_ends_with_the_first_steps(tmp_path: Path, rank: int, is_kept: bool) -> None:
    """If it fails, a killed fit is summarized with the recommendations of the fit before it in its directory."""
    (tmp_path / PREDICTION_FILE).write_text("{}")
    files = StepFiles(tmp_path, {"rank": rank, "world_size": 2, "origin_unix_s": 0.0})
    assert (tmp_path / PREDICTION_FILE).exists()
    files.save_steps([StepRecord(step=0, num_samples=1, phases=(Phase("backward", 0, 1),), buckets=())])
    assert (tmp_path / PREDICTION_FILE).exists() == is_kept


def _gather() -> tuple[float, list[str]]:
    all_ranks = AllRanks(gathering_group(trainer("ddp")), (1, 1))
    all_ranks.send(torch.tensor([[1.0 + dist.get_rank()]]))
    values = all_ranks.take(60)
    assert values is not None
    dist.all_reduce(torch.zeros(5))
    try:
        records = flight_records()
    except RuntimeError:  # this torch has no Flight Recorder
        records = {}
    return float(values.sum()), [str(found.signature) for found in parse_collectives(records)[-2:]]


def test_what_is_gathered_in_the_background_is_no_sign_of_where_a_rank_is() -> None:
    """If it fails, HangMonitor takes the end of a window for a part of the order that collectives have."""
    for total, signatures in run_ranks(_gather):
        assert total == 1 + 2
        assert not any(signature == "all_gather (1, 1)" for signature in signatures)
        is_recorded = TorchVersion(torch.__version__) >= "2.11"  # earlier ones record nothing by themselves
        assert signatures[-1:] == ["all_reduce (5,)"] or not (is_recorded or signatures)

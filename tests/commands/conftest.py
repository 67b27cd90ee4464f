"""A run whose step is predicted from its files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_commopt.cost.basis import basis_of_run
from support import quick_costs as costs
from support.sample_runs import SampleRun, write_run


@pytest.fixture
def quick_costs() -> Iterator[None]:
    """Measures compressors on one small bucket."""
    with costs.quick_costs():
        yield


@pytest.fixture(scope="session")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that has ``prediction.json``; nothing in it may change."""
    folder = tmp_path_factory.mktemp("run")
    with costs.quick_costs():
        write_run(folder, SampleRun(num_buckets=4))
        basis_of_run(folder).save(folder)
    return folder

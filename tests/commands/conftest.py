"""A run whose step is predicted from its files."""

from pathlib import Path

import pytest

from lightning_commopt.cost import compressor_cost
from lightning_commopt.cost.basis import basis_of_run
from support.sample_runs import SampleRun, write_run


@pytest.fixture
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures compressors on small buckets."""
    monkeypatch.setattr(compressor_cost, "LARGE_BYTES", 2**20)


@pytest.fixture(scope="session")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that has ``prediction.json``; nothing in it may change."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressor_cost, "LARGE_BYTES", 2**20)
        write_run(folder, SampleRun(num_buckets=4))
        basis_of_run(folder).save(folder)
    return folder

"""The reports of the sample sweeps, which tests only read."""

import pytest

from lightning_commopt.report.model import Report
from support.sample_runs import four_methods_report, ladder_report, sample_report


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return sample_report(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="session")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return ladder_report(tmp_path_factory.mktemp("ladder"))


@pytest.fixture(scope="session")
def four_methods(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return four_methods_report(tmp_path_factory.mktemp("four_methods"))


@pytest.fixture(params=["sweep", "ladder", "four_methods"])
def report(request: pytest.FixtureRequest) -> Report:
    """Returns each of them."""
    return request.getfixturevalue(request.param)

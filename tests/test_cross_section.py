"""The default run leaves out what is marked exhaustive, and says so."""

from pathlib import Path

import pytest

from support.cross_section import sampled

pytest_plugins = ("pytester",)

TESTS = """
import pytest

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_sizes(size):
    pass
"""


@pytest.mark.parametrize("workers", sampled(["-n=0", "-n=1"], by_default=["-n=0"]))
@pytest.mark.parametrize(
    ("arguments", "num_run", "num_left_out"),
    [
        ([], 1, 1),
        (["--all"], 2, 0),
        (["--all", "-m", "exhaustive"], 1, 1),
        (["-k", "sizes and 2"], 0, 2),
        (["test_sample.py::test_sizes[2]"], 1, 0),
    ],
)
def test_what_runs(
    pytester: pytest.Pytester, arguments: list[str], num_run: int, num_left_out: int, workers: str
) -> None:
    """If it fails, CI runs a test twice or never, or nobody notices that one is left out."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makepyfile(test_sample=TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive: more cases")
    result = pytester.runpytest_inprocess(workers, "-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=num_run, deselected=num_left_out if workers == "-n=0" else 0)
    is_told = "a cross-section: 1 more of the same run with --all" in result.stdout.str()
    assert is_told == ("--all" not in arguments and num_left_out > 0)


NOISY = """
import warnings

def pytest_configure(config):
    warnings.warn("this plugin warns while pytest starts")
"""
WARNING = """
import warnings

import pytest

def test_warning():
    warnings.warn("within a test")

@pytest.mark.filterwarnings("ignore:within")
def test_expected():
    warnings.warn("within a test")

@pytest.mark.gpu
def test_of_torch():
    warnings.warn_explicit("a prototype feature", UserWarning, "torch/cuda/__init__.py", 1, module="torch.cuda")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", ["-n=0", "-n=1"])
def test_only_warnings_within_tests_are_errors(
    pytester: pytest.Pytester, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, tests do not start where somebody has another plugin, or a warning of ours goes unnoticed."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makepyfile(noisy=NOISY, test_sample=WARNING)
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a device")
    result = pytester.runpytest_subprocess(workers, "-p", "no:cacheprovider", "-p", "noisy")
    result.assert_outcomes(passed=2, failed=1)
    assert "FAILED test_sample.py::test_warning" in result.stdout.str()

"""The wheel has what a user needs, and nothing that gets in the way of other packages."""

import email
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.wheels import REPOSITORY, build_wheel, install_wheel, run_checked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(wheel, tmp_path_factory.mktemp("environment") / "venv")


def _names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def _requirements(wheel: Path) -> list[Requirement]:
    (name,) = (name for name in _names(wheel) if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_wheel_ships_every_file_once(wheel: Path) -> None:
    """Tables of texts, templates and kernels in C are files that nothing imports."""
    names = _names(wheel)
    assert len(names) == len({*names})
    assert not [name for name in names if name.startswith("conf/")]
    if not (REPOSITORY / ".git").exists():
        pytest.skip("only git knows which files belong to the package")
    tracked = subprocess.run(
        ["git", "ls-files", "conf", "lightning_commopt"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    there = [name for name in tracked if (REPOSITORY / name).is_file() and "hydra_plugins" not in name]
    expected = {f"lightning_commopt/{name.removeprefix('lightning_commopt/')}" for name in there}
    assert len(expected) > 100
    assert expected <= {*names}


def test_wheel_has_three_top_level_names(wheel: Path) -> None:
    """A stray top-level folder, such as tests/, would be importable in every environment of our users."""
    folders = {name.split("/")[0] for name in _names(wheel)}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"lightning_commopt", "hydra_plugins"}


def test_hydra_plugins_stays_a_namespace(wheel: Path) -> None:
    """With an __init__.py in it, Hydra would no longer find the plugins of other distributions."""
    modules = {name for name in _names(wheel) if name.startswith("hydra_plugins/")}
    assert "hydra_plugins/lightning_commopt_hydra.py" in modules
    assert all("lightning_commopt" in name for name in modules)


def test_no_release_with_malware_can_be_installed(wheel: Path) -> None:
    """Lightning 2.6.2 and 2.6.3 on PyPI steal credentials (GHSA-w37p-236h-pfx3)."""
    (lightning,) = (requirement.specifier for requirement in _requirements(wheel) if requirement.name == "lightning")
    assert [version for version in ("2.5.0", "2.6.1", "2.6.2", "2.6.3", "2.6.6") if version in lightning] == [
        "2.5.0",
        "2.6.1",
        "2.6.6",
    ]


def test_wheel_has_license_and_type_marker(wheel: Path) -> None:
    assert "lightning_commopt/py.typed" in _names(wheel)
    assert [name for name in _names(wheel) if name.endswith("licenses/LICENSE")]


@pytest.mark.exhaustive
def test_console_commands_start(scripts: Path, tmp_path: Path) -> None:
    assert json.loads(run_checked([str(scripts / "commopt"), "info", "--json"], cwd=tmp_path))["versions"]
    assert "quickstart" in run_checked([str(scripts / "commopt-train"), "--help"], cwd=tmp_path)


_DISCOVER = """
import sys
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
print(*[plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)])
print(*{"torch", "lightning", "numpy"}.intersection(sys.modules))
"""


@pytest.mark.parametrize("install", [pytest.param("wheel", marks=pytest.mark.exhaustive), "this"])
def test_hydra_finds_the_plugin_without_importing_torch(
    install: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Hydra imports plugins at every start of every application: they must cost it nothing."""
    python = str(request.getfixturevalue("scripts") / "python") if install == "wheel" else sys.executable
    plugins, heavy = run_checked([python, "-c", _DISCOVER], cwd=tmp_path).split("\n")[:2]
    assert "CommOptSearchPath" in plugins.split()
    assert not heavy


def test_hard_dependencies_are_few(wheel: Path) -> None:
    """If it fails, whoever wants a strategy installs what only reports or tools need."""
    required = {requirement.name for requirement in _requirements(wheel) if "extra" not in str(requirement.marker)}
    named = {"hydra-core", "lightning", "nvtx", "torch", "torchmetrics"}
    assert required == named | {"lightning-utilities", "numpy", "rich", "typer"}

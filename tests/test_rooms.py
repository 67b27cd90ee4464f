"""The rooms of the package: imports run one way, and the library needs nothing that only commands do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_commopt

PACKAGE = Path(lightning_commopt.__file__).parent
AROUND_THE_LIBRARY = {"commands", "train", "report", "plugins"}
OF_COMMANDS = ("scipy", "jinja2", "typer")


def modules() -> dict[str, Path]:
    """Returns the file of each module, but for plugins, which have other names once installed."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """Returns the first folder or module below the package; of the package itself its name."""
    return module.split(".")[1] if "." in module else module


def imported(path: Path) -> Iterator[str]:
    """Yields every module or name of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" if "." not in node.module else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "lightning_commopt" and "." in name)


@cache
def imports_of_rooms() -> dict[str, dict[str, list[str]]]:
    """Returns for each room the rooms that it imports, and the modules that do."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, path in modules().items():
        for name in imported(path):
            if room(name) != room(module) and room(name) not in lightning_commopt.__all__:
                found[room(module)][room(name)].append(module)
    return found


def test_imports_run_one_way() -> None:
    """If it fails, two rooms need each other: graphlib.CycleError names them."""
    order = [*TopologicalSorter({name: others.keys() for name, others in imports_of_rooms().items()}).static_order()]
    assert order.index("text") < order.index("compressors") < order.index("sync") < order.index("strategy")
    assert order.index("plan") < order.index("cost") < order.index("callbacks")


def test_the_ways_of_ddp_and_of_fsdp2_meet_in_what_is_common() -> None:
    """If it fails, gradient sync of one strategy depends on the other's, or what both use depends on either."""
    ways = ("lightning_commopt.sync.ddp", "lightning_commopt.sync.fsdp2")
    for module, path in modules().items():
        if module.startswith("lightning_commopt.sync"):
            others = tuple(way for way in ways if not module.startswith(way))
            assert not [name for name in imported(path) if name.startswith(others)], module


def test_predictions_know_nothing_of_lightning() -> None:
    """If it fails, a step cannot be predicted from records alone."""
    allowed = {"measure", "compressors", "plan", "text"}
    assert imports_of_rooms()["cost"].keys() <= allowed


def test_the_library_imports_no_command() -> None:
    """If it fails, whoever uses a strategy loads what only commands, sweeps or reports need."""
    for name, others in imports_of_rooms().items():
        if name not in AROUND_THE_LIBRARY:
            assert not {other: found for other, found in others.items() if other in AROUND_THE_LIBRARY}


def test_training_needs_no_tests() -> None:
    """If it fails, whoever trains loads the laws for compressors, or these depend on more than they are about."""
    assert {name for name, others in imports_of_rooms().items() if "testing" in others} == {"commands"}
    assert imports_of_rooms()["testing"].keys() <= {"compressors", "sync", "plan", "text"}


def test_a_report_needs_records_only() -> None:
    """If it fails, reading runs needs what training them needs."""
    assert imports_of_rooms()["report"].keys() <= {"measure", "text", "compat"}


_IMPORT_ALL = """
import importlib, importlib.metadata, importlib.machinery, sys

missing = sys.argv[1].split(",")
find_spec = importlib.machinery.PathFinder.find_spec
from_name = importlib.metadata.Distribution.from_name

def find_others(name, *arguments):
    return None if name in missing else find_spec(name, *arguments)

def other_distribution(name):
    if name in missing:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)

importlib.machinery.PathFinder.find_spec = find_others
importlib.metadata.Distribution.from_name = other_distribution
for name in sys.argv[2:]:
    importlib.import_module(name)
assert not {*missing} & {*sys.modules}
"""


@pytest.mark.exhaustive
def test_the_library_imports_without_what_commands_need() -> None:
    """If it fails, a strategy needs scipy, jinja2 or typer to be installed."""
    library = sorted(
        name
        for name in modules()
        if room(name) not in {*AROUND_THE_LIBRARY, "ray"} and not name.endswith(("_triton", "__main__"))
    )
    assert len(library) > 100
    command = [sys.executable, "-c", _IMPORT_ALL, ",".join(OF_COMMANDS), *library]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_class_variables_name_their_type() -> None:
    """If it fails, Python 3.10 refuses to evaluate the annotations, and with them the import of plans."""
    bare = [
        f"{path}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "ClassVar"
    ]
    assert bare == []

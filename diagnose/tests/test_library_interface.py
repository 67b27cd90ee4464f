"""This distribution uses of the library what docs/reference/stability.md promises to tools, and nothing else."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import commopt_diagnose
import lightning_commopt

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stability.md"


def promised() -> set[tuple[str, str]]:
    """Returns the modules and names in the table, and the names of the package itself."""
    table = _PAGE.read_text().partition("### For tools")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    pairs = set()
    for row in table.splitlines():
        modules, names = (re.findall(r"`([\w.]+)`", cell) for cell in row.strip("|").split("|"))
        groups = [re.findall(r"`(\w+)`", group) for group in row.strip("|").split("|")[1].split(";")]
        for number, module in enumerate(modules):
            whole = module if not module.startswith(".") else modules[0].rpartition(".")[0] + module
            pairs |= {(f"lightning_commopt.{whole}", name) for name in (groups[number] if len(modules) > 1 else names)}
    return pairs


@cache
def imported() -> list[tuple[str, str, str]]:
    """Returns each file, and the modules and names of the library that it imports."""
    found = []
    for path in Path(commopt_diagnose.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning_commopt":
                found += [(path.name, node.module or "", alias.name) for alias in node.names]
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("lightning_commopt")], path
    return found


def test_everything_imported_is_promised() -> None:
    """If it fails, a change inside the library breaks this distribution without anybody being told."""
    known = promised()
    public = set(lightning_commopt.__all__)
    unknown = [
        (file, module, name)
        for file, module, name in imported()
        if (module, name) not in known and not (name in public and module.count(".") <= 1)
    ]
    assert not unknown


def test_everything_promised_is_there_and_used() -> None:
    """If it fails, the table promises what does not exist, or what no tool needs."""
    used = {(module, name) for _, module, name in imported()}
    for module, name in promised():
        assert not name.startswith("_")
        assert hasattr(importlib.import_module(module), name), (module, name)
        assert (module, name) in used, (module, name)

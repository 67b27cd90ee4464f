"""Whether the tests notice a fault in what orders streams, keeps memory, and computes: one small fault after the other.

Each mutant is a copy of the checkout with one fault in a file of the gradient path: a wait, or what keeps memory for a
stream, left out; a mask that ends one element early, or writes the first tile only; a loop that ends one pass early; a
factor left out; a sign turned; a condition reversed. The tests of that file run on it until one fails, first as by
default, then with --all. A mutant that none notices is printed with its line: a test is missing, or the fault changes
nothing.

    python benchmarks/mutants.py --sample 40 --num-at-once 2
    python benchmarks/mutants.py --files 'lightning_commopt/sync/*' --kinds wait
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from results_file import write_result
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
KINDS = ("wait", "mask", "tile", "loop", "factor", "sign", "condition")
TESTS = {
    "lightning_commopt/sync/executors.py": ("tests/streams", "tests/sync"),
    "lightning_commopt/sync/hook.py": ("tests/streams", "tests/sync"),
    "lightning_commopt/sync/gather.py": ("tests/streams", "tests/sync"),
    "lightning_commopt/compressors/*.py": ("tests/compressors", "tests/streams"),
    "lightning_commopt/compressors/kernels/*": ("tests/compressors",),
}
WAITS = {"wait", "wait_stream", "wait_event", "record_stream", "protect", "synchronize"}
LIMIT_S = 1200


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault.

    Attributes:
        file: that has it, from the root of the checkout.
        kind: one of `KINDS`.
        line: its number.
        begin: position in the file of what is replaced.
        end: position behind it.
        before: what stands there.
        after: what stands there in the mutant.
    """

    file: str
    kind: str
    line: int
    begin: int
    end: int
    before: str
    after: str


class _Finder(ast.NodeVisitor):
    """Finds the mutants of a module."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._is_kernel = file.endswith("_triton.py")
        self.visit(ast.parse(source))

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        name = getattr(call.func, "attr", "") if isinstance(call, ast.Call) else ""
        if name.lstrip("_") in WAITS or name.startswith("_protect"):
            self._add("wait", node, "pass")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not self._is_kernel or any("jit" in ast.unparse(each) for each in node.decorator_list):
            for statement in node.body:
                self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if self._is_kernel and name in ("tl.load", "tl.store"):
            masks = node.args[1:2] if name == "tl.load" else node.args[2:3]
            for mask in masks:
                self._add("tile", mask, f"(({ast.unparse(mask)}) & (tl.program_id(0) == 0))")
        if self._is_kernel and name == "range":
            last = node.args[-1] if len(node.args) == 1 else node.args[1]
            step = ast.unparse(node.args[2]) if len(node.args) == 3 else "1"
            self._add("loop", last, f"({ast.unparse(last)}) - ({step})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if self._is_kernel and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            if isinstance(node.ops[0], ast.Lt) and "float" not in right:
                self._add("mask", node, f"({left} < {right} - 1)")
            elif "tl.load" in left:
                operator = "==" if isinstance(node.ops[0], ast.NotEq) else "!="
                self._add("condition", node, f"({left} {operator} {right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        right = node.right
        is_factor = isinstance(node.op, (ast.Mult, ast.Div)) and isinstance(right, (ast.Name, ast.Attribute))
        if is_factor and (self._is_kernel or "compressors" in self._file):
            self._add("factor", node, f"({ast.unparse(node.left)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if self._is_kernel and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add("sign", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def _add(self, kind: str, node: Any, after: str) -> None:
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        before = self._source.encode()[begin:end].decode()
        self.found.append(
            Mutant(file=self._file, kind=kind, line=node.lineno, begin=begin, end=end, before=before, after=after)
        )


def mutants_of(file: str) -> list[Mutant]:
    """Returns all mutants of a file, in Python or C."""
    source = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".py"):
        return _Finder(file, source).found
    return list(_mutants_of_c(file, source))


def _mutants_of_c(file: str, source: str) -> Iterator[Mutant]:
    kinds = {
        "loop": re.compile(r"(?<=; )(\w+) < ([^;]+)(?=; \+\+|; \w+ ?\+)"),
        "factor": re.compile(r"(\w+) \* (\w*(?:scale|inverse|weight|factor)\w*)"),
        "sign": re.compile(r"(?<=[=(,] )-()(\w+)"),
    }
    replaced = {"loop": r"\1 + 1 < \2", "factor": r"\1", "sign": r"\2"}
    for kind, pattern in kinds.items():
        for match in pattern.finditer(source):
            begin, end = (len(source[:at].encode()) for at in match.span())
            yield Mutant(
                file=file,
                kind=kind,
                line=source.count("\n", 0, match.start()) + 1,
                begin=begin,
                end=end,
                before=match[0],
                after=match.expand(replaced[kind]),
            )


def find_noticing(mutant: Mutant | None, tests: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Runs the tests on a copy of the checkout with a fault; returns which run has noticed it, and the test."""
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for file in filter(None, files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)
    if mutant is not None:
        source = (ROOT / mutant.file).read_bytes()
        (folder / mutant.file).write_bytes(source[: mutant.begin] + mutant.after.encode() + source[mutant.end :])
    path = os.pathsep.join(map(str, (folder, folder / "lightning_commopt" / "plugins")))
    begin = time.monotonic()
    for run, options in (("default", []), ("all", ["--all"])):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *options, *tests]
        try:
            ran = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"found_by": run, "test": "time-out", "seconds": time.monotonic() - begin}
        if ran.returncode != 0:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
            test = failed[0] if failed else ran.stdout[-300:] + ran.stderr[-300:]
            return {"found_by": run, "test": test, "seconds": time.monotonic() - begin}
    return {"found_by": None, "test": None, "seconds": time.monotonic() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=list(TESTS), help="patterns; the default is the gradient path")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sample", type=int, help="that many, drawn at random; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-at-once", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    files = {path.relative_to(ROOT): None for pattern in arguments.files for path in sorted(ROOT.glob(pattern))}
    known = {str(file): tests for file in files for pattern, tests in TESTS.items() if file.match(pattern)}
    mutants = [each for file in known if file.endswith((".py", ".c")) for each in mutants_of(file)]
    mutants = [each for each in mutants if each.kind in arguments.kinds]
    if arguments.sample is not None:
        mutants = random.Random(arguments.seed).sample(mutants, min(arguments.sample, len(mutants)))
    console = Console()
    if arguments.list:
        for each in mutants:
            console.print(
                f"{each.file}:{each.line} {each.kind}: {each.before} -> {each.after}", markup=False, soft_wrap=True
            )
        return
    load = os.getloadavg()[0]

    def run(mutant: Mutant | None, tests: tuple[str, ...]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return find_noticing(mutant, tests, Path(folder))

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.num_at_once) as pool:
        for tests in {known[each.file] for each in mutants}:
            if (result := run(None, tests))["found_by"] is not None:
                raise SystemExit(f"{' '.join(tests)} fail without a fault: {result['test']}")
        running = [pool.submit(run, each, known[each.file]) for each in mutants]
        for mutant, future in track(list(zip(mutants, running, strict=True)), "mutants", console=console):
            rows.append(asdict(mutant) | future.result())
            if rows[-1]["found_by"] is None:
                text = f"not noticed: {mutant.file}:{mutant.line} {mutant.kind}: {mutant.before} -> {mutant.after}"
                console.print(text, markup=False, soft_wrap=True)
    table = Table("fault", "mutants", "noticed by default", "with --all", "not")
    counts = Counter((row["kind"], row["found_by"]) for row in rows)
    for kind in KINDS:
        numbers = [counts[kind, by] for by in ("default", "all", None)]
        table.add_row(kind, str(sum(numbers)), *map(str, numbers))
    console.print(table)
    if arguments.output is not None:
        write_result(arguments.output, {"mutants": rows}, load)


if __name__ == "__main__":
    main()

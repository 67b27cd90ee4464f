"""Whether the tests notice a fault in what orders streams, keeps memory, and computes: one small fault after the other.

Each mutant is a copy of the checkout with one fault: a wait, or what keeps memory for a stream, left out; a mask that
ends one element early, or writes the first tile only; a loop that ends one pass early; a factor left out; a sign
turned; a condition reversed; in what is no kernel, a branch that is taken where it should not be. The tests about that
file run on it until one fails: those of the default run, then the others. A mutant that none notices is printed with
its line: a test is missing, or the fault changes nothing.

    python benchmarks/mutants.py --output mutants.jsonl                 # all; goes on where an earlier run has stopped
    python benchmarks/mutants.py --output mutants.jsonl --part 2/8      # every eighth one, from the second on
    python benchmarks/mutants.py --files 'lightning_commopt/sync/*' --kinds wait
    python benchmarks/mutants.py --kinds wait --tests tests/streams/test_fake_device.py  # whether those alone notice
    python benchmarks/mutants.py --part 1/20 --default-run  # whether the default run notices: minutes, not hours
    python benchmarks/mutants.py --sample 6 --seed 7 --default-run  # six of each folder, by chance
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
KINDS = ("wait", "mask", "tile", "loop", "factor", "sign", "condition", "branch")
_KERNELS = "tests/compressors/kernels/test_"
_LAWS = "tests/compressors/test_laws.py"


def _interpreted(*names: str) -> tuple[str, ...]:
    """Returns programs that run kernels in Triton's interpreter."""
    return ("python", *(f"{_KERNELS}{name}.py" for name in names))


def _compiled(*names: str) -> tuple[str, ...]:
    return (*(f"{_KERNELS}{name}.py" for name in names), _LAWS, "--all", "-k", "not interpreter and not compile")


def _of_fabric(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_fabric{name}.py" for name in names)


_FOLDER = "lightning_commopt/compressors"
_PLANS = ("tests/plan", "tests/sync/diloco/test_parts.py", "tests/strategy/test_sharded_plan.py")
_DILOCO = ("tests/sync/diloco", "tests/strategy", *_of_fabric("_diloco", "_diloco_resume"), "-k", "diloco")
_COMPRESSORS = ("tests/compressors", "tests/streams", "-k", "not interpreter and not compile")
TESTS = {
    "lightning_commopt/sync/*.py": ("tests/streams", "tests/sync", "tests/strategy"),
    "lightning_commopt/sync/ddp/*.py": ("tests/streams", "tests/sync", "tests/strategy"),
    "lightning_commopt/sync/fsdp2/*.py": ("tests/sync", "tests/streams", "tests/strategy", "-k", "sharded or fsdp2"),
    "lightning_commopt/sync/diloco/*.py": _DILOCO,
    "lightning_commopt/strategy/*diloco*.py": _DILOCO,
    "lightning_commopt/strategy/living*.py": _DILOCO,
    "lightning_commopt/plan/*.py": _PLANS,
    "lightning_commopt/tune/*.py": ("tests/tune",),
    "lightning_commopt/cost/*.py": ("tests/cost", "tests/tune"),
    "lightning_commopt/cost/*/*.py": ("tests/cost",),
    "lightning_commopt/watch/hangs/*.py": ("tests/watch/hangs",),
    "lightning_commopt/watch/*.py": ("tests/watch",),
    "lightning_commopt/callbacks/*.py": ("tests/callbacks",),
    "lightning_commopt/launch/*.py": ("tests/launch",),
    "lightning_commopt/measure/*.py": ("tests/measure", "tests/commands", "tests/report"),
    "lightning_commopt/measure/*/*.py": ("tests/measure", "tests/commands", "tests/report"),
    "lightning_commopt/strategy/*.py": ("tests/strategy",),
    "lightning_commopt/commands/*.py": ("tests/commands",),
    "lightning_commopt/commands/*/*.py": ("tests/commands",),
    "lightning_commopt/compat/*.py": ("tests/compat", "tests/sync", "tests/strategy", "tests/callbacks"),
    "lightning_commopt/report/*.py": ("tests/report",),
    "diagnose/commopt_diagnose/*.py": ("diagnose/tests",),
    "diagnose/commopt_diagnose/*/*.py": ("diagnose/tests",),
    "lightning_commopt/train/*.py": ("tests/train",),
    "lightning_commopt/train/*/*.py": ("tests/train",),
    "lightning_commopt/testing/*.py": ("tests/testing", "tests/compressors", "tests/sync", "-k", "not interpreter"),
    "lightning_commopt/text/*.py": ("tests/text", "tests/commands", "tests/report", "tests/callbacks"),
    "lightning_commopt/metrics.py": ("tests/measure", "tests/callbacks"),
    "lightning_commopt/baselines.py": ("tests/strategy/test_baselines.py", "tests/train"),
    "lightning_commopt/ray.py": ("tests/strategy", "-k", "ray"),
    "lightning_commopt/fabric.py": _of_fabric("", "_diloco", "_sharded", "_sync"),
    f"{_FOLDER}/sharded*.py": ("tests/sync", "-k", "sharded"),
    f"{_FOLDER}/channel.py": ("tests/cost/test_compressor_cost.py", *_COMPRESSORS),
    f"{_FOLDER}/*.py": _COMPRESSORS,
    f"{_FOLDER}/kernels/blockwise*_triton.py": _interpreted("blockwise"),
    f"{_FOLDER}/kernels/elementwise_triton.py": _interpreted("elementwise"),
    f"{_FOLDER}/kernels/low_rank*_triton.py": _interpreted("low_rank_rounds"),
    f"{_FOLDER}/kernels/factors_triton.py": _interpreted("orthonormal"),
    f"{_FOLDER}/kernels/launch_triton.py": (f"{_KERNELS}launch.py",),
    f"{_FOLDER}/kernels/blockwise*": _compiled("blockwise", "c_library"),
    f"{_FOLDER}/kernels/elementwise.py": _compiled("elementwise"),
    f"{_FOLDER}/kernels/*": _compiled("low_rank", "low_rank_rounds", "orthonormal", "c_library"),
}
"""What is about a file; its first pattern counts. Arguments of pytest, or programs."""
WAITS = {"wait", "wait_stream", "wait_event", "record_stream", "protect", "synchronize"}
_RESULTS = {"pending.wait", "exact.wait"}
LIMIT_S = 1200
_NO_TESTS = 5  # pytest's exit status where none of a suite is exhaustive


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
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if name.lstrip("_") in WAITS or name.startswith("_protect"):
            self._add("wait", node, "pass")
        self.generic_visit(call)

    def visit_If(self, node: ast.If) -> None:
        if not self._is_kernel and ast.unparse(node.test) != "TYPE_CHECKING":
            self._add("branch", node.test, f"(not ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not self._is_kernel or any("jit" in ast.unparse(each) for each in node.decorator_list):
            for statement in node.body:
                self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in _RESULTS:  # a wait with a result, which is in the same memory before it has arrived
            self._add("wait", node, f"{name.removesuffix('wait')}_tensor")
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


class Checkout:
    """A copy of the checkout in which tests run, with one fault at a time."""

    def __init__(self, *, has_exhaustive: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._has_exhaustive = has_exhaustive
        files = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for file in filter(None, files.split("\0")):
            (self._root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, self._root / file)

    @property
    def _root(self) -> Path:
        return Path(self._folder.name)

    def find_noticing(self, mutant: Mutant | None, tests: tuple[str, ...]) -> dict[str, Any]:
        """Runs the tests on a fault; returns the one that has noticed it, or None."""
        if mutant is None:
            return self._run(tests, is_mutant=False)
        source = (ROOT / mutant.file).read_bytes()
        mutated = source[: mutant.begin] + mutant.after.encode() + source[mutant.end :]
        try:
            self._write(mutant.file, mutated)
            return self._run((*self._naming(mutant.file, tests), *tests), is_mutant=True)
        finally:
            self._write(mutant.file, source)

    def _naming(self, file: str, tests: tuple[str, ...]) -> list[str]:
        """Returns those files of the tests that name a module most often, which are the most likely to notice."""
        if tests[0] == "python":
            return []
        name = re.compile(rf"\b{Path(file).stem}\b")
        paths = [path for folder in tests for path in (self._root / folder).rglob("test_*.py")]
        counts = {path: len(name.findall(path.read_text(encoding="utf-8"))) for path in sorted(paths)}
        return [str(path) for path in sorted(paths, key=lambda path: -counts[path]) if counts[path]]

    def _write(self, file: str, content: bytes) -> None:
        (self._root / file).write_bytes(content)
        for compiled in (self._root / file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
            compiled.unlink()  # its time in whole seconds and its size may be the same

    def _run(self, tests: tuple[str, ...], *, is_mutant: bool) -> dict[str, Any]:
        folders = (".", "lightning_commopt/plugins", "diagnose", "tests")  # the last for programs, not for pytest
        path = os.pathsep.join(str(self._root / folder) for folder in folders)
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        commands = [["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]]
        if is_mutant and self._has_exhaustive and "--all" not in tests:  # what the default run has missed
            commands.append([*commands[0], "--all", "-m", "exhaustive"])
        if tests[0] == "python":
            commands, environment["TRITON_INTERPRET"] = [[program] for program in tests[1:]], "1"
        begin, found = time.monotonic(), None
        for command in commands:
            options: dict[str, Any] = {"cwd": self._root, "env": environment, "capture_output": True, "text": True}
            try:
                ran = subprocess.run([sys.executable, *command], **options, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                found = "time-out"
                break
            if ran.returncode not in (0, _NO_TESTS):
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
                found = failed[0] if failed else f"{command[0]}: {(ran.stdout + ran.stderr)[-300:]}"
                break
        return {"found_by": found, "seconds": time.monotonic() - begin}


def select(arguments: argparse.Namespace) -> dict[Mutant, tuple[str, ...]]:
    """Returns the mutants that are asked for, and the tests of each."""
    files = {path.relative_to(ROOT): None for pattern in arguments.files for path in sorted(ROOT.glob(pattern))}
    mutants = {
        mutant: tuple(arguments.tests or next(tests for pattern, tests in TESTS.items() if file.match(pattern)))
        for file in files
        if file.suffix in (".py", ".c") and any(file.match(pattern) for pattern in TESTS)
        for mutant in mutants_of(str(file))
        if mutant.kind in arguments.kinds
    }
    if arguments.sample is not None:
        num_kept: Counter[Path] = Counter()
        shuffled, mutants = random.Random(arguments.seed).sample(list(mutants.items()), len(mutants)), {}
        for each, tests in shuffled:  # in an order by chance, so that a run that is cut has some of each folder, too
            folder = Path(each.file).parent
            num_kept[folder] += 1
            if num_kept[folder] <= arguments.sample:
                mutants[each] = tests
    part, num_parts = map(int, arguments.part.split("/"))
    chosen = list(mutants)[part - 1 :: num_parts]
    return {mutant: mutants[mutant] for mutant in chosen}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints how many faults of each kind are noticed, and those that are not."""
    table = Table("fault", "mutants", "noticed", "not")
    counts = Counter((row["kind"], row["found_by"] is not None) for row in rows)
    for kind in KINDS:
        noticed, missed = counts[kind, True], counts[kind, False]
        table.add_row(kind, str(noticed + missed), str(noticed), str(missed))
    num_noticed = sum(row["found_by"] is not None for row in rows)
    table.add_row("all", str(len(rows)), f"{num_noticed} ({num_noticed / max(1, len(rows)):.1%})", "")
    console.print(table)
    for row in rows:
        if row["found_by"] is None:
            text = "not noticed: {file}:{line} {kind}: {before} -> {after}".format_map(row)
            console.print(text, markup=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=list(TESTS), help="patterns; the default is all that TESTS has")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tests", nargs="+", help="files; the default is what TESTS has of each file with a fault")
    parser.add_argument("--part", default="1/1", help="2/8: every eighth mutant, from the second on")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of each folder, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument("--num-at-once", type=int, default=2)
    parser.add_argument("--default-run", action="store_true", help="leave out what is marked exhaustive")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--output", type=Path, help="a line of JSON for each; what is in there is not run again")
    arguments = parser.parse_args()
    console, mutants = Console(), select(arguments)
    rows: list[dict[str, Any]] = []
    if arguments.output is not None and arguments.output.exists():
        known = [json.loads(line) for line in arguments.output.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in known if any(row | asdict(mutant) == row for mutant in mutants)]
        mutants = {each: tests for each, tests in mutants.items() if not any(row | asdict(each) == row for row in rows)}
    if arguments.list:
        for each in mutants:
            text = f"{each.file}:{each.line} {each.kind}: {each.before} -> {each.after}"
            console.print(text, markup=False, soft_wrap=True)
        return
    free: queue.SimpleQueue[Checkout] = queue.SimpleQueue()
    for _ in range(arguments.num_at_once):
        free.put(Checkout(has_exhaustive=not arguments.default_run))

    def run(mutant: Mutant | None, tests: tuple[str, ...]) -> dict[str, Any]:
        checkout = free.get()
        try:
            return checkout.find_noticing(mutant, tests)
        finally:
            free.put(checkout)

    with ThreadPoolExecutor(arguments.num_at_once) as pool:
        suites = sorted(set(mutants.values()))
        for tests, result in zip(suites, pool.map(run, [None] * len(suites), suites), strict=True):
            print(f"{result['seconds']:.0f} s without a fault: {' '.join(tests)}", flush=True)
            if result["found_by"] is not None:
                raise SystemExit(f"they fail without a fault: {result['found_by']}")
        running = {pool.submit(run, each, tests): each for each, tests in mutants.items()}
        for future in track(as_completed(running), "mutants", len(running), console=console):
            rows.append(asdict(running[future]) | future.result())
            if arguments.output is not None:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    show(rows, console)


if __name__ == "__main__":
    main()

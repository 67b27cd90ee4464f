"""``benchmarks/gpu.py``: whatever fails, hangs or cuts it, what is known is in its files, and no process is left."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import gpu
import gpu_fits
import gpu_ladder
import gpu_parts
import pytest
from gpu_parts import PARTS, Part, Program, Setting
from gpu_ranks import ROW, Place, run_cases
from gpu_report import Report
from gpu_rows import row

from support.marked_processes import Program as MarkedProgram
from support.marked_processes import marked_processes

_SCRIPT = str(Path(gpu.__file__))
_LIMIT_S = 550
"""Only against waiting for ever."""


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path, settings={}, place="nowhere", is_dry=True, commit=None, load=0.0)


@pytest.fixture
def setting(tmp_path):
    return Setting(place=Place(device="cpu"), folder=tmp_path, suffix="here", why_no_lab="it is a test")


def _part(*programs, **options):
    return Part(title="a part", limit_s=60, least_s=1, programs=lambda setting: list(programs), **options)


def _python(code, name="a script", **options):
    return Program(name=name, arguments=("-S", "-c", code), **options)


def _rows(report, part="a"):
    return {each["name"]: (each["verdict"], each["result"]) for each in report.parts[part]["rows"]}


class TestParts:
    def test_rows_before_a_cut_are_kept_and_no_process_is_left(self, report, setting, monkeypatch):
        """If it fails, a program that hangs takes its results along, or goes on beside the next measurement."""
        waits = "import time; time.sleep(600)"
        command = f"[sys.executable, '-S', '-c', {waits!r}]"
        detached = f"import subprocess, sys; subprocess.Popen({command}, start_new_session=True)"
        hangs = f"{detached}; print({ROW!r} + '{json.dumps(row('x', 'done'))}', flush=True); {waits}"
        monkeypatch.setitem(PARTS, "a", _part(_python(hangs)))
        gpu.run_all(["a"], setting, report, 6.0)
        assert _rows(report)["x"] == ("measured", "done")
        assert _rows(report)["a script: what is left"][0] == "cut"
        assert not marked_processes(f"{gpu._MARK}=")

    def test_the_cases_are_those_of_the_scripts(self):
        """If it fails, a part asks for cases that there are not, or leaves some out."""
        assert {*gpu_parts.FITS, "auto"} == gpu_fits.CASES.keys()
        assert set(gpu_parts.PLANS) == gpu_ladder.PLANS.keys()
        assert set(gpu_parts.FEW_FITS) < set(gpu_parts.FITS)
        assert set(gpu_parts.FEW_PLANS) < set(gpu_parts.PLANS)

    @pytest.mark.parametrize("place", [Place(device="cuda", shares_gpu=True), Place(device="cuda", num_ranks=8)])
    def test_the_programs_of_every_part_exist(self, setting, place):
        setting = dataclasses.replace(setting, place=place, why_no_lab=None)
        for part in PARTS.values():
            for program in part.programs(setting):
                command = gpu_parts.command_of(program, 20.0)
                scripts = [word for word in command[1:] if word.endswith(".py")]
                assert all(Path(word).exists() for word in scripts), command
                assert ("--share-gpu" in command) == place.shares_gpu or "hangs.py" not in command[1]


@pytest.mark.exhaustive
class TestCases:
    _SCRIPT = """
import os, sys, time
for case in sys.argv[sys.argv.index("--cases") + 1].split(","):
    begun = f"{__file__}.{case}"
    if os.environ["RANK"] == "0":
        print("CASE", case, flush=True)
        open(begun, "w").close()
    if case == "raises" and os.environ["RANK"] == "1":
        while not os.path.exists(begun):  # as a collective would wait for the other rank
            time.sleep(0.01)
        raise ArithmeticError("broken on purpose")
    if case in ("raises", "waits"):
        time.sleep(600)
    if os.environ["RANK"] == "0":
        print('ROW {"name": "%s", "done": 1}' % case, flush=True)
"""

    def _run(self, tmp_path, capfdbinary, cases, limit_s):
        script = tmp_path / "script.py"
        script.write_text(self._SCRIPT)
        run_cases([str(script)], cases, Place(device="cpu"), rate=None, limit_s=limit_s)
        printed = capfdbinary.readouterr().out.decode()
        rows = [json.loads(line[len(ROW) :]) for line in printed.splitlines() if line.startswith(ROW)]
        return {each["name"]: each for each in rows}

    def test_those_behind_a_failure_are_run(self, tmp_path, capfdbinary):
        """If it fails, a compressor that raises costs all fits behind it."""
        found = self._run(tmp_path, capfdbinary, ["first", "raises", "last"], 300)
        assert found["first"]["done"] == found["last"]["done"] == 1
        assert found["raises"]["verdict"] == "failed"
        assert found["raises"]["result"] == "ArithmeticError: broken on purpose"

    def test_those_that_the_limit_cuts_are_named(self, tmp_path, capfdbinary):
        found = self._run(tmp_path, capfdbinary, ["first", "waits", "last"], 45)
        assert found["first"]["done"] == 1
        assert found["waits: what is left"]["verdict"] == "cut"
        assert found["last"]["verdict"] == "not run"


def _dry_run(tmp_path, *options):
    arguments = [_SCRIPT, "--device", "cpu", "--output", str(tmp_path / "found"), *options]
    return MarkedProgram(arguments, tmp_path)


def _stored(tmp_path):
    (path,) = (tmp_path / "found").glob("gpu_dry_run_*.json")
    return json.loads(path.read_text())


@pytest.mark.exhaustive
def test_a_dry_run_of_one_part(tmp_path):
    """If it fails, nothing can be learned from a GPU."""
    program = _dry_run(tmp_path, "--parts", "memory", "--limit", "6000")
    assert program.finish(_LIMIT_S) == 0, program.output
    rows = _stored(tmp_path)["parts"]["memory"]["rows"]
    assert [each["verdict"] for each in rows] == ["measured"] * len(gpu_parts.FEW_PLANS), rows


@pytest.mark.exhaustive
def test_a_whole_dry_run(tmp_path):
    """If it fails, a part cannot run, or what is right on the CPU is not."""
    program = _dry_run(tmp_path, "--limit", "3000")
    assert program.finish(_LIMIT_S) == 0, program.output
    parts = _stored(tmp_path)["parts"]
    assert parts.keys() == PARTS.keys()
    verdicts = {name: {each["verdict"] for each in part["rows"]} for name, part in parts.items()}
    assert verdicts.pop("selftest") == verdicts.pop("selftest_full") == {"not run"}
    verdicts["ladder"] -= {"not run"}  # where there is no lab
    assert all(found and found <= {"right", "measured"} for found in verdicts.values()), verdicts


@pytest.mark.exhaustive
def test_a_run_that_is_ended_leaves_files_and_no_process(tmp_path):
    """If it fails, the end of a lent machine takes the results along."""
    program = _dry_run(tmp_path, "--parts", "parity")
    try:
        ends_at = time.monotonic() + _LIMIT_S
        while "parity: " not in program.output and time.monotonic() < ends_at:
            time.sleep(0.1)
        os.kill(program.process.pid, signal.SIGTERM)
        assert program.wait(_LIMIT_S), f"{program.processes()} are left: {program.output}"
    finally:
        program.kill()
    assert program.process.returncode == 128 + signal.SIGTERM
    stored = _stored(tmp_path)
    assert stored["ended_by"] == "SIGTERM"
    assert stored["parts"]["parity"]["rows"]

"""What the console command ``commopt`` prints."""

import itertools
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_commopt.commands.app import app
from lightning_commopt.compressors import compressor_names
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.plan.ddp import DDP_OPTION_SINCE, ddp_options
from support.commopt import commopt, imported_by
from support.cross_section import sampled
from support.sample_runs import SampleRun, write_run

COMMANDS = ("info", "predict", "report", "run", "selftest", "summary", "trace", "tune")


def test_info_json_is_what_the_machine_has() -> None:
    found = json.loads(commopt("info", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["kind"] == "cpu"
    assert found["devices"][0]["num_cores"] >= 1
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["backends"]["gloo"] is True
    assert found["comm_hooks"] == compressor_names()
    assert found["kernels"]["cpu"] == ("torch" if c_library.load() is None else "c")
    # A scheduler's script reads these to choose the options of a run.
    options = {option["name"]: (option["since"], option["available"]) for option in found["ddp_options"]}
    assert options == {name: (since, name in ddp_options()) for name, since in DDP_OPTION_SINCE.items()}
    version = found["nccl_version"]
    assert (version is not None) == torch.distributed.is_nccl_available()
    assert version is None or version in commopt("info").output


def test_first_releases_agree_with_the_installed_torch() -> None:
    """A wrong release in the table would send a user to a torch that lacks the option too."""
    installed = tuple(int(part) for part in torch.__version__.split(".")[:2])
    for name, since in DDP_OPTION_SINCE.items():
        assert (name in ddp_options()) == (installed >= tuple(int(part) for part in since.split(".")))


@pytest.mark.parametrize("columns", [60, 120])
def test_info_tables_cut_nothing_off(columns: int) -> None:
    output = commopt("info", columns=columns).output
    assert "…" not in output
    for name in DDP_OPTION_SINCE:
        assert name in output


def test_no_command_shows_the_commands() -> None:
    result = CliRunner().invoke(app, [])
    assert [name for name in (*COMMANDS, "commopt-train") if name not in result.output] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    assert "Usage: " in commopt(command, "--help").output


@pytest.mark.parametrize("command", ["tune", "doctor"])
def test_a_help_fills_the_lines_of_a_terminal(command: str) -> None:
    """If it fails, a sentence breaks in the middle of a line of 80 columns, where it ends in the source."""
    prose = commopt(command, "--help", columns=80).output.partition("╭")[0].splitlines()
    for line, after in itertools.pairwise(prose):
        if line.strip() and after.strip():
            assert len(line.rstrip()) + len(after.split()[0]) >= 78, (line, after)


def test_version() -> None:
    assert commopt("--version").output == f"lightning-commopt {version('lightning-commopt')}\n"


def test_unknown_command_is_an_error_that_names_it() -> None:
    assert "inform" in commopt("inform", status=2).output


_WITHOUT_TOOLS = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda group: importlib.metadata.EntryPoints()
from lightning_commopt.commands.app import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [["doctor", "--help"], ["bench", "-b", "8"]])
def test_a_command_of_the_other_distribution_names_it(arguments: list[str]) -> None:
    """If it fails, a command of these docs is one that nobody knows."""
    command = [sys.executable, "-c", _WITHOUT_TOOLS, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    line = f"commopt: {arguments[0]} is in a distribution that is not installed: pip install commopt-diagnose\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", line)


@pytest.mark.parametrize("arguments", sampled([["--help"], ["info", "--help"], ["report", "--help"]], [["--help"]]))
def test_help_imports_nothing_that_is_slow(arguments: list[str]) -> None:
    """If it fails, whoever asks which commands there are waits for seconds."""
    assert imported_by(*arguments) == set()


@pytest.mark.parametrize("command", sampled(["report", "summary", "trace"], by_default=["trace"]))
def test_commands_that_read_runs_do_not_import_torch(command: str, tmp_path: Path) -> None:
    """If it fails, a command on a login node waits for torch and Lightning, and needs their memory."""
    write_run(tmp_path / "run", SampleRun())
    options = ["--num-warmup-steps=0"] if command == "summary" else []
    assert not imported_by(command, str(tmp_path / "run"), *options) & {"torch", "lightning"}
    written = {"report": "report.html", "trace": "trace.json", "summary": "rank_0.jsonl"}[command]
    assert list((tmp_path / "run").rglob(written))
    # Everybody who asks for the numbers alone would wait seconds for what draws charts.
    assert command != "report" or not imported_by("report", str(tmp_path / "run"), "--json") & {"hydra", "jinja2"}

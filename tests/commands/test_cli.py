"""What the console command ``commopt`` prints."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_commopt.commands.app import app
from lightning_commopt.commands.info import info
from lightning_commopt.compressors import compressor_names
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.plan import DDP_OPTION_SINCE, ddp_options
from support.commopt import commopt
from support.cross_section import sampled
from support.sample_runs import SampleRun, write_run
from support.wheels import run_checked

COMMANDS = (
    *("bench", "doctor", "info", "nccl-log", "nsys", "predict"),
    *("report", "selftest", "summary", "topo", "trace", "tune"),
)


def test_info_json_is_what_the_machine_has() -> None:
    found = json.loads(commopt("info", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["kind"] == "cpu"
    assert found["devices"][0]["num_cores"] >= 1
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert found["backends"]["gloo"] is True
    assert found["comm_hooks"] == compressor_names()
    assert found["kernels"]["cpu"] == ("torch" if c_library.load() is None else "c")


def test_info_json_says_which_ddp_options_this_torch_has() -> None:
    """A scheduler's script reads this to choose the options of a run."""
    options = {option["name"]: option for option in json.loads(commopt("info", "--json").output)["ddp_options"]}
    assert {name: option["since"] for name, option in options.items()} == DDP_OPTION_SINCE
    for name, option in options.items():
        assert option["available"] == (name in ddp_options())


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


def test_info_shows_the_nccl_version_where_there_is_nccl() -> None:
    version = info.nccl_version()
    assert (version is not None) == torch.distributed.is_nccl_available()
    if version is not None:
        assert version in commopt("info").output


def test_no_command_shows_the_commands() -> None:
    result = CliRunner().invoke(app, [])
    assert [name for name in (*COMMANDS, "commopt-train") if name not in result.output] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    assert "Usage: " in commopt(command, "--help").output


def test_unknown_command_is_an_error_that_names_it() -> None:
    assert "inform" in commopt("inform", status=2).output


_IMPORTED = """
import sys
from lightning_commopt.commands.app import app
try:
    app(sys.argv[1:])
finally:
    print("imported", *{"torch", "lightning", "hydra", "scipy", "plotly", "numpy"}.intersection(sys.modules))
"""


def _imported_by(*arguments: str) -> set[str]:
    output = run_checked([sys.executable, "-c", _IMPORTED, *arguments])
    return set(output.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "arguments", sampled([["--help"], ["bench", "--help"], ["info", "--help"], ["report", "--help"]], [["--help"]])
)
def test_help_imports_nothing_that_is_slow(arguments: list[str]) -> None:
    """If it fails, whoever asks which commands there are waits for seconds."""
    assert _imported_by(*arguments) == set()


def test_nccl_log_does_not_import_torch(tmp_path: Path) -> None:
    """If it fails, a log on a laptop or a login node takes seconds and a torch to read."""
    (tmp_path / "log").write_text("node-a:1:2 [0] NCCL INFO Connected all rings\n")
    assert _imported_by("nccl-log", str(tmp_path / "log")) == set()


@pytest.mark.parametrize("command", sampled(["report", "summary", "trace"], by_default=["summary"]))
def test_commands_that_read_runs_do_not_import_torch(command: str, tmp_path: Path) -> None:
    """If it fails, a command on a login node waits for torch and Lightning, and needs their memory."""
    write_run(tmp_path / "run", SampleRun())
    options = ["--num-warmup-steps=0"] if command == "summary" else []
    assert not _imported_by(command, str(tmp_path / "run"), *options) & {"torch", "lightning"}
    written = {"report": "report.html", "trace": "trace.json", "summary": "rank_0.jsonl"}[command]
    assert list((tmp_path / "run").rglob(written))

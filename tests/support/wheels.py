"""Builds this package's wheel and installs it in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from this checkout.

    Args:
        folder: where to.

    Returns:
        The wheel's path.
    """
    run_checked([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=REPOSITORY)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Installs a wheel in a new environment, beside which the dependencies of this one can be imported.

    Args:
        wheel: its path.
        folder: where the environment is made.

    Returns:
        The path of the environment's folder of scripts.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv is not None, "the tests need uv: pip install uv"
    run_checked([uv, "venv", "--python", sys.executable, str(folder)])
    python = folder / "bin" / "python"
    run_checked([uv, "pip", "install", "--offline", "--no-deps", "--python", str(python), str(wheel)])
    installed = run_checked([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"])
    # A path in a .pth file comes behind site-packages, and the .pth files in it are not read:
    # an editable install of this package, in the environment that runs the tests, stays out.
    Path(installed.strip(), "dependencies.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    return python.parent


def run_checked(command: list[str], cwd: Path | None = None, limit_s: float = 300) -> str:
    """Runs a command and returns its standard output; an AssertionError has all that it said when it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout

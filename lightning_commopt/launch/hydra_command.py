"""Command lines of Hydra's programs: quoted overrides, and one more rank of a job."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import OmegaConf

from lightning_commopt.compat.hydra import get_args_parser


def quote(value: object, *, is_literal: bool = True) -> object:
    r"""Returns a value as an override that Hydra reads back unchanged; only text needs quotes.

    Args:
        value: the value to quote.
        is_literal: whether ``${...}`` in it is text, and not an interpolation.

    >>> print(quote('a, "b" and ${c}'))
    "a, \"b\" and \${c}"
    """
    if not isinstance(value, str):
        return value
    # In Hydra's and OmegaConf's grammar a backslash escapes only these characters, and is itself otherwise.
    text = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", value) if is_literal else value
    escaped = re.sub(r'(\\*)("|\Z)', lambda match: 2 * match[1] + ('\\"' if match[2] else ""), text)
    return f'"{escaped}"'


def config_flags() -> list[str]:
    """Returns the flags of this process that select Hydra's configuration."""
    arguments, _ = get_args_parser().parse_known_args()
    flags = {"--config-path": "config_path", "--config-name": "config_name", "--config-dir": "config_dir"}
    values = [(flag, getattr(arguments, name)) for flag, name in flags.items()]
    return [word for flag, value in values if value for word in (flag, value)]


def single_run_command(rank: int | str) -> tuple[list[str], str]:
    """Returns the command line for one more rank of the current job, and the directory to start it in.

    The command has the job's own overrides instead of the sweep's, and writes no configuration.

    Args:
        rank: names Hydra's log file; an interpolation, such as ``${oc.env:RANK}``, if several ranks share the command.

    Raises:
        RuntimeError: a launcher of Hydra's runs the job in a worker that does not know the program.
    """
    import __main__

    hydra = HydraConfig.get()
    # A program that was started with ``python -m`` has a spec, and is started the same way again.
    worker = _worker_of(__main__)
    if worker is not None:
        raise RuntimeError(
            f"no further ranks can be started in a worker of {worker}, which does not know the program: use"
            " start_method='fork' for ranks on CPUs, or a launcher that starts all ranks, such as submitit_slurm with"
            " hydra.launcher.tasks_per_node"
        )
    if __main__.__spec__ is None:
        program = [sys.executable, to_absolute_path(sys.argv[0])]
    else:
        program = [sys.executable, "-m", __main__.__spec__.name]
    overrides = [
        *hydra.overrides.task,
        *(override for override in hydra.overrides.hydra if "hydra.mode=" not in override),
        "hydra.mode=RUN",
        f"hydra.run.dir={quote(hydra.runtime.output_dir)}",
        *(
            f"hydra.job.{key}={quote(OmegaConf.select(hydra.job, key))}"  # type: ignore[arg-type]
            for key in ("num", "id")
            if not OmegaConf.is_missing(hydra.job, key)
        ),
        f"hydra.job.name={quote(f'{hydra.job.name}_rank_{rank}', is_literal=False)}",
        "hydra.output_subdir=null",
    ]
    return [*program, *config_flags(), *overrides], get_original_cwd()


def _worker_of(main: ModuleType) -> str | None:
    """Returns the package whose worker this process is, for a launcher of Hydra's; None if it is the user's program."""
    if main.__spec__ is None:
        return "ray" if Path(sys.argv[0]).name == "default_worker.py" else None
    package = main.__spec__.name.partition(".")[0]
    return package if package in ("joblib", "submitit") else None

"""What was probably meant where Hydra knows no such group, option or key."""

from __future__ import annotations

from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_commopt.text.validation import did_you_mean


def hint(error: BaseException | None, folder: Path) -> str | None:
    """Returns a line that names what was probably meant, for an error that Hydra has raised.

    Args:
        error: that ended the program.
        folder: of the configuration; its folders are the groups.

    Returns:
        Such as "experiment=quickstat: did you mean 'quickstart'?"; None if no name is near, or the error is another.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        asked, known = f"{group}={name}" if group else name, list(error.options or ())
    else:
        cause = error.__cause__ if error is not None else None
        if not isinstance(cause, OmegaConfBaseException) or not isinstance(cause.parent_node, DictConfig):
            return None
        asked = cause.full_key or ""
        prefix, _, name = asked.rpartition(".")
        groups = [] if prefix else [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
        known = [*map(str, cause.parent_node), *groups]
    question = did_you_mean(name, known)
    return f"{asked}: {question.removeprefix('; ')}" if question else None

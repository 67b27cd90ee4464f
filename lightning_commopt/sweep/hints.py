"""What was probably meant where Hydra knows no such group, option or key."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


def hint(error: BaseException | None, folder: Path) -> str | None:
    """Returns a question with the nearest name that exists, for an error that Hydra has raised.

    Args:
        error: that ended the program.
        folder: of the configuration; its folders are the groups.

    Returns:
        Such as "Did you mean experiment=quickstart?"; None if no name is near, or the error is another one.
    """
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return _question(f"{group}=" if group else "", option, error.options or ())
    cause = error.__cause__ if error is not None else None
    if not isinstance(cause, OmegaConfBaseException) or not isinstance(cause.parent_node, DictConfig):
        return None
    prefix, dot, key = (cause.full_key or "").rpartition(".")
    groups = [] if prefix else [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
    return _question(prefix + dot, key, [*map(str, cause.parent_node), *groups])


def _question(prefix: str, name: str, known: Iterable[str]) -> str | None:
    by_lower = {word.lower(): word for word in known}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"Did you mean {prefix}{by_lower[near[0]]}?" if near else None

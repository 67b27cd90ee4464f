"""Checks of settings, hints for misspelled names, and warnings that point at the user's line."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from numbers import Integral, Real

from lightning_commopt.text.formatting import escape_controls

# A warning skips the frames of these packages, to point at the user's line.
_SKIPPED_PACKAGES = frozenset(
    {
        *("lightning_commopt", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("torch", "hydra", "omegaconf", "jsonargparse", "contextlib", "functools", "threading"),
    }
)


def check_integer(name: str, value: object, at_least: int) -> None:
    """Raises a ValueError unless a value is an integer of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raises a ValueError unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")


def check_switch(name: str, value: object) -> None:
    """Raises a ValueError unless a value is a bool; the string "false" is not one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raises a ValueError with a hint unless a value is one of ``allowed``."""
    if value not in allowed:
        hint = did_you_mean(value, [choice for choice in allowed if isinstance(choice, str)])
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def check_power_of_two(name: str, value: object, at_least: int, at_most: int) -> None:
    """Raises a ValueError unless a value is a power of two within a range."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else 0
    if not at_least <= number <= at_most or number & (number - 1):
        raise ValueError(f"{name} must be a power of two from {at_least} to {at_most}, got {value!r}")


def plain_number(value: object) -> object:
    """Returns an integer or a float of NumPy as Python's, which JSON can hold; any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error message, ``"; did you mean 'x'?"``, or "" if no known name is similar.

    >>> did_you_mean("bucket_cap", ["bucket_cap_mb", "static_graph"])
    "; did you mean 'bucket_cap_mb'?"
    >>> did_you_mean("rank", ["matrix_rank", "start_step"])
    "; did you mean 'matrix_rank'?"
    >>> did_you_mean("zip", ["bf16", "int8"])
    ''
    """
    if not isinstance(name, str):
        return ""
    normalized, by_normalized = normalize_name(name), {normalize_name(choice): choice for choice in known}
    near = difflib.get_close_matches(normalized, by_normalized, n=1)
    # difflib regards names of very different lengths as dissimilar, even if one contains the other.
    if not near:
        long = [other for other in by_normalized if min(len(other), len(normalized)) >= 4]
        near = [other for other in long if normalized in other or other in normalized]
    return f"; did you mean {by_normalized[near[0]]!r}?" if len(near) == 1 else ""


def normalize_name(name: str) -> str:
    """Returns a name in lower case without hyphens, underscores and blanks, which users write differently.

    >>> normalize_name("PowerSGD") == normalize_name("power_sgd") == normalize_name("power-SGD")
    True
    """
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def warn(message: str, *, on_every_rank: bool = False) -> None:
    """Warns on rank 0, or on every rank; the warning points at the user's line, outside of Lightning and our code."""
    if on_every_rank or _is_rank_0():
        warnings.warn(escape_controls(message), stacklevel=_users_stacklevel())


@cache
def warn_once(message: str) -> None:
    """Calls `warn` once for each message."""
    warn(message)


def info(message: str) -> None:
    """Logs on rank 0, with Lightning's logger."""
    from lightning_utilities.core import rank_zero

    if _is_rank_0():
        rank_zero.log.info(escape_controls(message))


def _is_rank_0() -> bool:
    # This is not at the top of the module, since commands that import the module should start fast.
    from lightning_utilities.core.rank_zero import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0  # Lightning sets the attribute when it is imported


def _users_stacklevel() -> int:
    """Returns the ``stacklevel`` with which the caller of this function warns at the user's line.

    Python 3.12's ``skip_file_prefixes`` does not suffice, since a dataclass's ``__init__`` has no file.
    """
    level, frame = 1, sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _SKIPPED_PACKAGES:
            return level
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    # A thread of this package has no frame of the user, so the warning points at the line that warns.
    return 2

"""The base of the plans of all strategies, which are read from mappings and files, and written to them."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.compressors import Compressor, ShardedCompressor, compressor_to_config
from lightning_commopt.compressors.registry import canonical_name, compressor_name
from lightning_commopt.text.validation import did_you_mean, plain_number


class OptionError(MisconfigurationException, ValueError):
    """A user's option is unknown, out of range, or not available here."""


class UnknownOptionError(OptionError, TypeError):
    """A user's option has an unknown name."""


def check_known(name: str, known: Sequence[str]) -> None:
    """Raises an UnknownOptionError unless an option is ``known``."""
    if name not in known:
        hint = did_you_mean(name, known)
        raise UnknownOptionError(f"unknown option {name!r}; known options: {', '.join(sorted(known))}{hint}")


def comm_hook_hint(value: object) -> str:
    """Returns the end of an error message about a value that names a compressor, or "" if it names none.

    >>> comm_hook_hint("int8")
    "; did you mean comm_hook='int8'?"
    """
    return f"; did you mean comm_hook={value!r}?" if canonical_name(value) is not None else ""


@contextmanager
def option_errors(prefix: str = "") -> Iterator[None]:
    """Turns an error about a value into an OptionError with ``prefix`` before the message."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise OptionError(f"{prefix}{error}") from error


class Plan(ABC):
    """The options of gradient sync for one of the strategies; see `CommPlan`, `ShardedPlan` and `DiLoCoPlan`.

    Concrete plans are frozen dataclasses whose fields are the options.
    """

    comm_hook: Any  # the compressor, or None
    searched: ClassVar[tuple[str, ...]] = ("comm_hook",)
    """The options that ``plan="auto"`` may choose."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Returns the names of the options."""
        return tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @property
    @abstractmethod
    def name(self) -> str:
        """The short name of the plan in all tables and figures, with everything that differs from the defaults."""

    @property
    @abstractmethod
    def is_lossy(self) -> bool:
        """Whether the plan changes numbers."""

    @property
    def sync_method(self) -> str:
        """The name of what averages over the ranks, in records of runs; "none" for DDP's or FSDP2's own collectives."""
        return "none" if self.comm_hook is None else compressor_name(self.comm_hook)

    def replaced(self, **options: Any) -> Self:
        """Returns this plan with other values for some options."""
        return type(self)(**{**{name: getattr(self, name) for name in self.options()}, **options})

    @classmethod
    def check_names(cls, names: Sequence[str]) -> None:
        """Raises an UnknownOptionError for a name that is not an option, or an OptionError that gives the reason."""
        for name in names:
            check_known(name, cls.options())

    @classmethod
    def of(cls, plan: Any, words: Sequence[str] = ()) -> Self:
        """Returns a plan, or the plan in a file whose path is given.

        Args:
            plan: the plan or the path.
            words: further values that the caller allows, such as "auto". They are only named in error messages.

        Raises:
            OptionError: ``plan`` is neither, or the file has none.
        """
        if isinstance(plan, cls):
            return plan
        allowed = f"{''.join(f'{word!r}, ' for word in words)}a {cls.__name__}"
        if not isinstance(plan, str | Path):
            raise OptionError(f"plan must be {allowed}, the path of a file or None, got {plan!r}")
        if not Path(plan).is_file():
            hint = comm_hook_hint(plan) or did_you_mean(str(plan), words)
            raise OptionError(f"plan must be {allowed}, or the path of a file, but there is no file {plan!r}{hint}")
        return cls.load(plan)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Makes a plan from a mapping of option names to values, such as the result of `to_dict`.

        Raises:
            OptionError: a name is unknown, or a value is out of range.
        """
        cls.check_names([*options])
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, in JSON-serializable types.

        Raises:
            ValueError: the compressor has no name in configurations.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        options = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        for name, value in options.items():
            if isinstance(value, Compressor | ShardedCompressor):
                options[name] = compressor_to_config(value)
            elif isinstance(value, tuple):  # plans hold lists as tuples, which can be hashed
                options[name] = list(value)
            else:
                options[name] = plain_number(value)
        return options

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Makes a plan from the result of `to_json`; raises an OptionError for other text."""
        try:
            options = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise OptionError(f"a plan must be JSON: {error}") from error
        if not isinstance(options, dict):
            raise OptionError(f"a plan must be a JSON object, got {text[:80]!r}")
        return cls.from_dict(options)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan that `save` wrote.

        Raises:
            OptionError: the file has no plan; the message has its path.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # an OptionError, or a UnicodeDecodeError
            kind = type(error) if isinstance(error, OptionError) else OptionError
            raise kind(f"{path} holds no plan: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

"""Bugs in a watch itself, which training must survive, and which must be reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)
_logged: set[str] = set()


@contextmanager
def log_own_errors(watch: str) -> Iterator[None]:
    """Logs an exception within the context, with its traceback, instead of raising it.

    ``watch`` names what has failed, as the subject of the logged sentence.
    """
    try:
        yield
    except Exception:
        if watch not in _logged:
            _logged.add(watch)
            _logger.exception("%s failed because of a bug in it; training continues without it.", watch)

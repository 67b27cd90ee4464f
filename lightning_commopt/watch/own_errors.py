"""Errors of a watch itself, which training must survive and somebody must learn of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)
_logged: set[str] = set()


@contextmanager
def log_own_errors(watch: str) -> Iterator[None]:
    """Logs an exception of a ``watch``, the begin of a sentence, with its traceback instead of raising it, once."""
    try:
        yield
    except Exception:
        if watch not in _logged:
            _logged.add(watch)
            _logger.exception("%s failed because of a bug in it; training continues without it.", watch)

"""Reads the records of runs, compares them, and writes tables, figures and pages.

Raises:
    ImportError: a package of the extra ``report`` is not installed.
"""

from importlib.util import find_spec

_missing = [name for name in ("jinja2", "scipy") if find_spec(name) is None]
if _missing:
    raise ImportError(f"a report needs {', '.join(_missing)}: pip install 'lightning-commopt[report]'")

"""Compares what a command prints with the page about it."""

from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def is_documented(page: str, command: str, output: str) -> bool:
    """Returns whether a page of the docs shows a command with this output."""
    lines = [f"$ {command}", *output.splitlines()]
    block = "\n".join(f"    {line}".rstrip() for line in lines)
    return block in (_DOCS / page).read_text()

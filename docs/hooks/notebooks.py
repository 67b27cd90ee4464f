"""Pages of the notebooks: their text, their code, and what a cell has printed."""

import json
from pathlib import Path
from typing import Any


def markdown(notebook: Path) -> str:
    """Returns a notebook as a page, with a link to the file below its title."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    title, *others = [text for cell in cells for text in _parts(cell)]
    heading, _, text = title.partition("\n")
    link = f"*The notebook itself: [{notebook.name}]({notebook.name}).*"
    return "\n\n".join([heading, link, text.strip("\n"), *others]) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    language = "sh" if all(line.startswith("!") for line in source.splitlines()) else "python"
    printed = "".join(line for output in cell["outputs"] for line in output["text"])
    return [_fenced(source, language), *([_fenced(printed, "text")] if printed else [])]


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"

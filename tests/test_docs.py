"""The documentation: links and names of pages that exist, and code that runs.

``uv run --group docs mkdocs build --strict`` checks the site besides, with the pages that are generated.
"""

import os
import posixpath
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_commopt.measure.forecasts import read_forecasts
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.report.runs import read_runs

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 300

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMED_PAGE = re.compile(r"(?<![\w./-])(?:diagnose/)?docs/[\w./-]+\.md(?:#[\w-]+)?")
_BLOCK = re.compile(
    r"<!-- file: (?P<file>\S+) -->\n```python\n(?P<code>.*?)^```|<!-- run(?P<slow> slow)?: (?P<run>[^\n]+?) -->",
    re.M | re.S,
)


def tracked(*patterns: str) -> list[str]:
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard", "--", *patterns],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in names.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: str) -> set[str]:
    """Returns GitHub's anchors of the headings of a page, and those that it sets itself."""
    text = without_code(page)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


class Link(NamedTuple):
    page: str
    target: str


def links() -> Iterator[Link]:
    for page in tracked("*.md"):
        for target in _LINK.findall(without_code(page)):
            if not re.match(r"[a-z]+:", target):
                yield Link(page, target)


def what_is_wrong(page: str, target: str, folder: str) -> str | None:
    path, _, anchor = target.partition("#")
    file = posixpath.normpath(posixpath.join(folder, path)) if path else page
    if not (REPOSITORY / file).exists():
        return f"{page}: {target}: there is no {file}"
    if anchor and file.endswith(".md") and anchor not in anchors(file):
        return f"{page}: {target}: {file} has no such heading"
    return None


def test_links_lead_somewhere() -> None:
    wrong = [what_is_wrong(link.page, link.target, posixpath.dirname(link.page)) for link in links()]
    assert len(wrong) > 100
    assert not [problem for problem in wrong if problem]


def test_pages_that_code_names_exist() -> None:
    """Docstrings, comments, messages and scripts name pages by their path in the repository, or in its diagnose/."""
    wrong = []
    for name in tracked("*.md", "*.py", "*.sh", "*.yaml", "*.yml", "*.cff", "*.toml", "*.txt", ".ci", ":!*.tsv"):
        for mention in _NAMED_PAGE.findall((REPOSITORY / name).read_text(encoding="utf-8")):
            roots = [root for root in ("", "diagnose") if name.startswith(root)]
            problems = [what_is_wrong(name, mention, root) for root in roots]
            wrong += [problems[0]] if all(problems) else []
    assert not wrong


def test_each_message_has_a_page_that_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, docs/hooks/messages.py must say which page explains the messages of a new module."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "hooks"))
    messages: Any = import_module("messages")

    pages = {messages.page_of(message.module) for message in messages.messages(REPOSITORY)}
    assert len(pages) > 5
    assert all((REPOSITORY / "docs" / page).is_file() for page in pages)


class Part(NamedTuple):
    """What the steps of one part of the documentation write and run, in their order in one folder."""

    pages: list[str]

    def run(self, folder: Path, *, slow: bool) -> list[str]:
        commands = []
        for page in self.pages:
            for block in _BLOCK.finditer((REPOSITORY / page).read_text(encoding="utf-8")):
                if block["file"]:
                    (folder / block["file"]).write_text(block["code"], encoding="utf-8")
                elif slow or not block["slow"]:
                    run(shlex.split(block["run"]), folder)
                    commands.append(block["run"])
        return commands


def test_records_that_pages_link_to_can_be_read(tmp_path: Path) -> None:
    """If it fails, nobody can check a figure of the evidence against the runs that it is from."""
    for path in sorted((REPOSITORY / "docs/results").glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        runs = read_runs([tmp_path / path.name.removesuffix(".tar.xz")])
        assert runs.finished
        assert not runs.problems
        for prediction in tmp_path.rglob(PREDICTION_FILE):
            assert read_forecasts(prediction.parent)


def run(command: list[str], folder: Path) -> None:
    """Runs a command as a reader would, with the scripts of this environment."""
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, f"{shlex.join(command)}:\n{result.stdout}\n{result.stderr}"


GET_STARTED = Part([f"docs/get_started/{name}.md" for name in ("measure", "decide", "compress", "loss")])
HOW_TO = [page for page in tracked("docs/how_to/*.md") if "<!-- run" in (REPOSITORY / page).read_text(encoding="utf-8")]


@pytest.mark.exhaustive
def test_all_steps_run(tmp_path: Path) -> None:
    assert len(GET_STARTED.run(tmp_path, slow=True)) > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", HOW_TO)
def test_how_to_runs(page: str, tmp_path: Path) -> None:
    assert Part([page]).run(tmp_path, slow=True)

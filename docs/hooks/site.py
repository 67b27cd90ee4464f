"""Builds pages of the site that do not stand in ``docs/``, and makes links of the repository work within the site.

A page links to files of the repository by their relative paths, as GitHub shows them. Of these the pages become links
within the site, and all others (examples, configurations, result files) are copied beside it.
"""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import commands
import config_groups
import messages
import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_REPOSITORY = Path(__file__).parents[2]

_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "benchmarks/README.md": "evidence/benchmarks.md",
    "diagnose/CHANGELOG.md": "reference/tools/changelog.md",
    "diagnose/README.md": "reference/tools/index.md",
    "diagnose/docs/bench.md": "reference/tools/bench.md",
    "diagnose/docs/doctor.md": "reference/tools/doctor.md",
    "diagnose/docs/nccl_log.md": "reference/tools/nccl_log.md",
    "diagnose/docs/topology.md": "reference/tools/topology.md",
    "examples/notebooks/1_measure_and_decide.ipynb": "get_started/notebooks/measure_and_decide.md",
    "examples/notebooks/2_compress_and_check_the_loss.ipynb": "get_started/notebooks/compress_and_check_the_loss.md",
    "examples/notebooks/3_sweep_and_report.ipynb": "get_started/notebooks/sweep_and_report.md",
    "examples/notebooks/4_fsdp2.ipynb": "get_started/notebooks/fsdp2.md",
    "examples/notebooks/5_gpu_results.ipynb": "get_started/notebooks/gpu_results.md",
}
"""Pages that stand elsewhere in the repository, with their places in the site."""

_GENERATED: dict[str, Callable[[Path], str]] = {
    "commands": commands.markdown,
    "config groups": config_groups.markdown,
    "messages": messages.markdown,
}
"""What a page says as ``<!-- generated: NAME -->``, in a line of its own."""

_LINK = re.compile(r"(?<!\\)(\]\()([^)\s]+)(\))")
_NAMED_PAGE = re.compile(r"<code>docs/([\w/]+\.md)</code>")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand elsewhere in the repository."""
    for source, place in _PAGES.items():
        path = _REPOSITORY / source
        is_notebook = path.suffix == ".ipynb"
        content = notebooks.markdown(path) if is_notebook else path.read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in what is generated, and turns links to files of the repository into links within the site."""
    place = page.file.src_uri
    for name, generate in _GENERATED.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, generate(_REPOSITORY))
    source = next((source for source, other in _PAGES.items() if other == place), f"docs/{place}")

    def in_site(match: re.Match[str]) -> str:
        return match[1] + _link_in_site(match[2], source, place, config, files) + match[3]

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(in_site, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(in_site, markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes a link of each page that a docstring names by its path in the repository."""

    def link(match: re.Match[str]) -> str:
        file = files.get_file_from_path(match[1])
        if file is None:
            raise ValueError(f"{page.file.src_uri} names docs/{match[1]}, which does not exist")
        return f'<a href="{file.url_relative_to(page.file)}">{file.page.title if file.page else match[1]}</a>'

    return _NAMED_PAGE.sub(link, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the index of the search as a script, too: a page that was opened from a folder can load no JSON."""
    folder = Path(config.site_dir) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def _link_in_site(link: str, source: str, place: str, config: MkDocsConfig, files: Files) -> str:
    """Returns a link of the repository's file ``source`` as one of the site's page ``place``."""
    url = urlsplit(link)
    if url.scheme or not url.path:
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), url.path))
    path = _REPOSITORY / target
    if path.is_dir() and (path / "README.md").is_file():
        target += "/README.md"
    elif not path.exists():
        return link  # mkdocs warns of it
    if target in _PAGES and target != source:
        target_place = _PAGES[target]
    elif target.startswith("docs/") and files.get_file_from_path(target.removeprefix("docs/")):
        target_place = target.removeprefix("docs/")
    else:
        target_place = _copied(target, path, config, files)
    anchor = f"#{url.fragment}" if url.fragment else ""
    return os.path.relpath(target_place, posixpath.dirname(place) or ".") + anchor


def _copied(target: str, path: Path, config: MkDocsConfig, files: Files) -> str:
    """Returns where the site has a copy of a file, or of all files of a small folder in one text.

    A browser shows text of a kind that it does not know only where its name ends in ``.txt``.
    """
    is_shown = path.suffix in (".html", ".ipynb", ".png", ".svg", ".xz")
    copy = f"source/{target}{'' if is_shown else '.txt'}"
    if files.get_file_from_path(copy) is None:
        content = path.read_bytes() if path.is_file() else _joined(path)
        files.append(File.generated(config, copy, content=content))
    return copy


def _joined(folder: Path) -> str:
    parts = [f"==> {path.name} <==\n\n{path.read_text(encoding='utf-8')}" for path in sorted(folder.iterdir())]
    return "\n".join(parts)

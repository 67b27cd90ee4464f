"""The messages of the library's warnings and errors, read from its sources, with the page that explains each."""

import ast
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WARNINGS = {"warn", "warn_once", "warnings.warn"}
_ERRORS = {
    "CheckpointError",
    "ConfigError",
    "GradientSyncError",
    "MisconfigurationException",
    "OptionError",
    "UnequalStepsError",
    "UnevenBatchesError",
    "UnknownOptionError",
}

_HERE = "troubleshoot/messages.md"
_EXPLAINED: dict[str, str] = {
    "baselines.py": "how_to/experiments.md",
    "callbacks": "how_to/measure.md",
    "callbacks/cuda_profiler.py": "how_to/nsight.md",
    "callbacks/hang_monitor.py": "troubleshoot/hangs.md",
    "commands/predict": "explanation/predict.md",
    "commands/tune": "how_to/auto.md",
    "compat": "reference/stability.md",
    "compat/collectives.py": "how_to/measure.md",
    "compressors": "how_to/ddp.md",
    "cost": "explanation/predict.md",
    "fabric.py": "how_to/fabric.md",
    "launch": "troubleshoot/start.md",
    "launch/nccl_options.py": "how_to/nccl.md",
    "launch/nccl_variables.py": "how_to/nccl.md",
    "measure": "how_to/measure.md",
    "plan": "how_to/ddp.md",
    "plan/diloco.py": "how_to/diloco.md",
    "plan/sharded.py": "how_to/fsdp2.md",
    "plugins": "how_to/hydra.md",
    "ray.py": "how_to/ray_kubernetes.md",
    "report": "how_to/reports.md",
    "strategy": "how_to/ddp.md",
    "strategy/diloco.py": "how_to/diloco.md",
    "strategy/diloco_checkpoint.py": "how_to/diloco.md",
    "strategy/diloco_steps.py": "how_to/diloco.md",
    "strategy/diloco_workers.py": "how_to/diloco.md",
    "strategy/living_collectives.py": "how_to/diloco.md",
    "strategy/fabric_diloco.py": "how_to/diloco.md",
    "strategy/fabric_diloco_checkpoint.py": "how_to/diloco.md",
    "strategy/fabric_diloco_unfinished.py": "how_to/diloco.md",
    "strategy/fabric_model_parallel.py": "how_to/fabric.md",
    "strategy/lightning_launcher.py": "troubleshoot/start.md",
    "strategy/model_parallel.py": "how_to/fsdp2.md",
    "strategy/sharding.py": "how_to/fsdp2.md",
    "sync/ddp": "troubleshoot/errors.md",
    "sync/ddp/attach.py": "how_to/ddp.md",
    "sync/ddp/gradient_sync.py": "how_to/ddp.md",
    "sync/ddp/observed.py": "how_to/measure.md",
    "sync/diloco": "how_to/diloco.md",
    "sync/fsdp2": "how_to/fsdp2.md",
    "sync/fsdp2/checkpoint.py": "how_to/resume.md",
    "sync": "troubleshoot/errors.md",
    "sync/checkpoint.py": "how_to/resume.md",
    "sync/state.py": "how_to/resume.md",
    "testing": "how_to/compressor.md",
    "train": "how_to/experiments.md",
    "tune": "how_to/auto.md",
    "watch": "troubleshoot/errors.md",
    "watch/hangs": "troubleshoot/hangs.md",
}
"""The page for the messages of a module, or of a whole folder."""


class Message(NamedTuple):
    """A message in the sources; what is filled in at run time stands as an ellipsis."""

    text: str
    kind: str
    module: str


def markdown(repository: Path) -> str:
    """Returns a table of messages for each page that explains some."""
    by_page: dict[str, set[Message]] = {}
    for message in messages(repository):
        by_page.setdefault(page_of(message.module), set()).add(message)
    lines = []
    for page, of_page in sorted(by_page.items()):
        link = posixpath.relpath(page, posixpath.dirname(_HERE))
        title = (repository / "docs" / page).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines += [
            f"## [{title}]({link})",
            "",
            "| message | kind | from |",
            "|---|---|---|",
        ]
        for message in sorted(of_page, key=lambda message: (message.text.lstrip("…'\" ").lower(), message.module)):
            lines.append(f"| {_cell(message.text)} | {message.kind} | `{message.module}` |")
        lines.append("")
    return "\n".join(lines)


def messages(repository: Path) -> Iterator[Message]:
    """Yields what is warned of, or raised with one of the library's errors, anywhere in the library."""
    library = repository / "lightning_commopt"
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func)
            kind = "warning" if name in _WARNINGS else name if name in _ERRORS else None
            text = _text(node.args[0])
            if kind and len(text.strip("… ")) > 8:
                yield Message(text, kind, module)


def page_of(module: str) -> str:
    """Returns the page that explains the messages of a module.

    Raises:
        ValueError: no page is named for it.
    """
    parts = module.split("/")
    for length in range(len(parts), 0, -1):
        if page := _EXPLAINED.get("/".join(parts[:length])):
            return page
    raise ValueError(f"messages.py names no page that explains the messages of {module}")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} / {_text(node.orelse)}"
    return "…"


def _cell(text: str) -> str:
    """Returns a message as the cell of a table, whatever characters it has."""
    return "`" + " ".join(text.split()).replace("|", "\\|").replace("`", "'") + "`"

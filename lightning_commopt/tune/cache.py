"""Plans that earlier fits have chosen, in a file for each kind of fit on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch

from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.tune.host import Host
from lightning_commopt.tune.options import TuneOptions

_FORMAT = 1


def describe_fit(host: Host, base: CommPlan) -> dict[str, Any] | None:
    """Returns what a choice holds for: model, ranks, devices, versions, the user's plan; None without a name for one.

    The link is not among it: a plan that was found before is tried before it is chosen again.
    """
    strategy, module = host.strategy, host.model().module
    shapes = [(name, list(x.shape), str(x.dtype)) for name, x in module.named_parameters() if x.requires_grad]
    device = strategy.root_device
    try:
        plan = base.to_dict()
    except ValueError:
        return None
    return {
        "format": _FORMAT,
        "parameters": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "num_ranks": strategy.world_size,
        "ranks_per_node": strategy.num_processes,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "backend": strategy.process_group_backend,
        "torch": torch.__version__,
        "accumulate_grad_batches": host.accumulated,
        "plan": plan,
    }


def load_choice(fit: dict[str, Any], options: TuneOptions, base: CommPlan) -> CommPlan | None:
    """Returns the plan that was chosen for such a fit, if this one may choose it; a file that is damaged is none."""
    try:
        saved = json.loads(_file(fit).read_text(encoding="utf-8"))
        plan = CommPlan.from_dict(saved["chosen"]) if saved["fit"] == fit else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OptionError):
        return None
    return plan if plan is not None and plan != base and options.fits(plan, base) else None


def save_choice(fit: dict[str, Any], chosen: CommPlan) -> None:
    """Keeps a choice; without a folder for it, or a name for the compressor, it is forgotten."""
    try:
        file, text = _file(fit), json.dumps({"fit": fit, "chosen": chosen.to_dict()}, indent=2)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(file)
    except (OSError, RuntimeError, ValueError):
        return


def _file(fit: dict[str, Any]) -> Path:
    return _folder() / f"{hashlib.sha256(json.dumps(fit, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_commopt" / "plans"

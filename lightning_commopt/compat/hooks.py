"""Finds out what a thread does from the files and functions on its stack; see `lightning_commopt.compat`.

``trainer/call.py``, which is the same in ``lightning`` and ``pytorch_lightning``, calls the hooks of callbacks and
modules, and some files of torch are where a rank waits for others. This module knows their names and imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

_CALLERS = {
    "_call_callback_hooks": "callback",
    "_call_lightning_module_hook": "pl_module",
    "_call_lightning_datamodule_hook": "trainer",
}
"""Functions that call a hook, and the name of their variable that holds the owner of the hook."""

_CALL_FILE = "/trainer/call.py"
_LOGGER_FILE, _LOGS = "/logger_connector/logger_connector.py", "log_metrics"
_FETCHER_FILE = "/loops/fetchers.py"
_TRAINER_FILE = "/trainer/trainer.py"
_SIGNAL_FILE, _SIGTERM_HANDLER = "/connectors/signal_connector.py", "_sigterm_notifier_fn"
SIGTERM_BROADCAST = "_broadcast_sigterm_tensor"
"""A method of the epoch loop, from Lightning 2.5.2 on."""

_PACKAGES = ("/lightning/pytorch/", "/pytorch_lightning/")

_DISTRIBUTED = "/torch/distributed/"
_WAITING = ("distributed_c10d.py", "_functional_collectives.py", "nn/functional.py")
"""Files of torch.distributed whose functions wait for other ranks, wherever they are on the stack."""
_SURROUNDING = ("elastic/", "launcher/", "run.py", "checkpoint/", "c10d_logger.py")
"""Files that start ranks, write files or wrap functions, whose frames surround everything that a rank does."""

_DDP = "/torch/nn/parallel/distributed.py"

_OWN_WAITS = (
    "/lightning_commopt/watch/changed_parameters.py",
    "/lightning_commopt/watch/epoch_ends.py",
    "/lightning_commopt/sync/gather.py",
    "/lightning_commopt/callbacks/all_ranks.py",
    "/lightning_commopt/sync/diloco/living.py",
    "/lightning_commopt/sync/diloco/members.py",
)
"""Files of this package in which a rank waits for others without a collective."""


class Activity(NamedTuple):
    """What the training thread does within Lightning."""

    # This is "hook", "data" or "checkpoint"; "SIGTERM" in the handler of that signal, where Lightning 2.6 waits for
    # other ranks; or "SIGTERM broadcast" in the broadcast before every batch.
    kind: str
    owner: str = ""  # the owner of the hook: "callback", "module", "datamodule" or "logger"
    hook: str = ""  # the name of the hook


def activity_of(frames: Sequence[tuple[str, str]]) -> Activity | None:
    """Returns the innermost activity of a thread from its files and functions, innermost first; None if it has none.

    Hooks of a module that are a part of training, such as ``optimizer_step``, do not count; their names do not begin
    with "on_".
    """
    called = inner = ""
    for file, function in frames:
        if any(part in file for part in _PACKAGES):
            if file.endswith(_CALL_FILE) and function in _CALLERS:
                owner = {"pl_module": "module", "trainer": "datamodule"}.get(_CALLERS[function], "callback")
                # A callback's hook may be a function of any name.
                if hook := called or (inner if owner == "callback" else ""):
                    return Activity("hook", owner, hook)
            if file.endswith(_LOGGER_FILE) and function == _LOGS and inner:
                return Activity("hook", "logger", "save" if inner == "save" else _LOGS)
            if file.endswith(_SIGNAL_FILE) and function == _SIGTERM_HANDLER:
                return Activity("SIGTERM")
            if function == SIGTERM_BROADCAST:
                return Activity("SIGTERM broadcast")
            if file.endswith(_FETCHER_FILE):
                return Activity("data")
            if file.endswith(_TRAINER_FILE) and function == "save_checkpoint":
                return Activity("checkpoint")
        if function.startswith("on_"):
            called = function
        inner = function
    return None


def handles_sigterm(frame: FrameType | None) -> bool:
    """Returns whether a thread is in Lightning's handler of SIGTERM, from its innermost frame."""
    while frame is not None:
        if frame.f_code.co_name == _SIGTERM_HANDLER and frame.f_code.co_filename.endswith(_SIGNAL_FILE):
            return True
        frame = frame.f_back
    return False


def hook_owner(frame: FrameType | None) -> str | None:
    """Returns the class name of the innermost hook's owner, or of the logger, from a thread's innermost frame."""
    while frame is not None:
        if frame.f_code.co_name == _LOGS and frame.f_code.co_filename.endswith(_LOGGER_FILE):
            logger = frame.f_locals.get("logger")
            return None if logger is None else type(logger).__name__
        if frame.f_code.co_name in _CALLERS and frame.f_code.co_filename.endswith(_CALL_FILE):
            variables = frame.f_locals
            if str(variables.get("hook_name", "")).startswith("on_"):
                owner = variables.get(_CALLERS[frame.f_code.co_name])
                if "datamodule" in frame.f_code.co_name:
                    owner = getattr(owner, "datamodule", None)
                elif owner is None:
                    owner = getattr(variables.get("trainer"), "lightning_module", None)
                return None if owner is None else type(owner).__name__
        frame = frame.f_back
    return None


def waited_in(file: str, function: str, *, is_innermost: bool) -> str | None:
    """Returns the operation in which a function on a thread's stack waits for other ranks; None if it does not wait.

    With ``is_innermost`` the function has called no other Python function, and waiting for a handle counts too, as in
    FSDP. Further out on the stack the same file may surround a whole forward.
    """
    if file.endswith(_OWN_WAITS):
        return "a meeting of all ranks"
    if is_innermost and file.endswith(_DDP):
        return "broadcast"  # DDP's C++ sends buffers, or the order of buckets, before the forward
    _, is_torchs, part = file.rpartition(_DISTRIBUTED)
    if not is_torchs or function == "wrapper":
        return None
    return function if part in _WAITING or (is_innermost and not part.startswith(_SURROUNDING)) else None

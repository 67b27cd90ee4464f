"""Which of torch's files wait for other ranks; see `lightning_commopt.compat`. Importing this imports no torch."""

from __future__ import annotations

_DISTRIBUTED = "/torch/distributed/"
_WAITING = ("distributed_c10d.py", "_functional_collectives.py", "nn/functional.py")
_OTHERS = ("elastic/", "launcher/", "run.py", "checkpoint/", "c10d_logger.py")
"""They start ranks, write files or wrap functions: their frames are around everything that a rank does."""

_OWN_WAITS = ("/lightning_commopt/watch/epoch_ends.py", "/lightning_commopt/sync/gather.py")


def waited_in(file: str, function: str, *, is_innermost: bool) -> str | None:
    """Returns what a function on a thread's stack waits for other ranks in; None if it does not.

    Args:
        file: that defines it.
        function: its name.
        is_innermost: whether it has called no other Python function: then waiting for a handle, as in FSDP, counts too,
            while further out the same file may be around a whole forward.
    """
    if file.endswith(_OWN_WAITS):
        return "a meeting of all ranks"
    _, is_torchs, part = file.rpartition(_DISTRIBUTED)
    if not is_torchs or function == "wrapper":
        return None
    return function if part in _WAITING or (is_innermost and not part.startswith(_OTHERS)) else None

"""Which of torch's files wait for other ranks; see `lightning_commopt.compat`. Importing this imports no torch."""

from __future__ import annotations

_DISTRIBUTED = "/torch/distributed/"
_WAITING = ("distributed_c10d.py", "_functional_collectives.py", "nn/functional.py")
_OTHERS = ("elastic/", "launcher/", "run.py", "checkpoint/", "c10d_logger.py")
"""They start ranks, write files or wrap: their frames are below or around all that a rank does."""

_OWN_WAITS = ("/lightning_commopt/watch/epoch_ends.py", "/lightning_commopt/collectives/gather.py")


def is_collective_frame(file: str, function: str, *, is_innermost: bool) -> bool:
    """Returns whether a function on a thread's stack waits for other ranks.

    Args:
        file: that defines it.
        function: its name.
        is_innermost: whether it has called no other Python function: a wait for a handle, in FSDP for example, is
            then a wait for others too, while further out the same file may be around a whole forward.
    """
    if function == "wrapper":
        return False
    if file.endswith(_OWN_WAITS):
        return True
    _, is_torchs, part = file.rpartition(_DISTRIBUTED)
    return bool(is_torchs) and (part in _WAITING or (is_innermost and not part.startswith(_OTHERS)))

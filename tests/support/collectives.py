"""Counts the collectives of the default process group, whoever issues them; needs torch 2.14."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

needs_hooks = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="hooks of process groups came with torch 2.14"
)
_HOOK_ID = 4711


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Yields the number of collectives by operation, in torch's spelling."""
    counted: Counter[str] = Counter()
    group = dist.group.WORLD
    assert group is not None
    group.register_pre_hook(_HOOK_ID, lambda args: counted.update([args.name.name]))
    try:
        yield counted
    finally:
        group.unregister_pre_hook(_HOOK_ID)

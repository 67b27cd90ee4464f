"""Counts the collectives of process groups, whoever issues them; marks tests of collectives that torch may lack."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

needs_hooks = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="hooks of process groups came with torch 2.14"
)
takes_collectives = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="FSDP2 takes other collectives from torch 2.9 on"
)
fsdp2_runs_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 runs on CPU from torch 2.7 on"
)
_HOOK_ID = 4711


@contextmanager
def counted_collectives(*, all_groups: bool = False) -> Iterator[Counter[str]]:
    """Yields the number of collectives by operation, in torch's spelling.

    Args:
        all_groups: count those of groups that are made within, too.
    """
    counted: Counter[str] = Counter()
    groups: list[dist.ProcessGroup] = []
    init = dist.distributed_c10d._new_process_group_helper

    def watch(group: dist.ProcessGroup) -> None:
        group.register_pre_hook(_HOOK_ID, lambda args: counted.update([args.name.name]))
        groups.append(group)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        made = init(*args, **kwargs)
        if isinstance(made[0], dist.ProcessGroup):
            watch(made[0])
        return made

    assert dist.group.WORLD is not None
    watch(dist.group.WORLD)
    with patch.object(dist.distributed_c10d, "_new_process_group_helper", new_group if all_groups else init):
        yield counted
    for group in groups:
        group.unregister_pre_hook(_HOOK_ID)

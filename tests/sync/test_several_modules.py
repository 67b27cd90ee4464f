"""Several modules with a hook each in one process: GANs, an encoder and a head, modules that come and go."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import AllReduce, Compressor, Hierarchical, Int8, PowerSGD
from lightning_commopt.fabric import CommOptDDP
from lightning_commopt.sync.ddp.attach import attach_bucket_hook
from support.warm_ranks import run_ranks

_SIZE = 32
Params = list[np.ndarray]


def _chain(modules: list[Any], x: Tensor) -> Tensor:
    for module in modules:
        x = torch.relu(module(x))
    return x.pow(2).mean()


def _fit(compressor: Compressor | None, num_modules: int, num_steps: int) -> Params:
    """Trains modules with an optimizer each by one backward through all of them."""
    own = CommOptDDP(comm_hook=compressor, bucket_cap_mb=0.003)
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(bucket_cap_mb=0.003) if compressor is None else own,
    )
    fabric.launch()
    torch.manual_seed(0)
    pairs = []
    for _ in range(num_modules):
        module = nn.Sequential(nn.Linear(_SIZE, _SIZE), nn.Linear(_SIZE, _SIZE))
        pairs.append(fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.01)))
    torch.manual_seed(1 + fabric.global_rank)
    for _ in range(num_steps):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        fabric.backward(_chain([module for module, _ in pairs], torch.randn(8, _SIZE)))
        for _, optimizer in pairs:
            optimizer.step()
    return [parameter.detach().numpy() for module, _ in pairs for parameter in module.parameters()]


def _fit_with_several() -> dict[str, Params]:
    compressors = {"int8": Int8(), "hierarchical": Hierarchical(inner=AllReduce()), "ddp": None}
    fits = {name: _fit(compressor, 3, 8) for name, compressor in compressors.items()}
    return fits | {"long": _fit(AllReduce(), 2, 20), "long_ddp": _fit(None, 2, 20)}


def test_one_backward_through_several_modules() -> None:
    """If it fails, ranks diverge without a word where one backward goes through two modules that Fabric set up."""
    first, second = run_ranks(_fit_with_several)
    for name, parameters in first.items():
        for one, other in zip(parameters, second[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    for name, like in {"hierarchical": "ddp", "long": "long_ddp"}.items():
        for one, of_ddp in zip(first[name], first[like], strict=True):
            np.testing.assert_allclose(one, of_ddp, rtol=1e-5, atol=1e-7, err_msg=name)


def _attach(compressor: Compressor) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(_SIZE, _SIZE))
    return model, attach_bucket_hook(model, compressor, None, ranks_per_node=2)


def _backward_in_own_order(compressor: Compressor) -> list[np.ndarray]:
    """One backward goes through three modules, on each rank in another order."""
    rank = dist.get_rank()
    modules, hooks = zip(*(_attach(compressor) for _ in range(3)), strict=True)
    torch.manual_seed(rank)
    for step in range(12):
        # DDP broadcasts its new bucket layout in the second forward of each module.
        order = [0, 1, 2] if step < 3 else [(rank + step + place) % 3 for place in range(3)]
        losses = {place: (1 + place) * modules[place](torch.randn(4, _SIZE)).pow(2).mean() for place in order}
        sum(losses.values(), torch.zeros(())).backward()
    gradients = [model.module.weight.grad.numpy() for model in modules]
    for hook in hooks:
        hook.close()
    return gradients


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compressor", "world_size"), [(PowerSGD(), 2), (Hierarchical(inner=PowerSGD()), 4)], ids=["flat", "hierarchical"]
)
def test_backwards_in_another_order_on_each_rank(compressor: Compressor, world_size: int) -> None:
    """If it fails, modules whose backwards take turns by chance pair with the wrong module of a peer, or hang."""
    first, *others = run_ranks(_backward_in_own_order, compressor, world_size=world_size)
    assert not np.array_equal(first[0], first[1])
    for gradients in others:
        for one, other in zip(first, gradients, strict=True):
            np.testing.assert_array_equal(one, other)


def _come_and_go() -> tuple[list[int], list[int]]:
    """Sets modules up and drops them, as rank 1's garbage collector comes later than rank 0's."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=CommOptDDP(comm_hook="powersgd"))
    fabric.launch()
    groups, threads, late = [], [], []
    for turn in range(12):
        pair = [fabric.setup_module(nn.Linear(_SIZE, _SIZE)) for _ in range(2)]
        fabric.backward(_chain(pair, torch.randn(4, _SIZE)))
        if fabric.global_rank == 1:
            late.append(pair)
            if turn % 4 == 3:
                late.clear()
        del pair
        gc.collect()
        groups.append(len(dist.distributed_c10d._world.pg_map))
        threads.append(sum(thread.name == "commopt-gradient-sync" for thread in threading.enumerate()))
    return groups, threads


@pytest.mark.exhaustive
def test_modules_that_come_and_go_leak_neither_groups_nor_threads() -> None:
    """If it fails, a program that sets modules up in a loop runs out of sockets or threads."""
    for groups, threads in run_ranks(_come_and_go):
        assert max(groups) == 1 + 2 * 4  # the default group, and as many as rank 1 ever held at once
        assert max(threads) <= 2 * 4
        assert threads[-1] == 0


def _groups_of_other_code() -> float:
    """Ranks are in unequal numbers of groups that user code has made."""
    dist.new_group([0, 1])
    model, hook = _attach(Hierarchical(inner=PowerSGD()))
    model((1.0 + dist.get_rank()) * torch.ones(1, _SIZE)).sum().backward()
    hook.close()
    return float(model.module.weight.grad.mean())


@pytest.mark.exhaustive
def test_nodes_can_be_made_beside_groups_of_other_code() -> None:
    """If it fails, hierarchical hangs in torch < 2.15 where user code has groups that only some ranks are in."""
    averages = run_ranks(_groups_of_other_code, world_size=4, limit_s=60, group_timeout_s=20)
    assert averages == pytest.approx([2.5] * 4)

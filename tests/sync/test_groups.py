"""The end of a process that has synchronized gradients over gloo."""

import atexit
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_commopt import CommOptDDP
from lightning_commopt.compressors.channel import Channel, backends_of
from lightning_commopt.sync.groups import let_gloo_finish_at_exit
from support.ranks import run_ranks
from support.strategy_models import trainer

NUM_RANKS = 2


def _sum_shards() -> tuple[dict[str, str], list[float]]:
    group = dist.new_group(backend="cpu:gloo")
    assert isinstance(group, dist.ProcessGroup)
    message = torch.arange(4.0).view(2, 2) * (dist.get_rank() + 1)
    return backends_of(group), Channel(group).reduce_scatter(message).wait().tolist()


def test_the_backend_is_known_however_it_is_spelled() -> None:
    """If it fails, a group that was made for one device by name counts as another backend's."""
    assert run_ranks(_sum_shards) == [({"cpu": "gloo"}, [0, 3]), ({"cpu": "gloo"}, [6, 9])]
    for config, backends in {"cuda:nccl": ["cuda"], "cpu:gloo,cuda:nccl2": ["cpu", "cuda"]}.items():
        with mock.patch.object(dist, "get_backend_config", return_value=config):
            assert list(backends_of()) == backends


def test_one_wait_is_registered_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a process that trains a hundred times waits a hundred times when it ends, or not at all."""
    register = mock.Mock()
    monkeypatch.setattr(atexit, "register", register)
    let_gloo_finish_at_exit.cache_clear()
    for _ in range(3):
        let_gloo_finish_at_exit()
    let_gloo_finish_at_exit.cache_clear()  # who trains in this process after this test registers in earnest
    (wait, seconds), _ = register.call_args
    assert register.call_count == 1
    assert wait is time.sleep
    assert 0 < seconds < 1


@pytest.mark.exhaustive
def test_processes_that_trained_end_with_status_0(tmp_path: Path) -> None:
    """If it fails, a training that went well counts as failed, or the processes never end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    commands = [[sys.executable, __file__, str(rank), str(tmp_path / "store")] for rank in range(NUM_RANKS)]
    ranks = [
        subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=100)
            assert rank.returncode == 0, output.decode()
            assert output.decode().endswith("trained\n")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main() -> None:
    """Trains as one rank, and leaves the process group to the end of the process."""
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], NUM_RANKS)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="", MASTER_PORT="1")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    run = trainer(CommOptDDP(comm_hook="powersgd"), max_steps=3)
    run.fit(BoringModel())
    assert run.global_step == 3
    print("trained", flush=True)


if __name__ == "__main__":
    main()

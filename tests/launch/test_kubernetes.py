"""The jobs in ``examples/kubernetes``, on hosts of the lab, with the variables that the training operator sets."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_commopt.launch.lab import NetLab
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.runs.record import RunRecord
from support.tiny_runs import TINY

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
LIMIT_S = 240
_PORT = "23456"  # the operator's default
_SCRIPT = """
import os
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from lightning_commopt import CommOptDDP

trainer = Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=int(os.environ["WORLD_SIZE"]),
    plugins=[KubeflowEnvironment()],
    strategy=CommOptDDP(comm_hook="int8"),
    max_steps=3,
    limit_val_batches=0,
    logger=False,
    enable_checkpointing=False,
)
torch.manual_seed(trainer.global_rank)  # DDP sends rank 0's parameters
model = BoringModel()
trainer.fit(model)
print(trainer.global_rank, trainer.strategy.wire_bytes, model.layer.weight.sum().item())
"""


def _job(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a job, and its container."""
    job = yaml.safe_load((EXAMPLES / name).read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    return job, container


def _run(command: list[str], folder: Path, environment: dict[str, str], of_pods: dict[str, list[str]]) -> list[str]:
    """Runs a container's command on two hosts, with the operator's variables and none of the lab's."""
    script = "for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT; do"
    script += ' eval "lab_$name=\\$$name"; unset $name; done; '
    for name, values in of_pods.items():
        script += f'if [ "$lab_RANK" = 0 ]; then export {name}={values[0]}; else export {name}={values[1]}; fi; '
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with NetLab(2) as lab:
        shell = ["sh", "-c", f'cd {folder}; {script} exec "$@"', "sh", *command]
        return lab.run(shell, environment={**environment, "PATH": path}, timeout_s=LIMIT_S)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lab_machine")
def test_commopt_train(tmp_path: Path) -> None:
    """If it fails, torchrun does not get along with the variables of an elastic job, or its records are missing."""
    job, container = _job("commopt_train.yaml")
    policy, num_pods = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    overrides = dict(word.split("=") for word in container["command"][3:])
    assert int(overrides["ranks"]) == policy["nProcPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(overrides["trainer.num_nodes"]) == num_pods
    environment = {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_ENDPOINT": f"host0:{_PORT}",  # the name of the first pod
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": str(num_pods),
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    own = [word.replace("/runs", str(tmp_path)) for word in container["command"] if not word.startswith("ranks=")]
    # All hosts of the lab have the name of this machine; a pod's name is its own, and torchrun finds out by itself.
    of_pods = {"PET_RDZV_CONF": ["is_host=1", "is_host=0"], "PET_LOCAL_ADDR": ["host0", "host1"]}
    _run([*own, "ranks=1", *TINY], tmp_path, environment, of_pods)
    record = RunRecord.load(tmp_path / "bf16")
    assert (record.status, record.sync_method, record.world_size) == ("finished", "bf16", 2)
    assert [len(rank.steps) for rank in read_run(tmp_path / "bf16")] == [4, 4]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lab_machine")
def test_script(tmp_path: Path) -> None:
    """If it fails, a script of a user's own needs more than Lightning to run as a job of the operator."""
    _, container = _job("script.yaml")
    (tmp_path / "train.py").write_text(_SCRIPT)
    environment = {"PYTHONUNBUFFERED": "0", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
    of_pods = {"MASTER_ADDR": ["host0"] * 2, "MASTER_PORT": [_PORT] * 2, "WORLD_SIZE": ["2"] * 2, "RANK": ["0", "1"]}
    outputs = _run(container["command"], tmp_path, environment, of_pods)
    lines = [output.splitlines()[-1].split() for output in outputs]
    assert [line[0] for line in lines] == ["0", "1"]
    assert int(lines[0][1]) > 0
    assert lines[0][2] == lines[1][2]

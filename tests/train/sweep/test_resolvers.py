import pytest
from omegaconf import OmegaConf

from lightning_commopt.train.sweep.config import register_resolvers

ASKED = {
    "accelerator": "${commopt.accelerator:}",
    "device": "${commopt.device:}",
    "devices": "${commopt.devices:2}",
    "chosen": "${commopt.gpu_or_cpu:a,b}",
}


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, {"accelerator": "cpu", "device": "cpu", "devices": 2, "chosen": "b"}),
        (8, {"accelerator": "gpu", "device": "cuda:0", "devices": 8, "chosen": "a"}),
    ],
)
def test_the_machine_that_resolves_is_asked(monkeypatch, num_gpus, expected):
    """If it fails, jobs on the nodes of a cluster train on what its login node has."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus == 0)
    register_resolvers()
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert OmegaConf.to_container(OmegaConf.create(ASKED), resolve=True) == expected

"""What a run's configuration says against where it runs; see also test_conf and sweep/test_link."""

import pytest
from omegaconf import OmegaConf

from lightning_commopt.launch.environment import LAB_RANK_VARIABLE
from lightning_commopt.train.sweep.config import ConfigError, check_config
from lightning_commopt.train.sweep.resolvers import register_resolvers
from support.composed import composed

SINGLE = ("strategy=single", "trainer.devices=1", "trainer.accelerator=cpu")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
        pytest.param({"SLURM_PROCID": "1"}, marks=pytest.mark.exhaustive),
    ],
)
def test_one_process_is_not_trained_by_several(monkeypatch, variables):
    """If it fails, as many runs as there are ranks write into one directory."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_config(composed("trainer.devices=1"))
    with pytest.raises(ConfigError, match=r"strategy=single trains in one process.*without torchrun and srun"):
        check_config(composed(*SINGLE))
    monkeypatch.setenv(LAB_RANK_VARIABLE, "1")
    check_config(composed(*SINGLE))


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # the script of sbatch
        {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},  # left by Lightning
    ],
)
def test_one_process_is_trained_where_there_is_one(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_config(composed(*SINGLE))


def test_one_process_has_one_node():
    with pytest.raises(ConfigError, match=r"one device, got trainer\.num_nodes=2"):
        check_config(composed(*SINGLE, "trainer.num_nodes=2"))


def test_repeat_under_another_launcher_says_what_to_write_there():
    config = composed("repeat=3", "hydra.mode=MULTIRUN")
    with pytest.raises(ConfigError, match=r"repeat=3 needs hydra/launcher=fresh_processes; .*repetition=0,1,2 "):
        check_config(config)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_steps=11"],
        ["trainer.max_steps=2", "callbacks.speed.num_warmup_steps=1"],
        ["trainer.max_steps=-1", "trainer.max_epochs=1"],
        ["trainer.max_steps=5", "callbacks.speed=null"],
    ],
)
def test_a_run_with_steps_left_to_time_is_not(overrides):
    check_config(composed(*overrides))


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

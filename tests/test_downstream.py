"""``+commopt=...`` in a foreign Hydra + Lightning project, with this package installed from its wheel."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_commopt import CommOptDDP, CommOptDiLoCo, CommPlan, DiLoCoPlan, PowerSGD
from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.compressors.configs import compressor_to_config
from lightning_commopt.compressors.sharded import ShardedInt8
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.runs.losses import read_losses
from lightning_commopt.measure.runs.record import RunRecord
from support.wheels import REPOSITORY, build_wheel, install_wheel, run_checked

_YAML = {path.stem: path for path in (REPOSITORY / "conf" / "downstream" / "commopt").glob("*.yaml")}


_COMPOSE = """
import sys
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    loader = GlobalHydra.instance().config_loader()
    shown = {
        "configs": {overrides: compose("train", overrides.split()) for overrides in sys.argv[2:]},
        "groups": loader.list_groups(""),
        "options": loader.get_group_options("commopt"),
        "search_path": [f"{entry.provider} {entry.path}" for entry in loader.get_search_path().get_path()],
    }
    print(OmegaConf.to_yaml(OmegaConf.create(shown)))
"""


class ForeignProject:
    """A copy of tests/foreign_project, which is laid out like lightning-hydra-template.

    Args:
        python: of the environment that it runs in.
        folder: of the copy.
        package: the name by which it imports Lightning.
    """

    def __init__(self, python: Path, folder: Path, package: str = "lightning") -> None:
        self.python = python
        self.folder = folder
        shutil.copytree(REPOSITORY / "tests" / "foreign_project", folder)
        if package == "pytorch_lightning":
            self._import_pytorch_lightning()

    def _import_pytorch_lightning(self) -> None:
        for path in (*self.folder.glob("src/**/*.py"), *self.folder.glob("configs/trainer/*.yaml")):
            text = path.read_text().replace("import lightning\n", "import pytorch_lightning as lightning\n")
            text = text.replace("from lightning import", "from pytorch_lightning import")
            path.write_text(text.replace("lightning.pytorch.", "pytorch_lightning."))

    def run(self, *arguments: str) -> None:
        """Runs its training script."""
        run_checked([str(self.python), "src/train.py", *arguments], cwd=self.folder)

    def compose(self, *overrides: str) -> Any:
        """Returns its config for each text of overrides, and what Hydra knows, without the training script."""
        shown = run_checked([str(self.python), "-c", _COMPOSE, str(self.folder / "configs"), *overrides])
        return OmegaConf.create(shown)

    def record(self, folder: str) -> dict[str, Any]:
        """Returns what a job wrote down."""
        return json.loads((self.folder / folder / "record.json").read_text())


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downstream")
    return install_wheel(build_wheel(folder), folder / "venv")


@pytest.fixture
def project(environment: Path, tmp_path: Path) -> ForeignProject:
    return ForeignProject(environment / "python", tmp_path / "project")


def test_groups_are_those_that_the_documentation_names() -> None:
    plans = {"none", "bf16", "fp16", "int8", "int4", "powersgd", "alternating_powersgd", "buckets"}
    assert set(_YAML) == {*plans, "auto", "fsdp2_int8", "diloco"}
    page = (REPOSITORY / "docs" / "how_to" / "hydra.md").read_text(encoding="utf-8")
    options = page.partition("\nOptions are ")[2].partition("\n\n")[0]
    assert all(f"`{name}`" in options for name in _YAML)


def test_yaml_of_fsdp2_makes_the_strategy_with_every_option_of_int8() -> None:
    """What the YAML has can be overridden without a plus sign."""
    options: Any = OmegaConf.to_container(OmegaConf.load(_YAML["fsdp2_int8"]).strategy)
    assert options.pop("_target_") == "lightning_commopt.CommOptModelParallel"
    assert options == {"comm_hook": compressor_to_config(ShardedInt8())}


def test_yaml_of_diloco_makes_the_strategy_with_its_defaults() -> None:
    options: Any = OmegaConf.to_container(OmegaConf.load(_YAML["diloco"]).strategy)
    assert options.pop("_target_") == "lightning_commopt.CommOptDiLoCo"
    assert set(DiLoCoPlan.options()) - set(options) == {"fragment_by"}
    assert CommOptDiLoCo(**options).plan == DiLoCoPlan()


@pytest.mark.parametrize("name", sorted({*_YAML} - {"diloco", "fsdp2_int8"}))
def test_yaml_makes_a_valid_plan(name: str) -> None:
    options = OmegaConf.to_container(OmegaConf.load(_YAML[name]).strategy)
    assert isinstance(options, dict)
    assert options.pop("_target_") == "lightning_commopt.CommOptDDP"
    strategy = CommOptDDP(**{str(key): value for key, value in options.items()})
    assert strategy.plan.comm_hook == compressor_from_config(None if name in ("buckets", "auto") else name)


def test_powersgd_yaml_lists_every_setting_with_its_default() -> None:
    """What the YAML has can be overridden without a plus sign."""
    settings = OmegaConf.to_container(OmegaConf.load(_YAML["powersgd"]).strategy.comm_hook)
    assert settings == {"name": "powersgd", **dataclasses.asdict(PowerSGD())}


_OURS = {"_target_": "lightning_commopt.CommOptDDP"}
_CALLBACKS = {f"lightning_commopt.callbacks.{name}" for name in ("SpeedMonitor", "CommTimeMonitor", "RunRecorder")}
COMPOSED: dict[str, tuple[str, Any]] = {
    "trainer=ddp +commopt=bf16": ("trainer.strategy", {**_OURS, "comm_hook": "bf16"}),
    "trainer=ddp_unused +commopt=none": (
        "trainer.strategy",
        {**_OURS, "find_unused_parameters": True, "comm_hook": "none"},
    ),
    "+commopt=powersgd trainer.strategy.comm_hook.matrix_rank=2": ("trainer.strategy.comm_hook.matrix_rank", 2),
    "experiment=long +commopt=buckets": ("trainer.strategy.bucket_cap_mb", 100),
    "experiment=long +commopt=int8": ("trainer.max_steps", 5),
    "+commopt@_global_=bf16": ("strategy.comm_hook", "bf16"),
    "+commopt@engine.fit=bf16": ("engine.fit.strategy.comm_hook", "bf16"),
    "+commopt_record=callbacks callbacks.commopt_run.val_loss=val/loss": ("callbacks.commopt_run.val_loss", "val/loss"),
    "+commopt_record=callbacks": ("callbacks", _CALLBACKS),
    "+commopt_record=trainer": ("trainer.callbacks", _CALLBACKS),
}
"""What a place of the project's config holds with our overrides; of callbacks, which they are."""


def test_composes_with_what_a_project_has(project: ForeignProject) -> None:
    """If it fails, ``+commopt=...`` loses options of a project, or adds groups to every Hydra application.

    The strategy may be a string, a dict, or missing, and ours may stand at another place.
    """
    shown = project.compose(*COMPOSED)
    for overrides, (place, expected) in COMPOSED.items():
        value = OmegaConf.select(shown.configs[overrides], place)
        if expected is _CALLBACKS:
            value = {callback._target_ for callback in (value.values() if hasattr(value, "values") else value)}
        assert value == expected, overrides
    assert set(shown.groups) == {"commopt", "commopt_record", "data", "experiment", "hydra", "model", "trainer"}
    assert set(shown.options) == set(_YAML)
    (entry,) = [entry for entry in shown.search_path if entry.startswith("lightning-commopt ")]
    assert entry.endswith("conf/downstream")


@pytest.mark.exhaustive
def test_an_option_that_is_unknown_is_an_error_of_hydras_and_a_hint(project: ForeignProject) -> None:
    """If it fails, ``+commopt=bf61`` shows a list of names to compare by eye."""
    with pytest.raises(AssertionError, match=r"(?s)Available options in 'commopt':.*Did you mean 'commopt/bf16'\?"):
        project.run("+commopt=BF61")


@pytest.mark.exhaustive
def test_a_strategy_by_name_needs_no_import(project: ForeignProject) -> None:
    """If it fails, trainer.strategy=commopt_ddp_bf16 is an unknown name in a project that does not import us."""
    project.run("trainer.max_steps=1", "+trainer.strategy=commopt_ddp_bf16", "hydra.run.dir=job")
    assert project.record("job")["strategy"] == "lightning_commopt.lightning.CommOptDDP"


@pytest.mark.exhaustive
def test_a_project_of_pytorch_lightning(environment: Path, tmp_path: Path) -> None:
    """If it fails, +commopt does not work where the Trainer is pytorch_lightning's."""
    project = ForeignProject(environment / "python", tmp_path / "project", "pytorch_lightning")
    project.run("trainer=ddp_unused", "+commopt=bf16", "+commopt_record=trainer", "hydra.run.dir=job")
    record = project.record("job")
    assert record["strategy"] == "lightning_commopt.pytorch_lightning.CommOptDDP"
    assert record["plan"] == CommPlan.from_dict({"comm_hook": "bf16", "find_unused_parameters": True}).to_dict()
    assert record["world_size"] == 2
    assert record["same_on_all_ranks"]
    assert RunRecord.load(project.folder / "job").status == "finished"


@pytest.fixture(scope="module")
def trained(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> ForeignProject:
    """A project after a sweep over devices."""
    project = ForeignProject(environment / "python", tmp_path_factory.mktemp("trained") / "project")
    own = ("trainer=ddp", "trainer.max_steps=14", "+commopt_record=trainer")
    project.run("-m", *own, "trainer.devices=1,2", "+commopt=bf16", "hydra.sweep.dir=sweep")
    return project


def _assert_trained(
    record: dict[str, Any], environment: Path, plan: CommPlan, world_size: int = 2, num_steps: int = 3
) -> None:
    assert record["strategy"] == "lightning_commopt.lightning.CommOptDDP"
    assert Path(record["package_file"]).is_relative_to(environment.parent)
    assert record["plan"] == plan.to_dict()
    assert record["world_size"] == world_size
    assert record["steps"] == num_steps
    assert record["finite"]
    assert record["same_on_all_ranks"]


@pytest.mark.exhaustive
def test_sweep_over_devices_and_a_string_trains_each_job_with_its_own(
    trained: ForeignProject, environment: Path
) -> None:
    """Lightning's own launcher would train all jobs with the first one's number of processes."""
    plan = CommPlan.from_dict({"comm_hook": "bf16"})
    for job, world_size in enumerate((1, 2)):
        _assert_trained(trained.record(f"sweep/{job}"), environment, plan, world_size, num_steps=14)


@pytest.mark.exhaustive
def test_sweep_leaves_the_records_that_commopt_train_leaves(trained: ForeignProject) -> None:
    """If it fails, a report has nothing to read of other people's sweeps."""
    for job, world_size in enumerate((1, 2)):
        folder = trained.folder / "sweep" / str(job)
        record = RunRecord.load(folder)
        assert (record.status, record.sync_method, record.world_size) == ("finished", "bf16", world_size)
        assert "+commopt=bf16" in record.settings.overrides
        assert record.settings.chosen["commopt"] == "bf16"
        assert record.num_timed_steps == 4
        assert (record.comm_time["exposed_share"] > 0) == (world_size == 2)
        assert [point.step for point in read_losses(folder)] == list(range(1, 15))
        assert [len(rank.steps) for rank in read_run(folder)] == [14] * world_size

"""What ``commopt-train --help`` prints."""

import sys

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_commopt.compat.hydra import VERSION_BASE
from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.train.start import config_groups
from support.wheels import run_checked

_HELP = """
import sys
from lightning_commopt.train.start import main
sys.argv = ["commopt-train", "--help"]
main()
print("imported", *{"torch", "lightning", "hydra", "rich"} & sys.modules.keys())
"""


def test_help_lists_each_group_once_and_imports_nothing_that_is_slow() -> None:
    """If it fails, whoever asks what the command does waits for torch, or reads of a group twice."""
    lines = run_checked([sys.executable, "-c", _HELP]).splitlines()
    assert lines[-1] == "imported"
    assert max(map(len, lines)) <= 120 or all(", " in line for line in lines if len(line) > 120)
    for group, options in config_groups(conf_dir()).items():
        (line,) = (line for line in lines if line.split()[:1] == [group] and line.startswith("  "))
        assert line.split(maxsplit=1)[1] == ", ".join(options)


def test_every_group_is_one_of_hydras() -> None:
    """If it fails, the help offers what Hydra does not find, or leaves out a group."""
    with initialize_config_dir(str(conf_dir()), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        groups = config_groups(conf_dir())
        for group, options in groups.items():
            assert loader.get_group_options(group) == options
        assert compose(overrides=["hydra/launcher=basic"], config_name="train").seed == 0

"""NCCL's settings are checked, and set without touching those of the user."""

import os
import warnings
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_commopt import CommOptDDP, OptionError
from lightning_commopt.callbacks import run_description
from lightning_commopt.launch import nccl_options
from lightning_commopt.launch.nccl_options import NcclOptions, profiles
from support.composed import composed
from support.known import known
from support.ranks import run_ranks
from support.refusals import one_by_one, refusals
from support.strategy_models import SelfFed, trainer


def test_names_and_values() -> None:
    """If it fails, a short name or a value of YAML is not what NCCL reads."""
    options = NcclOptions(settings={"algo": "Ring", "NCCL_MIN_NCHANNELS": 16, "P2P_disable": True})
    assert options.settings == {"NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "16", "NCCL_P2P_DISABLE": "1"}


_BAD = [
    *({"algos": "Ring"}, {"algo": "Rnig"}, {"nthreads": 300}, {"tree_threshold": 0}, {"socket_ifname": None}),
    *({"override": "yes", "algo": "Ring"}, "pci", {"profile": "pci"}, {"profile": ["pcie"]}, 3),
    {"topo_file": ["a.xml"]},
]


def test_bad_settings(golden: Callable[[str, str], None]) -> None:
    """If it fails, a setting without effect is found after hours, or never."""
    golden("nccl_options", refusals(one_by_one(CommOptDDP, nccl=_BAD), OptionError))


def test_profiles() -> None:
    """If it fails, a profile cannot be used by name, or not as a Hydra config."""
    assert list(profiles()) == ["debug", "ethernet", "infiniband", "pcie"]
    for name in profiles():
        assert known(NcclOptions.from_config(name)).settings
    composed_one = composed("+nccl=ethernet").strategy.nccl
    assert NcclOptions.from_config("ethernet") == NcclOptions.from_config(dict(composed_one))
    changed = known(NcclOptions.from_config({"profile": "ethernet", "nsocks_perthread": 2, "override": True}))
    assert changed.override
    assert changed.settings == {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}


@pytest.mark.parametrize(("override", "algo"), [(False, "Tree"), (True, "Ring")])
def test_the_users_environment_counts_first(override: bool, algo: str) -> None:
    """If it fails, what a user has exported is replaced without being asked, or cannot be replaced."""
    environment = {"NCCL_ALGO": "Tree", "HOME": "/"}
    chosen = NcclOptions(settings={"algo": "Ring", "proto": "LL"}, override=override).apply(environment)
    assert environment == {"NCCL_ALGO": algo, "NCCL_PROTO": "LL", "HOME": "/"}
    assert chosen == {name: environment[name] for name in chosen}
    assert ("NCCL_ALGO" in chosen) == override


def test_a_trainer_has_its_own_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the jobs of a sweep over settings have those of earlier jobs, too."""
    monkeypatch.setattr(nccl_options, "_in_use", None)
    for name in ("NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_PROTO"):
        monkeypatch.setenv(name, "LL")  # so that what the test leaves is removed
    del os.environ["NCCL_ALGO"], os.environ["NCCL_MIN_NCHANNELS"]

    def seen(**settings: object) -> list[str | None]:
        nccl_options.set_in_process(NcclOptions(settings=settings, override=True) if settings else None)
        return [os.environ.get(f"NCCL_{name}") for name in ("ALGO", "MIN_NCHANNELS", "PROTO")]

    assert seen(algo="Ring", proto="Simple") == ["Ring", None, "Simple"]
    with pytest.warns(UserWarning, match="an earlier Trainer of this process had other settings"):
        assert seen(algo="Tree", min_nchannels=4) == ["Tree", "4", "LL"]
    os.environ["NCCL_ALGO"] = "Ring"  # by the user, in the program
    assert seen() == ["Ring", None, "LL"]


@pytest.mark.parametrize(("backend", "recorded"), [("gloo", {}), ("nccl", {"nccl.algo": "Ring"})])
def test_a_record_has_the_settings(backend: str, recorded: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a report compares runs as if NCCL had had the same settings."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(run_description, "backends_of", lambda: {"cpu": "gloo", "cuda": backend})
    monkeypatch.setattr(os, "environ", {"NCCL_ALGO": "Ring", "NCCL_NOT_THERE": "1"})
    assert run_description.nccl_settings() == recorded


def _fit_on_gloo() -> tuple[list[str], bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(CommOptDDP(nccl={"algo": "Ring"}), max_steps=1).fit(SelfFed())
    return [str(each.message) for each in caught], "NCCL_ALGO" in os.environ


def test_without_nccl_it_says_that_it_has_no_effect() -> None:
    """If it fails, NCCL's settings are ignored in silence on CPU."""
    (messages, is_set), _ = run_ranks(_fit_on_gloo)
    assert sum("nccl has no effect" in message for message in messages) == 1
    assert not is_set

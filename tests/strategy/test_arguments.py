"""Arguments of the strategies for DDP: those that are refused, and how, and those without effect."""

import inspect
import json
from typing import Any

import numpy as np
import pytest
from lightning.fabric import Fabric
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_commopt import CommOptDDP, PowerSGD
from lightning_commopt.fabric import CommOptDDP as FabricCommOptDDP
from lightning_commopt.plan import OptionError, UnknownOptionError
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.text import validation
from support.lightnings import Trainer

STRATEGIES = [CommOptDDP, FabricCommOptDDP]


@pytest.mark.parametrize("make", [Trainer, Fabric])
def test_name_of_an_accelerator(make: Any) -> None:
    """If it fails, DDPStrategy(accelerator="gpu") cannot be replaced, which PyTorch Geometric has in an example."""
    strategy: Any = CommOptDDP if make is Trainer else FabricCommOptDDP
    made = make(strategy=strategy(accelerator="cpu"), devices=2)
    assert type(made.strategy.accelerator).__name__ == "CPUAccelerator"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_known_options_are_those_that_can_be_given(strategy: Any) -> None:
    """If it fails, an error lists options that the strategy refuses, or leaves out its own."""
    with pytest.raises(UnknownOptionError, match="known options") as caught:
        strategy(zip=1)
    known = set(str(caught.value).partition("known options: ")[2].split(", "))
    own = set(inspect.signature(strategy).parameters) - {"kwargs"}
    assert known == own | (ddp_options() - {"device_ids"})
    assert ("uneven_batches" in known) == (strategy is CommOptDDP)
    assert {"save_comm_state", "watch"} <= known


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"comm_hook": "powersgd", "matrix_rank": 2}, {"name": "powersgd", "matrix_rank": 2}),
        ({"comm_hook": PowerSGD(), "matrix_rank": 2}, {"name": "powersgd", "matrix_rank": 2}),
        ({"comm_hook": "fp16", "accumulate": "float32"}, {"name": "fp16", "accumulate": "float32"}),
        ({"block_size": 64}, {"name": "int8", "block_size": 64}),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_option_of_a_compressor_beside_it(strategy: Any, arguments: dict[str, Any], shown: dict[str, Any]) -> None:
    """If it fails, a user is not told how to give an option of a compressor, or told what fails."""
    with pytest.raises(UnknownOptionError, match="write comm_hook=") as caught:
        strategy(**arguments)
    example = json.loads(str(caught.value).partition("comm_hook=")[2])
    assert example == shown
    strategy(comm_hook=example)


def test_two_hooks() -> None:
    """If it fails, one of two hooks is dropped without a word."""
    with pytest.raises(OptionError, match="exclude each other"):
        CommOptDDP(comm_hook="bf16", ddp_comm_hook=print)
    assert CommOptDDP(comm_hook="none", ddp_comm_hook=print).plan.comm_hook is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ddp_comm_state": object()}, "ddp_comm_state has no effect: it needs ddp_comm_hook"),
        ({"ddp_comm_wrapper": print}, "ddp_comm_wrapper has no effect: it needs ddp_comm_hook"),
        (
            {"model_averaging_period": 2, "ddp_comm_hook": print},
            "model_averaging_period has no effect: it needs a Post",
        ),
    ],
)
def test_lightnings_arguments_without_effect(arguments: dict[str, Any], message: str) -> None:
    """If it fails, an argument is dropped without a word."""
    validation.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=message):
        CommOptDDP(**arguments)


def test_lightnings_arguments_with_effect() -> None:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    CommOptDDP(ddp_comm_hook=print, ddp_comm_state=object(), ddp_comm_wrapper=print)
    CommOptDDP(ddp_comm_state=state, model_averaging_period=np.int64(2))  # type: ignore[arg-type]

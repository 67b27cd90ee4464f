import copy
import inspect
import pickle
import warnings

import pytest
import torch
from line import Line
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import callbacks
from lightning_commopt.callbacks.phases import PhaseCallback
from support.lightnings import Callback
from support.strategy_models import trainer as quiet_trainer


class Phases(PhaseCallback):
    def __init__(self) -> None:
        self.entered: list[str | None] = []

    def _enter(self, phase):
        self.entered.append(phase)


def test_only_a_fit_waits_for_batches():
    phases = Phases()
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer("auto", callbacks=[phases], max_epochs=1, num_sanity_val_steps=2)
        trainer.fit(Line(), loader, loader)
        step = ["data", "forward", "backward", "other", "optimizer", "other", "data"]
        # The sanity check, a step, a validation, the ends of the epoch and of the fit.
        assert phases.entered == [None, *step, None, "data", None, None]
        phases.entered.clear()
        trainer.validate(Line(), loader, verbose=False)
    assert set(phases.entered) <= {None}


@pytest.mark.parametrize("name", callbacks.__all__)
def test_a_callback_can_be_sent_to_other_processes(name: str) -> None:
    """If it fails, start_method="spawn" cannot hand the Trainer to its processes."""
    callback = getattr(callbacks, name)(**{"start_step": 3} if name == "CUDAProfilerWindow" else {})
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(copied) is type(callback)
        assert copied.state_key == callback.state_key


@pytest.mark.parametrize("name", callbacks.__all__)
def test_no_hook_has_the_name_of_another(name: str) -> None:
    """If it fails, HangMonitor says that a rank is in a hook that it is not in."""
    for hook in [hook for hook in vars(Callback) if hook.startswith("on_")]:
        function = getattr(getattr(callbacks, name), hook).__name__
        assert function == hook or not function.startswith("on_")


@pytest.mark.parametrize("name", callbacks.__all__)
def test_hooks_have_lightnings_arguments(name: str) -> None:
    """If it fails, a subclass cannot call a hook of ours with the names that Lightning has for its arguments."""
    hooks = {hook: own for hook, own in vars(Callback).items() if hook.startswith("on_")}
    for hook, lightnings in hooks.items():
        own = inspect.signature(getattr(getattr(callbacks, name), hook))
        assert list(own.parameters) == list(inspect.signature(lightnings).parameters), hook

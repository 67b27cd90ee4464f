"""The packages ``lightning`` and ``pytorch_lightning``, and their private names; see `lightning_commopt.compat`.

They have the same code but different classes: a Trainer accepts only strategies and callbacks of its own package.
Importing this module imports neither of them. Its classes get their bases when the program imports a package.

Our strategies override ``_configure_launcher``, ``_register_ddp_hooks`` and ``_setup_distributed`` (Fabric) of
``DDPStrategy``, read or set its ``_accelerator``, ``_checkpoint_io``, ``_ddp_kwargs``, ``_timeout``, ``_start_method``,
``_launcher``, ``_backward_sync_control`` and ``_determine_ddp_device_ids`` (Fabric) and
``_pl_static_graph_delay_done``, and call its ``_convert_stateful_objects_in_state`` (Fabric), for which there is no
public alternative. They override ``_configure_launcher`` and ``_setup_distributed`` of ``ModelParallelStrategy``, and
read or set its ``_data_parallel_size``, ``_tensor_parallel_size`` and ``_save_distributed_checkpoint``. Our launcher
overrides ``_call_children_scripts`` and calls ``_check_can_spawn_children``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from lightning_commopt.compat.import_hook import call_after_import
from lightning_commopt.compat.loops import batch_is_open

if TYPE_CHECKING:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from torch import Tensor

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The packages with a Trainer; the first is the default if a program has imported neither."""

RUNS_CALLBACKS, SAVES_CHECKPOINTS = "_call_callback_hooks", "save_checkpoint"
"""Functions on the stack of a thread that runs a callback or saves a checkpoint."""

RUNS_TRAINER = "_call_and_handle_interrupt"
"""Function on the stack of a thread that a Trainer has not returned to the program yet, also after an exception."""

_FABRICS = ("lightning.fabric", "lightning_fabric")

if not TYPE_CHECKING:

    class _NoCallback:
        """The first base of `Callback`, since Python can replace only bases that are defined in Python."""

    class _NoException(Exception):  # noqa: N818
        pass

    class Callback(_NoCallback):
        """A callback for the Trainer of every package that the program imports.

        Each package's own ``Callback`` becomes a base of this class once the program has imported it.
        """

    class MisconfigurationException(_NoException):
        """The ``MisconfigurationException`` of every package that the program imports; see `Callback`."""


def _add_base(ours: type, name: str) -> Callable[[ModuleType], None]:
    def add(module: ModuleType) -> None:
        known = tuple(base for base in ours.__bases__ if base.__name__ == name)
        if getattr(module, name) not in known:
            ours.__bases__ = (*known, getattr(module, name))

    return add


for _package in PACKAGES:
    call_after_import(f"{_package}.callbacks.callback", _add_base(Callback, "Callback"))
for _package in _FABRICS:
    call_after_import(
        f"{_package}.utilities.exceptions", _add_base(MisconfigurationException, "MisconfigurationException")
    )


def package_of(instance: object) -> str:
    """Returns which of `PACKAGES` defines the class of an object, or a base of it; the first one if none does."""
    return package_of_class(type(instance))


def package_of_class(cls: type) -> str:
    """Returns which of `PACKAGES` defines a class, or a base of it; the first one if none does."""
    for base in cls.__mro__:
        for package in PACKAGES:
            if base.__module__.startswith(f"{package}."):
                return package
    return PACKAGES[0]


def package_in_use() -> str:
    """Returns which of `PACKAGES` this program has imported; if both or neither, the first that is installed."""
    imported = [package for package in PACKAGES if package in sys.modules]
    if len(imported) == 1:
        return imported[0]
    for package in PACKAGES:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise
        else:
            return package
    raise ModuleNotFoundError(
        "lightning_commopt needs lightning or pytorch-lightning, but neither is installed: pip install lightning"
    )


def count_samples(batch: Any) -> int | None:
    """Returns the samples that Lightning counts in a batch; 0 for None, which it skips; None if they are unknown.

    As in Lightning's ``extract_batch_size``, the first tensor decides. Mappings, lists, tuples and dataclasses are
    searched for it. Lightning iterates over everything else too: through each number of an array, each byte, and an
    iterator that the step would then find empty.
    """
    if batch is None:
        return 0
    from torch import Tensor  # not at the top, since importing the package must not import torch

    try:
        return _first_size(batch, Tensor)
    except RecursionError:  # the batch contains itself
        return None


def _first_size(batch: Any, tensor: type[Tensor]) -> int | None:
    """Returns the size of the first tensor in a batch; None if there is none. ``tensor`` is torch's class."""
    if isinstance(batch, tensor):
        return batch.size(0) if batch.ndim else 1
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name, None) for field in fields(batch))
    return next((size for part in parts if (size := _first_size(part, tensor)) is not None), None)


def batches_that_stepped(trainer: Trainer) -> int:
    """Returns the step number that Lightning gives to loggers; ``global_step`` counts each optimizer separately."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def num_steps_of(trainer: Trainer) -> float:
    """Returns the optimizer steps of a fit whose data are loaded; infinite if it has no end, or none that is known."""
    number = float(trainer.estimated_stepping_batches)
    return math.inf if number == -1 else number  # data without a length, and no `max_steps`


def will_accumulate(trainer: Trainer) -> bool:
    """Returns whether the current batch makes no optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def skips_backward(trainer: Trainer) -> bool:
    """Returns whether StochasticWeightAveraging has an epoch only to compute the statistics of its weights.

    The step at the end of such an epoch trains nothing.
    """
    return trainer.fit_loop._skip_backward


def is_validation_next(trainer: Trainer) -> bool:
    """Returns whether a validation comes before the next batch; only valid in ``on_train_batch_end``."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def optimizer_is_toggled(module: LightningModule) -> bool:
    """Returns whether ``toggle_optimizer`` has frozen the parameters of other optimizers."""
    return bool(module._param_requires_grad_state)


def is_log_of_step(trainer: Trainer, caller: str) -> bool:
    """Returns whether ``self.log`` calls a strategy in a batch of training, or in a hook before or after it.

    Args:
        trainer: the Trainer of a fit.
        caller: ``__name__`` of the module that calls the strategy. Others may call it as well, to decide something.
    """
    is_log = caller == f"{package_of(trainer)}.trainer.connectors.logger_connector.result"
    is_beside = is_in_hook(trainer, "on_train_batch_start", "on_train_batch_end")
    return is_log and (batch_is_open(trainer) or is_beside)


def is_in_hook(trainer: Trainer, *names: str) -> bool:
    """Returns whether one of the hooks is being called, of the module or of callbacks."""
    return trainer.lightning_module._current_fx_name in names


def reductions_left_out(trainer: Trainer) -> dict[str, str]:
    """Returns the names in ``callback_metrics`` of values that `is_log_of_step` is about, each with its reduction.

    Args:
        trainer: the Trainer of a fit, in a hook of a callback.
    """
    is_after_epoch = is_in_hook(trainer, "on_train_epoch_end", "on_train_end")
    reductions = {}
    for metric in trainer.fit_loop.epoch_loop._results.values():
        meta, sync = metric.meta, metric.meta.sync
        if metric.is_tensor and meta.on_step and sync.should and not sync.rank_zero_only and sync.group is None:
            reductions[meta.forked_name(on_step=True)] = sync.op
            if not (is_after_epoch and meta.on_epoch):  # otherwise the name stands for the value of the epoch
                reductions[meta.name] = sync.op
    return reductions


def clock_callbacks(trainer: Trainer) -> list[Callback]:
    """Returns the callbacks that broadcast in every batch whether a time limit, such as ``max_time``, has passed."""
    saving = [x for x in callbacks_of(trainer, "ModelCheckpoint") if x._train_time_interval is not None]
    return [*callbacks_of(trainer, "Timer"), *saving]


def callbacks_of(trainer: Trainer, name: str) -> list[Any]:
    """Returns the Trainer's callbacks of a class of Lightning's, such as "EarlyStopping"."""
    kind = getattr(import_module(f"{package_of(trainer)}.callbacks"), name)
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def has_trainer(module: LightningModule) -> bool:
    """Returns whether a module belongs to a trainer; its public ``trainer`` raises if it does not."""
    return module._trainer is not None


def is_interactive() -> bool:
    """Returns whether Lightning regards this program as a notebook or an interactive interpreter."""
    modules = (sys.modules.get(f"{fabric}.utilities.imports") for fabric in _FABRICS)
    return any(module._IS_INTERACTIVE for module in modules if module is not None)


def is_lightnings_ddp(strategy: object) -> TypeGuard[DDPStrategy]:
    """Returns whether a strategy is Lightning's ``DDPStrategy`` and not a subclass."""
    cls = type(strategy)
    return cls.__name__ == "DDPStrategy" and cls.__module__ in {f"{package}.strategies.ddp" for package in PACKAGES}


def arguments_of_ddp(strategy: DDPStrategy) -> dict[str, Any]:
    """Returns the arguments of Lightning's ``DDPStrategy``, except for its comm hook and its precision."""
    return {
        "parallel_devices": strategy.parallel_devices,
        "cluster_environment": strategy.cluster_environment,
        "checkpoint_io": strategy._checkpoint_io,
        "process_group_backend": strategy.process_group_backend,
        "timeout": strategy._timeout,
        "start_method": strategy._start_method,
        **strategy._ddp_kwargs,
    }


def comm_hook_of(strategy: object) -> Callable[..., Any] | None:
    """Returns the ``ddp_comm_hook`` of Lightning's ``DDPStrategy``; None for other strategies, or if it has none."""
    return getattr(strategy, "_ddp_comm_hook", None)


def wrap_comm_hook(strategy: object, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the hook that Lightning's ``DDPStrategy`` will register, before it wraps the model; ignores others."""
    if hasattr(strategy, "_ddp_comm_wrapper"):
        inner = strategy._ddp_comm_wrapper
        strategy._ddp_comm_wrapper = wrap if inner is None else partial(_wrap_twice, inner, wrap)


def _wrap_twice(inner: Callable[..., Any], outer: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    # A function at module level, unlike a lambda, can be pickled with its strategy.
    return outer(inner(hook))

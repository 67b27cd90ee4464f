"""Private names of the Trainer's training loops; see `lightning_commopt.compat`.

The names are the same in ``lightning`` and ``pytorch_lightning``; this module imports neither. It reads or sets
``max_batches``, ``_combined_loader`` and ``_data_fetcher`` of the fit loop, ``_mode`` of a combined loader, ``length``
of a data fetcher, and ``val_check_batch`` of the Trainer. `LoopEvents` wraps ``setup_data``, ``run`` and ``on_run_end``
of the fit loop, ``advance``, ``on_advance_end`` and ``run`` of its epoch loop, and ``on_run_start`` of ``val_loop``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_commopt.compat.wrapping import wrap_method

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def _ignore(*_: object) -> None:
    """Stands for a callback that was not given."""


class LoopEvents:
    """Calls back where Lightning has no hook for strategies, until `close`.

    Args:
        trainer: a Trainer that is about to fit.
        on_data: called on all ranks whenever the training dataloaders have been set up.
        on_epoch_start: called before the first batch of an epoch.
        on_next_batch: called before the next batch is fetched.
        on_epoch_end: called after the last batch of an epoch, before a validation, and again when the loop over the
            batches has ended without an exception.
        on_validation: called when a validation begins, before the hooks ``on_validation_start``.
        on_end: called when training has ended without an exception, before the hooks ``on_train_end``, and again when
            the fit loop has.
        on_error: called with an exception that leaves the fit loop, before Lightning and its callbacks see it.
        resizes: whether ``on_data`` may change the number of batches, with which ``val_check_interval`` is compared.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        on_data: Callable[[], None] = _ignore,
        on_epoch_start: Callable[[], None] = _ignore,
        on_next_batch: Callable[[], None] = _ignore,
        on_epoch_end: Callable[[], None] = _ignore,
        on_validation: Callable[[], None] = _ignore,
        on_end: Callable[[], None] = _ignore,
        on_error: Callable[[BaseException], None] = _ignore,
        resizes: bool = False,
    ) -> None:
        loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

        def setup_data(inner: Callable[..., None], *args: Any) -> None:
            before = loop._data_fetcher, loop._combined_loader
            with _unchecked_interval(trainer) if resizes else nullcontext():
                inner(*args)
            if loop._combined_loader is not None and (loop._data_fetcher, loop._combined_loader) != before:
                on_data()
                if resizes:
                    _check_interval(trainer)

        def run_fit(inner: Callable[..., None], *args: Any) -> None:
            try:
                inner(*args)
                on_end()  # a fit that resumes at its end trains nothing, and has no `on_run_end`
            except BaseException as error:
                on_error(error)
                raise

        def on_run_end(inner: Callable[..., None], *args: Any) -> None:
            on_end()
            inner(*args)

        def run_epoch(inner: Callable[..., None], *args: Any) -> None:
            on_epoch_start()
            inner(*args)
            on_epoch_end()

        def advance(inner: Callable[..., None], *args: Any) -> None:
            on_next_batch()
            inner(*args)

        def on_advance_end(inner: Callable[..., None], *args: Any) -> None:
            if epoch_loop.done:
                on_epoch_end()
            inner(*args)

        def on_run_start(inner: Callable[..., None], *args: Any) -> None:
            on_validation()
            inner(*args)

        self._undo = [
            wrap_method(loop, "setup_data", setup_data),
            wrap_method(loop, "run", run_fit),
            wrap_method(loop, "on_run_end", on_run_end),
            wrap_method(epoch_loop, "run", run_epoch),
            wrap_method(epoch_loop, "advance", advance),
            wrap_method(epoch_loop, "on_advance_end", on_advance_end),
            wrap_method(epoch_loop.val_loop, "on_run_start", on_run_start),
        ]

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


@contextmanager
def _unchecked_interval(trainer: Trainer) -> Generator[None, None, None]:
    """Keeps Lightning from comparing ``val_check_interval`` with this rank's number of batches: see `_check_interval`.

    Lightning's error would end only the ranks with fewer batches.
    """
    every_n_epochs, trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch, None
    try:
        yield
    finally:
        trainer.check_val_every_n_epoch = every_n_epochs


def _check_interval(trainer: Trainer) -> None:
    """Raises a ValueError where Lightning would, once all ranks have the same number of batches."""
    interval = getattr(trainer, "val_check_interval", None)  # a Trainer has none if it is a time
    number = trainer.fit_loop.max_batches
    is_checked = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
    if is_checked and isinstance(interval, int) and 0 < number < interval:
        raise ValueError(
            f"val_check_interval={interval} must be at most the number of training batches, which uneven_batches has"
            f" made {number} on all ranks. Trainer(check_val_every_n_epoch=None) counts the batches of all epochs, and"
            " limit_val_batches=0 switches validation off."
        )


def num_batches(trainer: Trainer) -> int | None:
    """Returns the number of batches in an epoch of training on this rank, with all limits; None if unknown."""
    number = trainer.fit_loop.max_batches
    return None if math.isinf(number) else int(number)


def most_batches_of_epoch(trainer: Trainer) -> float:
    """Returns the largest number of batches of the next epoch before ``max_steps`` ends the fit; infinity if unknown.

    Where a resumed fit goes on within an epoch, the batches from before the checkpoint count.
    """
    if trainer.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
        return math.inf
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress
    num_before = batches.current.ready if loop.restarting and not batches.is_last_batch else 0
    return float(num_before + (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)


def num_begun(trainer: Trainer) -> int:
    """Returns the number of batches of this epoch that this rank has begun."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def num_completed(trainer: Trainer) -> int:
    """Returns the number of batches of this epoch that this rank has completed."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)


def is_last_epoch(trainer: Trainer) -> bool:
    """Returns whether ``max_epochs`` or ``max_steps`` ends the fit with this epoch; only valid after its last batch."""
    has_all_epochs = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
    return has_all_epochs or 0 <= trainer.max_steps <= trainer.global_step


def may_end_now(trainer: Trainer) -> bool:
    """Returns whether the fit may end with the batch that this rank has begun last, or has ended with it."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step + 1
    return (batches.is_last_batch and is_last_epoch(trainer)) or has_all_steps or trainer.should_stop


def batch_is_open(trainer: Trainer) -> bool:
    """Returns whether a batch of training has begun and not ended."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current  # Lightning annotates a base class of it
    return bool(batches.started > batches.processed)


def limit_batches(trainer: Trainer, number: int) -> None:
    """Ends the epochs of this rank after ``number`` batches, which must not exceed `num_batches`."""
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    assert loader.limits is not None
    # The list is changed in place because the iterator of this epoch holds it too.
    loader.limits[:] = [min(limit, number) for limit in loader.limits]
    _set_length(trainer, number)


def repeat_batches(trainer: Trainer, number: int) -> None:
    """Makes this rank repeat its batches until there are ``number``, which must exceed `num_batches`."""
    loop = trainer.fit_loop
    loader = loop._combined_loader
    assert loader is not None
    assert loader.limits is not None
    assert loop._data_fetcher is not None
    own = [min(_length(part), limit) for part, limit in zip(loader.flattened, loader.limits, strict=True)]
    # Only in this mode the shortest loader ends the epoch. In all others the longest does, and Lightning repeats the
    # shorter ones or continues without them.
    needs_all = loader._mode == "min_size"
    loader.flattened = [
        RepeatedLoader(part, int(num_own), number) if num_own < number and (needs_all or num_own == max(own)) else part
        for part, num_own in zip(loader.flattened, own, strict=True)
    ]
    loader.limits[:] = [max(limit, number) for limit in loader.limits]
    # Lightning has already begun to iterate over the loaders that were replaced here, so it has to begin again.
    iter(loop._data_fetcher)
    _set_length(trainer, number)


def restore_loaders(trainer: Trainer) -> None:
    """Undoes `repeat_batches` in a combined loader, which the user may have made and use again."""
    loader = trainer.fit_loop._combined_loader
    if loader is not None:
        loader.flattened = [part.loader if isinstance(part, RepeatedLoader) else part for part in loader.flattened]


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a loader without a length raises one of these
        return math.inf


def _set_length(trainer: Trainer, number: int) -> None:
    """Sets the number of batches, and the numbers that Lightning has derived from it."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    trainer.fit_loop.max_batches = fetcher.length = number
    interval = getattr(trainer, "val_check_interval", None)  # see `_check_interval`
    if isinstance(interval, float):
        trainer.val_check_batch = max(1, int(number * interval))


class RepeatedLoader:
    """A dataloader that repeats its ``num_own`` batches until there are ``number``."""

    def __init__(self, loader: Any, num_own: int, number: int) -> None:
        self.loader, self._num_own, self._number = loader, num_own, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
        missing = self._number
        while missing:
            before = missing
            for batch in islice(self.loader, min(self._num_own, missing)):
                missing -= 1
                yield batch
            # A loader that has nothing to give must not be asked forever.
            if missing == before:
                return

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning ends the workers of a loader's iterator and then removes it by setting this attribute.
        if name == "_iterator":
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

"""NVTX ranges of batches, of their parts, and of every bucket's gradient sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import nvtx  # type: ignore[import-untyped]
from nvtx.colors import color_to_hex  # type: ignore[import-untyped]

from lightning_commopt.callbacks.phases import PhaseCallback, batch_follows
from lightning_commopt.compat.lightning import Callback
from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.measure.observer import END, START, BucketInfo, BucketSync, SyncObserver
from lightning_commopt.sync.ddp.observed import observe, stop_observing

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_NAMES = ("blue", "cyan", "darkgreen", "green", "orange", "purple", "rapids", "red", "white", "yellow")
COLORS = {name: color_to_hex(name) for name in _NAMES}
"""Names of colors that nvtx knows, and their ARGB values."""

RANGES = {
    "Batch": "blue",
    "get batch": "purple",
    "forward": "green",
    "backward": "red",
    "optimizer step": "yellow",
    "validation": "cyan",
    "checkpoint": "white",
    "bucket": "orange",
}
"""The ranges and their default colors."""

_RANGE_OF_PHASE = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step", "other": None}


class NVTXRanges(PhaseCallback):
    """Marks the parts of a fit with NVTX ranges, for Nsight Systems and other tools.

    ``Batch 0`` contains ``get batch``, ``forward``, ``backward`` and ``optimizer step``, if there is one. Batches are
    counted over all epochs; other callbacks at the end of a batch are outside of it. ``validation`` and ``checkpoint``
    are between batches. ``bucket 0`` is one bucket's gradient sync, from leaving the queue to its average, with the
    size of its gradients in bytes as payload; it is not nested, as it may end on another thread.

    All ranges are times of the host. ``backward`` ends when the autograd engine has returned, after DDP's wait for
    communication: with gloo that has ended, while with NCCL the host only enqueues it and the device is behind. Tools
    project a range onto the device by the kernels that the range's own thread launched. Those of backward are launched
    by a thread of autograd, so ``backward`` has no projection; use ``nsys profile --pytorch=autograd-nvtx`` for that.

    Without a profiler this callback does nothing, and does not observe gradient sync. With one, it moves itself to the
    front of the Trainer's callbacks for the fit, and wraps ``trainer.save_checkpoint``; and nvtx keeps the names of all
    batches in memory.

    Args:
        domain: the NVTX domain of the ranges.
        colors: colors of some ranges, by their names in `RANGES`: a name in `COLORS`, or an ARGB integer.

    Raises:
        ValueError: ``domain`` is not a string, or a range or a color is unknown.
    """

    def __init__(self, *, domain: str = "lightning_commopt", colors: Mapping[str, str | int] | None = None) -> None:
        if not isinstance(domain, str) or not domain:
            raise ValueError(f"domain must be a non-empty string, got {domain!r}")
        self._domain_name = domain
        self._colors = {**{name: COLORS[color] for name, color in RANGES.items()}, **_check_colors(colors)}
        self._domain: Any = None  # set while a profiler watches a fit
        self._attributes: dict[str, Any] = {}
        self._depth = 0  # number of open ranges, which are nested, all on one thread
        self._bucket_ranges: SyncRanges | None = None
        self._batch_opener: _BatchOpener | None = None
        self._unwrap_save: Callable[[], None] | None = None
        self._index = 0  # this callback's index among the Trainer's callbacks, which `_close` restores
        self._batch_depth = 0
        self._is_in_batch = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)
        self._domain = _profiled_domain(self._domain_name) if stage == "fit" else None
        if self._domain is None:
            return
        self._attributes = {
            name: self._domain.get_event_attributes(name, color) for name, color in self._colors.items()
        }
        self._bucket_ranges = SyncRanges(self._domain, self._colors["bucket"])
        observe(trainer.strategy, self._bucket_ranges)
        # A callback that starts or stops a profiler must not cut a range in two. So all other callbacks run outside of
        # a batch's range: this one becomes the first, and the one that opens the next batch's range becomes the last.
        self._batch_opener = _BatchOpener(self._open_batch)
        others = [callback for callback in _callbacks(trainer) if callback is not self]
        self._index = _callbacks(trainer).index(self)
        trainer.callbacks = [self, *others, self._batch_opener]  # type: ignore[attr-defined]
        # No callback hook covers the writing of a checkpoint, and none runs for a checkpoint with weights only.
        self._unwrap_save = wrap_method(trainer, "save_checkpoint", self._save_in_range)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._close(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._push("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pop_to(0)
        super().on_validation_end(trainer, pl_module)

    def _enter(self, phase: str | None) -> None:
        if self._domain is None:
            return
        if phase is None or phase == "data":
            self._pop_to(0)
            self._batch_depth = 0
            self._is_in_batch = False
        elif self._is_in_batch:
            self._pop_to(self._batch_depth)
            name = _RANGE_OF_PHASE[phase]
            if name is not None:
                self._push(name)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._is_in_batch = True
        if self._batch_depth == 0:  # no hook runs before a resumed fit waits for its first batch
            self._push_batch(trainer.fit_loop.total_batch_idx)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _open_batch(self, trainer: Trainer) -> None:
        self._push_batch(trainer.fit_loop.total_batch_idx + 1)
        self._push("get batch")

    def _push_batch(self, index: int) -> None:
        self._push("Batch", index)
        self._batch_depth = self._depth

    def _save_in_range(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        depth = self._depth
        self._push("checkpoint")
        try:
            save(*args, **kwargs)
        finally:
            self._pop_to(depth)

    def _push(self, name: str, number: int | None = None) -> None:
        """Opens a range inside the open ones. With a number it has a new name, and nvtx keeps every name in memory."""
        if self._domain is None:
            return
        attributes = self._attributes[name]
        if number is not None:
            attributes = self._domain.get_event_attributes(f"{name} {number}", self._colors[name])
        self._domain.push_range(attributes)
        self._depth += 1

    def _pop_to(self, depth: int) -> None:
        """Ends the innermost ranges until at most ``depth`` are open."""
        while self._depth > depth:
            self._domain.pop_range()
            self._depth -= 1

    def _close(self, trainer: Trainer) -> None:
        if self._bucket_ranges is None or self._unwrap_save is None:
            return
        stop_observing(trainer.strategy, self._bucket_ranges)
        self._enter(None)
        others = [callback for callback in _callbacks(trainer) if callback not in (self, self._batch_opener)]
        trainer.callbacks = [*others[: self._index], self, *others[self._index :]]  # type: ignore[attr-defined]
        self._unwrap_save()
        self._domain = self._bucket_ranges = self._batch_opener = self._unwrap_save = None


class _BatchOpener(Callback):
    """The last callback of the Trainer, which begins the range of the next batch after all others have run."""

    def __init__(self, open_batch: Callable[[Trainer], None]) -> None:
        self._open_batch = open_batch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open_batch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_follows(trainer):
            self._open_batch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and batch_follows(trainer):
            self._open_batch(trainer)


class SyncRanges(SyncObserver):
    """Creates a range for every bucket's sync, which may begin and end on different threads; the color is ARGB."""

    def __init__(self, domain: Any, color: int) -> None:
        self._domain = domain
        self._color = color
        self._attributes: dict[tuple[str, int], Any] = {}

    def ready(self, bucket: BucketInfo) -> BucketSync:
        """Prepares the range ``bucket <index>``, whose payload is the gradients' size in bytes."""
        return self._range(f"bucket {bucket.index}", bucket.gradient_bytes)

    def exchange(self, fragment: BucketInfo) -> BucketSync:
        """Prepares the range ``exchange <index>`` of a fragment, whose payload is the difference's size in bytes."""
        return self._range(f"exchange {fragment.index}", fragment.gradient_bytes)

    def _range(self, name: str, num_bytes: int) -> BucketSync:
        key = name, num_bytes
        if key not in self._attributes:
            self._attributes[key] = self._domain.get_event_attributes(name, self._color, payload=num_bytes)
        return _SyncRange(self._domain, self._attributes[key])


class _SyncRange(BucketSync):
    def __init__(self, domain: Any, attributes: Any) -> None:
        self._domain, self._attributes = domain, attributes
        self._range_id: int | None = None

    def note(self, event: int, wire_bytes: int = 0) -> None:
        if event == START:
            self._range_id = self._domain.start_range(self._attributes)
        elif event == END:
            self._domain.end_range(self._range_id)


def _profiled_domain(name: str) -> Any:
    """Returns the NVTX domain with a name; None if no profiler is attached."""
    if not nvtx.enabled():
        return None
    domain = nvtx.get_domain(name)
    # Without a profiler nvtx returns a domain that does nothing. Its class is not public, but its attributes are None.
    return domain if domain.get_event_attributes(name) is not None else None


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _check_colors(colors: Mapping[str, str | int] | None) -> dict[str, int]:
    if not isinstance(colors, Mapping | None):
        raise ValueError(f"colors must be a mapping from ranges to colors, or None, got {colors!r}")
    checked = {}
    for name, color in (colors or {}).items():
        if name not in RANGES:
            raise ValueError(f"colors: a range must be one of {', '.join(map(repr, RANGES))}, got {name!r}")
        if isinstance(color, str) and color in COLORS:
            checked[name] = COLORS[color]
        elif isinstance(color, Integral) and not isinstance(color, bool) and 0 <= color <= 0xFFFFFFFF:
            checked[name] = int(color)
        else:
            raise ValueError(
                f"colors: {name!r} must be one of {', '.join(map(repr, COLORS))}, "
                f"or an ARGB integer from 0 to 0xFFFFFFFF, got {color!r}"
            )
    return checked

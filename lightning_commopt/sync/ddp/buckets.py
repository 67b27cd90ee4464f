"""The buckets of DDP and their parameters, and the use of a checkpoint's buckets until DDP has the same ones.

DDP rebuilds its buckets after one iteration, or after two with a static graph, and a checkpoint has states for the
rebuilt buckets. In other buckets the boundaries of blocks and the order of sums differ, so training would not resume
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.torch import bucket_parameters, registered_hooks
from lightning_commopt.compressors import Layout
from lightning_commopt.measure.observer import BucketSync, BucketSyncs
from lightning_commopt.sync.executors import BucketFuture

_MAX_BACKWARDS = 3
"""Number of backwards after which DDP's buckets are final: it rebuilds them in the second one, and with a static graph
in the third."""

Layouts = dict[int, tuple[tuple[str, ...], Layout]]
"""Maps the index of a bucket to the names of its parameters and its layout."""


class BucketOrder:
    """Numbers the buckets in the first backward of a static graph, in which there are ``num_parameters`` gradients.

    There DDP passes index 0 for every bucket to hooks, and marks none as the last one unless there is only one.

    >>> order = BucketOrder(num_parameters=3)
    >>> order.place(0, False, ("a", "b")), order.place(0, False, ("c",))
    ((0, False), (1, True))
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._seen: dict[str, int] = {}

    def place(self, index: int, is_last: bool, names: tuple[str, ...]) -> tuple[int, bool]:
        """Returns the index of the next bucket, and whether it is the last one of its backward."""
        if index or is_last:
            self._seen.clear()
            return index, is_last
        if any(name in self._seen for name in names):  # an earlier backward was interrupted
            self._seen.clear()
        index = len(set(self._seen.values()))
        self._seen.update(dict.fromkeys(names, index))
        is_last = len(self._seen) == self._num_parameters
        if is_last:
            self._seen.clear()
        return index, is_last


def synced_parameters(model: DistributedDataParallel) -> dict[str, Parameter]:
    """Returns the parameters that DDP synchronizes in a model that was just wrapped, by name and in DDP's order."""
    return {name: parameter for name, parameter in known_parameters(model).items() if parameter.requires_grad}


def sparse_parameters(model: DistributedDataParallel) -> list[Parameter]:
    """Returns the parameters of a model that was just wrapped whose gradients are sparse."""
    modules = [module for module in model.module.modules() if getattr(module, "sparse", False)]
    return [x for module in modules for x in module.parameters(recurse=False) if x.requires_grad]


def separate_sparse_gradients(model: DistributedDataParallel) -> list[RemovableHandle]:
    """Gives sparse gradients memory of their own; returns the autograd hooks that do so.

    The values of an embedding's gradient are the memory of its output's gradient. If the output was added to that of
    another module, backward computes this module's gradients from the same memory. DDP divides in place, so without
    these hooks they would be divided twice.
    """
    return [parameter.register_hook(Tensor.clone) for parameter in sparse_parameters(model)]


def known_parameters(model: DistributedDataParallel) -> dict[str, Parameter]:
    """Returns the parameters, including frozen ones, that DDP was not told to ignore, by name and in DDP's order.

    As in DDP, an ignored parameter is synchronized nevertheless if it also has another name, or if it belongs to the
    root module, since DDP then looks for a name that begins with a dot.
    """
    known = {
        parameter
        for module_name, module in model.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{module_name}.{name}" not in model.parameters_to_ignore
    }
    return {name: parameter for name, parameter in model.module.named_parameters() if parameter in known}


def gradient_bytes(model: DistributedDataParallel) -> int:
    """Returns the size of all gradients that one backward synchronizes."""
    return sum(parameter.nbytes for parameter in synced_parameters(model).values())


def bucket_names(model: object) -> dict[int, list[str]]:
    """Returns the names of the parameters in each bucket of a DDP without a hook; keys count the all-reduces.

    It is empty for other models, and until DDP has rebuilt its buckets. Must be called between two batches.
    """
    if not isinstance(model, DistributedDataParallel) or registered_hooks(model):
        return {}
    names = list(synced_parameters(model))
    return {index: [names[i] for i in indices] for index, indices in enumerate(bucket_parameters(model))}


@dataclass(frozen=True)
class Bucket:
    """One bucket of DDP or of a checkpoint in one gradient sync.

    Attributes:
        index: number of the bucket in the backward, from 0.
        flat: ``(n,)`` its gradients, which are replaced by their average.
        layout: where each gradient is in ``flat``.
        names: names of its parameters, in order.
        step: number of the gradient sync, from 0.
        sync: notifies observers.
    """

    index: int
    flat: Tensor
    layout: Layout
    names: tuple[str, ...]
    step: int
    sync: BucketSync

    @property
    def is_compressible(self) -> bool:
        return not self.flat.is_sparse and self.flat.is_floating_point() and self.flat.numel() > 0

    def parts(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.layout.split(self.flat), strict=True))


class Relayout:
    """Holds back DDP's buckets until the last one is ready, to synchronize the gradients in the ``saved`` buckets."""

    def __init__(self, saved: Layouts) -> None:
        self._saved = dict(sorted(saved.items()))
        self._held: list[tuple[Bucket, BucketFuture]] = []
        self._num_backwards = 0

    def hold(self, bucket: Bucket, future: BucketFuture) -> bool:
        """Holds back a bucket if it can be compressed, and returns whether it was held back."""
        if bucket.index == 0:  # an earlier backward may have been interrupted
            self._held = []
        if bucket.is_compressible:
            self._held.append((bucket, future))
        return bucket.is_compressible

    def end_backward(self) -> HeldBuckets:
        """Returns the buckets that were held back in this backward."""
        held, self._held = self._held, []
        layouts = {bucket.index: (bucket.names, bucket.layout) for bucket, _ in held}
        has_saved = _gradients(layouts) == _gradients(self._saved)
        is_over = not has_saved or layouts == self._saved
        self._num_backwards = _MAX_BACKWARDS if is_over else self._num_backwards + 1
        return HeldBuckets([x for x, _ in held], [x for _, x in held], self._saved if has_saved else {})

    @property
    def is_unused(self) -> bool:
        return self._num_backwards == 0

    @property
    def is_over(self) -> bool:
        """Whether DDP has the checkpoint's buckets, or will never have them."""
        return self._num_backwards >= _MAX_BACKWARDS


@dataclass(frozen=True)
class HeldBuckets:
    """DDP's buckets of one backward.

    Attributes:
        buckets: the buckets.
        futures: their futures, in the same order.
        saved: the checkpoint's buckets for the same gradients; empty if the gradients differ.
    """

    buckets: list[Bucket]
    futures: list[BucketFuture]
    saved: Layouts

    def laid_out_as_saved(self) -> Iterator[Bucket]:
        """Yields the checkpoint's buckets; each is copied back into DDP's when the next one is requested."""
        gradients = {name: part for bucket in self.buckets for name, part in bucket.parts().items()}
        for index, (names, layout) in self.saved.items():
            bucket = replace(
                self.buckets[0],
                index=index,
                flat=torch.empty(layout.numel, dtype=layout.dtype, device=self.buckets[0].flat.device),
                layout=layout,
                names=names,
                sync=BucketSyncs([]),
            )
            for name, part in bucket.parts().items():
                part.copy_(gradients[name])
            yield bucket
            for name, part in bucket.parts().items():
                gradients[name].copy_(part)


def _gradients(layouts: Layouts) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns name, shape and dtype of each gradient, sorted by name."""
    return sorted(
        (name, tuple(shape), str(layout.dtype))
        for names, layout in layouts.values()
        for name, shape in zip(names, layout.shapes, strict=True)
    )

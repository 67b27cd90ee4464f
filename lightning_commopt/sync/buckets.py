"""Which parameters DDP synchronizes, and in which bucket."""

from __future__ import annotations

from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.torch import bucket_parameters, registered_hooks


class BucketOrder:
    """Counts buckets where DDP does not: in the first backward of a static graph.

    DDP calls all of them number 0 then and, unless there is one only, none the last.

    Args:
        num_parameters: whose gradients one backward synchronizes.

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
        if any(name in self._seen for name in names):  # an earlier backward has broken off
            self._seen.clear()
        index = len(set(self._seen.values()))
        self._seen.update(dict.fromkeys(names, index))
        is_last = len(self._seen) == self._num_parameters
        if is_last:
            self._seen.clear()
        return index, is_last


def synced_parameters(model: DistributedDataParallel) -> set[Parameter]:
    """Returns the parameters whose gradients DDP synchronizes; for a model that was just wrapped.

    Like DDP: an ignored parameter is synchronized if it has another name as well, and so is one of the root module,
    whose name begins with a dot for DDP.
    """
    return {
        parameter
        for of_module, module in model.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and f"{of_module}.{name}" not in model.parameters_to_ignore
    }


def gradient_bytes(model: DistributedDataParallel) -> int:
    """Returns the size of all gradients that one backward synchronizes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in synced_parameters(model))


def bucket_names(model: object) -> dict[int, list[str]]:
    """Returns the names of the parameters in each bucket of a DDP without a hook, in the order of their all-reduces.

    Empty for another model, before DDP has rebuilt its buckets, and where it never does. Between two batches only.
    """
    if not isinstance(model, DistributedDataParallel) or registered_hooks(model):
        return {}
    synced = synced_parameters(model)
    names = [name for name, parameter in model.module.named_parameters() if parameter in synced]
    return {index: [names[place] for place in places] for index, places in enumerate(bucket_parameters(model))}

"""ChangedParameters: a rank whose model has changed waits for the others and detects those that continue without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.sync.store import poll
from lightning_commopt.text.formatting import list_some

Place = tuple[int, int]
"""Number of the epoch in this fit, from 1, and number of batches that a rank has begun in it. It is the same on all
ranks for the same batch."""


class ChangedParameters:
    """Makes ranks change the set of synchronized parameters only together.

    They agree through the store, since a collective would hang. Ranks whose parameters have not changed send nothing
    and wait for nothing. While a rank waits, it calls ``check_peers``, which raises if a rank has failed.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout_s: float, check_peers: Callable[[], None]
    ) -> None:
        self._store = dist.PrefixStore("changed", store)
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._check_peers = check_peers
        self._last: Place = (0, 0)

    def agree(self, place: Place, names: Sequence[str]) -> None:
        """Returns once the parameters with these names have changed on all ranks before the same batch, at ``place``.

        Raises:
            MisconfigurationException: other parameters, or none, have changed on another rank.
        """
        store, key, own = self._store, _key(place), json.dumps([self._rank, *names])
        if self._rank == 0:  # all ranks have changed together since, and read these keys no more
            for name in ("first", "come"):
                store.delete_key(f"{_key(self._last)}/{name}")
        self._last = place
        first_rank, *first_names = json.loads(store.compare_set(f"{key}/first", "", own))
        if first_names != [*names]:
            raise _error(names, f"{_shown(first_names)} on rank {first_rank}")
        if first_rank == self._rank:
            store.set("waits", json.dumps(place))
        store.add(f"{key}/come", 1)
        if not poll(lambda: self._have_all_arrived(key, names), self._timeout_s):
            raise _error(names, f"on another rank nothing within {self._timeout_s:g} s")

    def notify_waiting_ranks(self, place: Place, is_in_batch: bool) -> None:
        """Notifies ranks that wait in `agree` if this rank, whose parameters did not change, is past their place.

        Args:
            place: of the batch that this rank has begun last, or is about to begin.
            is_in_batch: whether that batch has begun, so that parameters can no longer change before it.
        """
        if not self._store.check(["waits"]):
            return
        epoch, number = json.loads(self._store.get("waits"))
        waits_at = epoch, number
        if waits_at > self._last and (place > waits_at or (place == waits_at and is_in_batch)):
            self._store.set(f"{_key(waits_at)}/passed", str(self._rank))

    def _have_all_arrived(self, key: str, names: Sequence[str]) -> bool:
        self._check_peers()
        if self._store.add(f"{key}/come", 0) >= self._world_size:
            return True
        if self._store.check([f"{key}/passed"]):
            raise _error(names, f"nothing on rank {self._store.get(f'{key}/passed').decode()}")
        return False


def _key(place: Place) -> str:
    return "/".join(map(str, place))


def _shown(names: Sequence[str]) -> str:
    return list_some(names, 8) if names else "others"


def _error(names: Sequence[str], elsewhere: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"Parameters of an optimizer were added, frozen or unfrozen: {_shown(names)} on this rank, but {elsewhere}."
        " Each rank would train a different model: change the same parameters before the same batch on all ranks."
    )

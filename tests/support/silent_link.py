"""Watchers of ranks that are not there."""

from pathlib import Path
from typing import Any

from lightning_commopt.watch.hangs.observation import WatcherSettings
from lightning_commopt.watch.hangs.transport import RankLink
from lightning_commopt.watch.hangs.watcher import Watcher


class SilentLink(RankLink):
    """Sends nothing."""

    def __init__(self) -> None:
        pass

    def send(self, **message: Any) -> None:
        pass


class FakeRank:
    """Takes the place of an `Observation`, with a ``snapshot`` of its own."""

    ended: str | None = None
    detail, idle_s, marks = "", 0.0, ()

    def update(self) -> None:
        pass

    def resume(self) -> None:
        pass


def watcher_of(rank: Any, folder: Path, *, number: int = 0, **settings: Any) -> tuple[Watcher, int]:
    """Returns the watcher of a `FakeRank`, and its port."""
    known = {"host": "a", "fit_thread": (1, 1), "after_s": 60.0, "key": "key", "world_size": 2, **settings}
    watcher = Watcher(WatcherSettings(rank=number, folder=str(folder), **known), rank, SilentLink())
    return watcher, watcher.receive({"listen": "127.0.0.1"})["port"]

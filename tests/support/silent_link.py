"""The connection between a watcher and a rank that is not there."""

from typing import Any

from lightning_commopt.watch.hangs.transport import RankLink


class SilentLink(RankLink):
    """Sends nothing."""

    def __init__(self) -> None:
        pass

    def send(self, **message: Any) -> None:
        pass

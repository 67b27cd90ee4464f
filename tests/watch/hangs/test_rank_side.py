"""What a rank tells its watcher of an exception."""

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_commopt.watch.hangs.rank_side import _ending_of


class _Damaged(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise OSError(5, "cannot be read", "images/cat.jpg")


def test_the_error_of_a_worker_is_told_not_that_there_was_one() -> None:
    with pytest.raises(OSError, match="Caught OSError in DataLoader worker") as caught:
        next(iter(DataLoader(_Damaged(), num_workers=1)))
    state, detail = _ending_of(caught.value)
    assert state == "failed"
    assert detail == "OSError: [Errno 5] cannot be read: 'images/cat.jpg' in DataLoader worker process 0"

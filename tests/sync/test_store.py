"""Key spaces of one attempt, in a store that outlives attempts."""

import threading
import time

import pytest
import torch.distributed as dist

from lightning_commopt.sync import store as stores
from lightning_commopt.sync.store import Agreement, fresh_default_store, poll

_LIMIT_S = 60


def _agree(store: dist.Store, world_size: int, *, without: tuple[int, ...] = ()) -> dict[int, Agreement]:
    """Returns the ranks' agreements of one attempt, when nothing moves any more."""
    ranks = {rank: Agreement(store, rank, world_size) for rank in range(world_size) if rank not in without}
    for _ in range(3):
        for each in ranks.values():
            each.advance()
    return ranks


def test_ranks_of_an_attempt_agree_on_a_name_that_no_other_attempt_has() -> None:
    """If it fails, a restarted job reads what ranks of the attempt before have written."""
    store = dist.HashStore()
    attempts = [_agree(store, 3) for _ in range(4)]
    names = [{each.name for each in attempt.values()} for attempt in attempts]
    assert all(len(each) == 1 for each in names)
    assert len(set.union(*names)) == len(attempts)
    assert all(not each.missing for attempt in attempts for each in attempt.values())


def test_a_rank_of_an_earlier_attempt_does_not_count_as_here() -> None:
    """If it fails, rank 0 goes on alone after a restart in which another rank does not come."""
    store = dist.HashStore()
    _agree(store, 3)
    second = _agree(store, 3, without=(2,))
    assert second[0].missing == {2}
    assert second[1].name == second[0].name
    late = Agreement(store, 2, 3)
    for each in (second[0], late, second[0]):
        each.advance()
    assert late.name == second[0].name
    assert not second[0].missing


def test_a_rank_that_comes_before_rank_0_waits_for_its_answer() -> None:
    """If it fails, a rank that is early after a restart takes the name of the attempt before."""
    store = dist.HashStore()
    _agree(store, 2)
    early = Agreement(store, 1, 2)
    assert not early.advance()
    assert early.name is None
    first = Agreement(store, 0, 2)
    first.advance()
    assert early.advance()
    assert early.name == first.name


def test_waiting_for_ranks_ends_and_names_them() -> None:
    """If it fails, a restart that is incomplete waits for ever."""
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"for ranks \[1, 2\] to join"):
        Agreement(store, 0, 3).wait(0.01)
    with pytest.raises(TimeoutError, match="for rank 0 to join"):
        Agreement(store, 1, 3).wait(0.01)


def test_the_default_store_is_left_alone_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, jobs that torchrun has not started make their group in another way than Lightning does."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = dist.init_process_group
    with fresh_default_store():
        assert dist.init_process_group is before
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with fresh_default_store():
        assert dist.init_process_group is not before
    assert dist.init_process_group is before


def test_a_store_of_an_agent_serves_attempt_after_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, gloo meets addresses of processes that are gone. One rank is enough to see where keys go."""
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
    }.items():
        monkeypatch.setenv(name, value)
    inner, made = dist.init_process_group, []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: made.append(kwargs))
    for _ in range(2):
        with fresh_default_store():
            dist.init_process_group("gloo", rank=0, world_size=1)
        made[-1]["store"].set("address", "")
        assert not agent.check(["address"])
    assert inner is not dist.init_process_group
    second = made[1]["store"]
    second.delete_key("address")
    assert made[0]["store"].check(["address"])
    assert not second.check(["address"])


def test_polling_lets_other_threads_use_the_store() -> None:
    """If it fails, a rank that waits blocks the thread that watches it, as both have one client."""
    store, looks = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), list[bool]()
    other = threading.Thread(target=store.set, args=("key", ""))

    def has_key() -> bool:
        looks.append(store.check(["key"]))
        if len(looks) == 2:
            other.start()
        return looks[-1]

    assert poll(has_key, _LIMIT_S)
    other.join()
    assert looks == [False] * (len(looks) - 1) + [True]
    assert len(looks) > 2
    assert not poll(lambda: False, 2 * stores._FIRST_POLL_S)


def test_a_pause_of_the_job_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ranks that a scheduler has suspended take each other for dead when they go on."""
    monkeypatch.setattr(stores, "MAX_POLL_GAP_S", 0.01)
    looks = iter((lambda: time.sleep(0.3), lambda: None, lambda: True))
    assert poll(lambda: bool(next(looks)()), 0.1)

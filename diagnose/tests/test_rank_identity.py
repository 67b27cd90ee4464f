"""Each process knows which rank it is, and where all meet, without a message."""

from __future__ import annotations

import socket

import pytest

from commopt_diagnose.rank_identity import expand_node_list, find_rank_identity
from support.known import known

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "a", "MASTER_PORT": "7"}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08],big",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "gpu08",
}


def test_alone() -> None:
    """If it fails, commopt doctor waits on one host for others that nobody started."""
    batch = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID")} | {"SLURM_NTASKS": "8"}
    for environment in ({}, {"RANK": ""}, batch, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}):
        assert find_rank_identity(environment=environment) is None


def test_of_torchrun() -> None:
    """If it fails, ranks of torchrun do not meet, or open the agent's port once more."""
    identity = known(find_rank_identity(environment=TORCHRUN))
    assert (identity.rank, identity.world_size, identity.local_rank, identity.ranks_per_node) == (5, 8, 1, 4)
    assert (identity.address, identity.port, identity.hosts_store, identity.label(2)) == ("a", 7, False, "rank 2")
    first = {**TORCHRUN, "RANK": "0"}
    for environment, hosts_store in ((first, True), ({**first, "TORCHELASTIC_USE_AGENT_STORE": "True"}, False)):
        identity = known(find_rank_identity(environment=environment))
        assert identity.hosts_store is hosts_store


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing(name: str) -> None:
    """If it fails, a launch by hand with a variable forgotten ends in a traceback."""
    with pytest.raises(ValueError, match=f"RANK is set, so {name} must be"):
        find_rank_identity(environment={**TORCHRUN, name: ""})


def test_of_slurm() -> None:
    """If it fails, srun commopt doctor needs variables that SLURM does not set."""
    identity = known(find_rank_identity(environment=SLURM))
    assert (identity.rank, identity.world_size, identity.local_rank, identity.ranks_per_node) == (3, 5, 1, 2)
    assert (identity.host, identity.address, identity.hosts_store) == ("gpu08", "gpu07", False)
    assert [identity.label(rank) for rank in (1, 2, 4)] == ["rank 1 of gpu07", "rank 2 of gpu08", "rank 4 of big"]
    ports = set()
    for job, step in (("1234", "3"), ("1234", "4"), ("1235", "3")):
        for rank in ("0", "4"):
            of_step = {**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": rank}
            other = known(find_rank_identity(environment=of_step))
            assert 20_000 <= other.port < 30_000
            ports.add((job, step, other.port))
    assert len(ports) == len({port for *_, port in ports}) == 3, "one for each step, whatever the rank"
    assert known(find_rank_identity(environment={**SLURM, "SLURM_DISTRIBUTION": "cyclic"})).label(1) == "rank 1"
    own = known(find_rank_identity(environment={**SLURM, "MASTER_PORT": "77", "MASTER_ADDR": "login"}))
    assert (own.address, own.port) == ("login", 77)


OPEN_MPI = dict(zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "5824", strict=True))
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, {**SLURM, **OPEN_MPI}])
def test_of_mpirun(environment: dict[str, str]) -> None:
    """If it fails, each rank of mpirun reports on its own, or takes the number of SLURM's daemon for its own."""
    identity = known(find_rank_identity(environment={**environment, "MASTER_ADDR": "a"}))
    assert (identity.rank, identity.world_size, identity.local_rank, identity.ranks_per_node) == (5, 8, 2, 4)
    assert (identity.address, identity.port, identity.hosts_store) == ("a", 29511, False)
    with pytest.raises(ValueError, match="mpirun started 8 ranks on several hosts, and does not tell them where"):
        find_rank_identity(environment=environment)
    on_one_host = {name: value.replace("4", "8") for name, value in environment.items()}
    assert known(find_rank_identity(environment=on_one_host)).address == "localhost"
    alone = {name: "1" if value == "8" else value for name, value in environment.items()}
    assert find_rank_identity(environment=alone) is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("r[1-2]n[08-10]", [f"r{rack}n{node}" for rack in (1, 2) for node in ("08", "09", "10")]),
    ],
)
def test_lists_of_slurm(text: str, hosts: list[str]) -> None:
    """If it fails, ranks look for a host that is not there."""
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a[x]", "a[1--2]"])
def test_what_is_no_list_of_slurm(text: str) -> None:
    """If it fails, a broken list ends in a traceback."""
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST"):
        expand_node_list(text)


def test_of_a_list() -> None:
    """If it fails, a host does not find itself, by name or by address, or meets elsewhere than the others."""
    name = socket.gethostname()
    identity = known(find_rank_identity(f"no-such-host.invalid, {name}", environment={}))
    assert (identity.rank, identity.world_size, identity.host, identity.address) == (1, 2, name, "no-such-host.invalid")
    assert (identity.port, identity.hosts_store, identity.label(0)) == (29511, False, "no-such-host.invalid")
    identity = known(find_rank_identity("127.0.0.1,198.51.100.1", 77, environment={"RANK": ""}))
    assert (identity.rank, identity.hosts_store, identity.port) == (0, True, 77)


@pytest.mark.parametrize(
    ("hosts", "environment", "words"),
    [
        ("198.51.100.1,198.51.100.2", {}, "is not this host"),
        ("trainer..svc,198.51.100.2", {}, "is not this host"),
        ("127.0.0.1,127.0.0.2", {}, "has this host twice"),
        (f"{socket.gethostname()},127.0.0.1", {}, "has this host twice"),
        ("localhost,127.0.0.1", {}, "every host calls itself localhost"),
        ("127.0.0.1", {}, "two or more different"),
        ("a,,b", {}, "two or more different"),
        ("a,a", {}, "two or more different"),
        ("a,b", TORCHRUN, "torchrun knows its hosts"),
        ("a,b", SLURM, "srun knows its hosts"),
    ],
)
def test_a_wrong_list(hosts: str, environment: dict[str, str], words: str) -> None:
    """If it fails, a wrong list ends in waiting for nobody."""
    with pytest.raises(ValueError, match=words):
        find_rank_identity(hosts, environment=environment)

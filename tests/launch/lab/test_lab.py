"""Hosts that talk, at no more than the rate, and runs that leave nothing behind."""

import json
import os
import subprocess
import sys
import threading

import pytest

from lightning_commopt.launch.lab import LabError, NetLab, RankError, namespaces, parse_rate, why_not
from lightning_commopt.launch.lab import lab as lab_module
from support.cross_section import sampled
from support.lab_traces import SAY_NAMESPACES, are_empty, machine_traces, namespaces_in, processes_in
from support.refusals import one_by_one, refusals

PYTHON = (sys.executable, "-S", "-c")

# Every rank but 0 sends to rank 0, all at once, or the other way around. The clock starts before the first byte can,
# so that a receiver that sleeps sees the rate too low, never too high.
TRANSFER = """
import json, os, socket, sys, threading, time
num_bytes, to_first = int(sys.argv[1]), sys.argv[2] == "to_first"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def send(peer):
    peer.recv(1)
    peer.sendall(bytes(num_bytes))
    peer.recv(1)
def receive(peer):
    peer.sendall(b"g")
    left = num_bytes
    while left:
        left -= len(peer.recv(left))
    peer.sendall(b"d")
start = time.monotonic()
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(size - 1)]
    start = time.monotonic()
    threads = [threading.Thread(target=receive if to_first else send, args=(peer,)) for peer in peers]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
else:
    for attempt in range(600):
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    (send if to_first else receive)(peer)
print(json.dumps(time.monotonic() - start))
"""

LISTEN = """
import os, socket, time
if os.environ["RANK"] == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], 1234))
time.sleep(1)
"""

ALL_REDUCE = """
import os, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
value = torch.full((1000,), 10.0 ** dist.get_rank())
dist.all_reduce(value)
print("SUM", set(value.tolist()))
dist.destroy_process_group()
"""


def _run(**options):
    NetLab(2).run(["true"], **options)


_BAD_RATES = ["1gbi", "1 gbit", "gbit", "-1gbit", "0gbit", "1", "99kbit", "101gbit", "", 1000, True]
REFUSED = [
    *((NetLab, {"num_hosts": 2, "rate": rate}) for rate in _BAD_RATES),
    *one_by_one(NetLab, num_hosts=[0, -1, 255, 2.0, "2", True, None]),
    *one_by_one(_run, ranks_per_host=[0, 1.0], timeout_s=[0, float("inf")]),
]


def test_what_is_refused(golden):
    golden("refused_options", refusals(REFUSED))


@pytest.mark.parametrize(
    ("rate", "bits"), [("100kbit", 10**5), ("0.5mbit", 500_000), ("10gbit", 10**10), ("unlimited", None), (None, None)]
)
def test_rates_are_read(rate, bits):
    assert parse_rate(rate) == bits


def test_ranks_share_no_core_while_one_is_free(monkeypatch, tmp_path):
    """If it fails, two ranks compute on the threads of one core, and a lab shows steps that are too slow."""
    for cpu, siblings in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(lab_module, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})  # of the last one nothing is known
    assert lab_module.list_cores() == [0, 2, 9, 1, 3]


def test_a_lab_that_is_not_open_runs_nothing():
    lab = NetLab(2)
    with pytest.raises(LabError, match="not open"):
        lab.run(["true"])
    with pytest.raises(LabError, match="not open"):
        lab.enter(0)
    with pytest.raises(LabError, match="not open"):
        lab.change_rate("1gbit")


@pytest.fixture(scope="module", name="lab")
def shared_lab(lab_machine):
    """A lab of two hosts that several tests share."""
    with NetLab(2, "1gbit") as opened:
        yield opened


@pytest.mark.usefixtures("lab_machine")
class TestOpenLab:
    """With real namespaces."""

    @pytest.mark.parametrize("num_hosts", [1, 3])
    def test_every_rank_finds_its_place(self, num_hosts):
        code = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"
        with NetLab(num_hosts, "1gbit") as lab:
            outputs = lab.run([*PYTHON, code], ranks_per_host=2, environment={"MASTER_PORT": "1234"}, timeout_s=60)
        for rank, output in enumerate(outputs):
            variables, folder = json.loads(output)
            expected = {
                "RANK": rank,
                "WORLD_SIZE": 2 * num_hosts,
                "LOCAL_RANK": rank % 2,
                "LOCAL_WORLD_SIZE": 2,
                "NODE_RANK": rank // 2,
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": 1234,
                "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_SOCKET_IFNAME": "eth0",
            }
            assert {name: variables[name] for name in expected} == {k: str(v) for k, v in expected.items()}
            assert variables["PATH"] == os.environ["PATH"]
            assert folder == os.getcwd()

    def test_hosts_have_two_devices_that_are_up(self, lab):
        for host, output in enumerate(lab.run(["ip", "-o", "-4", "address", "show", "up"], timeout_s=60)):
            addresses = {line.split()[1]: line.split()[3] for line in output.splitlines()}
            assert addresses == {"lo": "127.0.0.1/8", "eth0": f"10.0.0.{host + 1}/24"}

    def test_without_a_rate_nothing_limits(self):
        with NetLab(2, "unlimited") as lab:
            assert not any("htb" in output for output in lab.run(["tc", "qdisc", "show", "dev", "eth0"], timeout_s=60))

    @pytest.mark.parametrize(
        ("num_hosts", "direction", "num_bytes", "megabits_per_s"),
        [(2, "from_first", 2_000_000, 100), (3, "to_first", 2_000_000, 100), (2, "from_first", 60_000, 10)],
    )
    def test_a_transfer_takes_what_the_rate_allows(self, num_hosts, direction, num_bytes, megabits_per_s):
        """If it fails, headline figures are of another network than they say."""
        bytes_per_s = megabits_per_s * 1e6 / 8
        burst_bytes = max(2**14, 0.002 * bytes_per_s) + max(2 * 1514, 0.001 * bytes_per_s)
        with NetLab(num_hosts, f"{megabits_per_s}mbit") as lab:
            outputs = lab.run([*PYTHON, TRANSFER, str(num_bytes), direction], timeout_s=120)
        # Rank 0's link carries all, so the limit holds for the sum, whichever way it goes.
        through_first = (num_hosts - 1) * num_bytes
        least_s = (through_first - burst_bytes) / bytes_per_s
        assert least_s < json.loads(outputs[0]) < 20 * least_s

    @pytest.mark.parametrize("num_hosts", sampled([2, 3], by_default=[2]))
    def test_a_rate_changes_under_running_ranks(self, num_hosts):
        """If it fails, what a run does on another link is measured on the old one."""
        waits = "echo started; until tc class show dev eth0 | grep -q 'rate 100Mbit'; do sleep 0.1; done"
        started = []

        def change(rank, output):
            started.append(rank)
            if len(started) == num_hosts:
                lab.change_rate("100mbit")

        with NetLab(num_hosts, "1gbit") as lab:
            with pytest.raises(ValueError, match="rate must be a limit such as '1gbit', got 'unlimited'"):
                lab.change_rate("unlimited")
            lab.run(["sh", "-c", waits], timeout_s=60, on_output=change)
            output = lab.run([*PYTHON, TRANSFER, "2000000", "to_first"], timeout_s=120)[0]
        assert json.loads(output) > ((num_hosts - 1) * 2_000_000 - 2**18) / (100e6 / 8)

    @pytest.mark.exhaustive  # four processes import torch
    def test_gloo_sums_over_hosts(self, lab):
        outputs = lab.run([sys.executable, "-c", ALL_REDUCE], ranks_per_host=2, pin_to_cores=True, timeout_s=200)
        assert [output.splitlines()[-1] for output in outputs] == ["SUM {1111.0}"] * 4
        assert not any("hostname" in output for output in outputs), "torch warns of addresses without a name"

    def test_pinned_ranks_have_one_core_and_one_thread(self, lab):
        code = "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
        cores = lab_module.list_cores()
        outputs = lab.run([*PYTHON, code], ranks_per_host=2, pin_to_cores=True, timeout_s=60)
        assert outputs == [f"{{{cores[rank % len(cores)]}}} 1\n" for rank in range(4)]

    def test_output_comes_as_it_is_reported(self, lab):
        parts: list[tuple[int, bytes]] = []
        outputs = lab.run(["sh", "-c", "echo $RANK; echo error >&2"], on_output=lambda *part: parts.append(part))
        assert outputs == ["0\nerror\n", "1\nerror\n"]
        assert [b"".join(part for of, part in parts if of == rank).decode() for rank in range(2)] == outputs

    def test_a_failing_rank_raises_and_leaves_nothing(self):
        before = machine_traces()
        code = f"{SAY_NAMESPACES}; if [ $RANK = 1 ]; then sleep 1; echo it broke; exit 3; fi; sleep 600"
        with NetLab(2) as lab:
            with pytest.raises(RankError, match=r"(?s)rank 1 ended with status 3; .*it broke") as caught:
                lab.run(["sh", "-c", code], ranks_per_host=2, timeout_s=60)
            spaces = namespaces_in("".join(caught.value.outputs))
            of_run = {name for name in spaces if name.startswith("pid:")}
            assert (caught.value.rank, caught.value.status) == (1, 3)
            assert not processes_in(of_run), "gone as soon as the error is raised"
            assert lab.run(["echo", "still fine"], timeout_s=60) == ["still fine\n"] * 2
        assert are_empty(spaces)
        assert machine_traces() == before

    def test_a_signal_that_ends_a_rank_is_told(self, lab):
        with pytest.raises(RankError, match="rank 0 ended with status -9") as caught:
            lab.run(["sh", "-c", "[ $RANK = 1 ] && sleep 600; kill -KILL $$"], timeout_s=60)
        assert caught.value.status == -9

    @pytest.mark.exhaustive
    def test_time_runs_out(self, lab):
        with pytest.raises(RankError, match=r"rank 1 still ran after 3 s; its last output:\nNAMESPACES") as caught:
            lab.run(["sh", "-c", f"{SAY_NAMESPACES}; [ $RANK = 0 ] || sleep 600"], timeout_s=3)
        assert not processes_in({name for name in namespaces_in(caught.value.outputs[1]) if "pid" in name})
        assert caught.value.status is None

    def test_an_interrupt_ends_everything(self):
        parts: list[str] = []

        def interrupt(rank, part):
            parts.append(part.decode())
            raise KeyboardInterrupt

        with NetLab(2) as lab, pytest.raises(KeyboardInterrupt):
            lab.run(["sh", "-c", f"{SAY_NAMESPACES}; sleep 600"], on_output=interrupt, timeout_s=60)
        assert are_empty(namespaces_in("".join(parts)))

    def test_what_ranks_leave_behind_is_killed(self, lab):
        outputs = lab.run(["sh", "-c", SAY_NAMESPACES], timeout_s=60)
        assert not processes_in({name for name in namespaces_in(outputs[0]) if name.startswith("pid:")})

    def test_labs_side_by_side_do_not_meet(self):
        """If it fails, two sessions on one machine measure each other."""
        errors: list[BaseException] = []

        def run_one():
            try:
                with NetLab(2, "1gbit") as lab:
                    lab.run([*PYTHON, LISTEN], timeout_s=60)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run_one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not errors

    def test_a_host_is_entered(self, lab):
        """If it fails, what is run beside the ranks is not on their host."""
        said = subprocess.run([*lab.enter(1), "ip", "address"], check=True, capture_output=True, text=True).stdout
        assert "10.0.0.2/24" in said

    def test_a_lab_opens_again(self):
        lab = NetLab(2)
        for _ in range(2):
            with lab:
                assert lab.run(["true"], timeout_s=60) == ["", ""]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lab_machine")
def test_a_user_namespace_does_as_well_as_root(monkeypatch):
    """If it fails, only root has a lab."""
    monkeypatch.setattr(namespaces, "_UNSHARE_OPTIONS", (("--user", "--map-root-user"),))
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with NetLab(3, "100mbit") as lab:
        outputs = lab.run(
            ["sh", "-c", f"{SAY_NAMESPACES}; readlink /proc/self/ns/user"], ranks_per_host=2, timeout_s=60
        )
        assert os.readlink("/proc/self/ns/user") not in "".join(outputs)
        assert json.loads(lab.run([*PYTHON, TRANSFER, "1000000", "to_first"], timeout_s=60)[0]) > 0
    assert are_empty(namespaces_in("".join(outputs)))

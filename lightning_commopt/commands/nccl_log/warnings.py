"""Findings about what NCCL and PyTorch themselves complain of: what each warning means, and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_commopt.commands.nccl_log.events import LoggedWarning, Progress, Timeout
from lightning_commopt.commands.nccl_log.facts import NcclLog
from lightning_commopt.commands.nccl_log.finding import Reason, lines
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import ranks_text


class _Known(NamedTuple):
    code: str
    pattern: re.Pattern[str]
    why: str
    advice: str
    severity: Severity = "error"


def _known(code: str, pattern: str, why: str, advice: str, severity: Severity = "error") -> _Known:
    return _Known(code, re.compile(pattern, re.IGNORECASE), why, advice, severity)


_KNOWN = (
    _known(
        "mismatched_version",
        r"mismatched nccl version",
        "ranks run different versions of NCCL",
        "python -c 'import torch; print(torch.cuda.nccl.version())' on every host; see LD_LIBRARY_PATH, LD_PRELOAD",
    ),
    _known(
        "ib_retry",
        r"got completion.*(status=12|error 12)\b",
        "the peer's NIC did not answer in time (retries exceeded): cable, switch, a dead rank, or congestion of RoCE",
        "perfquery and ibstat on both hosts; on RoCE PFC, ECN and NCCL_IB_GID_INDEX; NCCL_IB_TIMEOUT=22",
    ),
    _known(
        "ib_protection",
        r"got completion.*(status=(4|10)|error (4|10))\b",
        "the NIC may not reach the memory: GPUDirect RDMA is broken, often by PCIe ACS or the IOMMU",
        "NCCL_NET_GDR_LEVEL=LOC as a check; then turn off ACS and the IOMMU, and reload nvidia-peermem",
    ),
    _known(
        "ib_not_receiving",
        r"got completion.*(status=(5|13)|error (5|13))\b",
        "another rank has failed before: its queue is in error, or it did not post a receive",
        "find the first warning of all ranks; this one follows from it",
    ),
    _known(
        "ib_completion",
        r"got completion",
        "an RDMA operation failed",
        "the status is ibv_wc_status of libibverbs; perfquery and ibstat on both hosts",
    ),
    _known(
        "ib_memory_lock",
        r"ibv_reg_mr|ibv_create_cq|ibv_create_qp|cannot allocate memory.*ib",
        "libibverbs may not lock memory",
        "ulimit -l unlimited on every host; in a container --ulimit memlock=-1",
    ),
    _known(
        "ib_link",
        r"async fatal event|port error|link_?down|got async event|gid table changed",
        "a port of a NIC went down or changed",
        "ibstat and dmesg on this host; look at the cable and the switch port",
    ),
    _known(
        "unreachable",
        r"(connect to|call to connect).*(refused|timed out|timeout|no route|unreachable|failed)",
        "a peer cannot be reached: a firewall, the wrong interface, or a process that has ended",
        "NCCL_SOCKET_IFNAME to the interface that hosts share; open TCP ports between them; see the peer's log",
    ),
    _known(
        "peer_gone",
        r"connection (closed|reset)|closed by (remote )?peer|recv from|broken pipe|remote process exited",
        "a peer has ended or the link broke: this rank is not the first that failed",
        "look for the rank whose log ends first, and for an exception or the OOM killer (dmesg) there",
    ),
    _known(
        "wrong_socket",
        r"wrong type|wrong magic|magic mismatch|wrong socket type|message truncated|mismatch in info from procs",
        "something else connected to NCCL's port: another job of that address, a port scan, or ranks that disagree",
        "give each job its own MASTER_PORT and NCCL_COMM_ID; check that all ranks have the same number of processes",
    ),
    _known(
        "same_gpu",
        r"duplicate gpu|multiple ranks are using the same gpu",
        "two ranks use one GPU",
        "set the device from LOCAL_RANK before the first collective; check CUDA_VISIBLE_DEVICES",
    ),
    _known(
        "shared_memory_full",
        r"shared memory|/dev/shm|no space left",
        "/dev/shm is too small: containers have 64 MB of it unless told otherwise",
        "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm",
    ),
    _known(
        "out_of_memory",
        r"out of memory",
        "the GPU had no memory left for NCCL's buffers",
        "leave a GB free at the start, lower NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS; see which process fills the GPU",
    ),
    _known(
        "driver_too_old",
        r"driver version is insufficient|forward compat|unsupported toolchain",
        "the driver is too old for this CUDA",
        "a newer driver, or a build of torch for an older CUDA",
    ),
    _known(
        "cuda_failure",
        r"cuda failure|unhandled cuda error|illegal memory access|xid",
        "CUDA failed on this rank; NCCL is often only where it is noticed",
        "CUDA_LAUNCH_BLOCKING=1 for the place; dmesg | grep -i xid for faults of the hardware",
    ),
    _known(
        "torch_error",
        r"unhandled system error|internal error",
        "PyTorch passes on NCCL's error: a socket, memory or a library failed on this rank, or on one before it",
        "the line below 'Last error:' in the traceback, and the first NCCL WARN of all ranks",
    ),
    _known(
        "wrong_call",
        r"invalid (usage|argument)",
        "NCCL refuses a call: another device than before, two ranks on one GPU, or a tensor that it cannot take",
        "set the device from LOCAL_RANK before the first collective; the NCCL WARN of this rank says more",
    ),
    _known(
        "no_interface",
        r"no (socket interface|usable listening interface|ip interface) found|no interface found|bootstrap : no socket",
        "no interface fits NCCL_SOCKET_IFNAME, or none is up",
        "ip -br addr on this host; NCCL_SOCKET_IFNAME takes prefixes, =name is exact, ^name excludes",
    ),
    _known(
        "no_algorithm",
        r"no algorithm/protocol available",
        "NCCL_ALGO or NCCL_PROTO excludes all that this operation has",
        "unset NCCL_ALGO and NCCL_PROTO, or set them for each operation: NCCL_ALGO=allreduce:tree,ring",
    ),
    _known(
        "nvlink_down",
        r"p2p is disabled between nvlink connected|nvlink.*(error|down|inactive)|fabric.*(not|fail)",
        "GPUs that NVLink joins cannot talk: the fabric manager is not running, or a link is down",
        "systemctl status nvidia-fabricmanager; nvidia-smi nvlink -s; nvidia-smi topo -p2p n",
    ),
    _known(
        "mixed_nics",
        r"mixed local (net|collnet) device counts|incompatible devices",
        "hosts have different NICs, or InfiniBand and RoCE ports are mixed",
        "name the NICs to use in NCCL_IB_HCA, alike on all hosts",
    ),
    _known(
        "no_plugin",
        r"failed to (load|open).*(plugin|libnccl-net)|plugin.*(incompatible|failed)",
        "a plugin does not load",
        "ldd on the plugin's library; NCCL_NET_PLUGIN=none runs without it",
    ),
    _known(
        "bad_setting",
        r"(NCCL_[A-Z0-9_]+).*(invalid|ignor|not a power|out of range|unknown|unrecogni)|invalid (config|value)",
        "a setting has a value that NCCL does not take",
        "correct it or unset it: NCCL goes on with its default",
        "differs",
    ),
    _known(
        "timed_out",
        r"timed? ?out|timeout",
        "something did not answer in time",
        "find the rank that stopped first; its log ends earlier, or it has another warning",
    ),
)


def find_warnings(log: NcclLog) -> Iterator[Finding]:
    """Finds warnings of NCCL, each kind once, with what it means; unknown ones are repeated as they are."""
    groups: dict[str, list[LoggedWarning]] = {}
    known: dict[str, _Known] = {}
    for warning in log.warnings:
        entry = next((each for each in _KNOWN if each.pattern.search(warning.text)), None)
        key = f"unknown: {re.sub(r'[0-9a-fx]{3,}|[0-9]+', '#', warning.text)[:80]}" if entry is None else entry.code
        groups.setdefault(key, []).append(warning)
        if entry is not None:
            known[key] = entry
    for key, warnings in groups.items():
        entry = known.get(key)
        times = f" ({len(warnings)} times)" if len(warnings) > 1 else ""
        yield Finding(
            code="warning" if entry is None else entry.code,
            severity="error" if entry is None else entry.severity,
            what=f"{_who(warnings)}: {warnings[0].text[:200] or 'a warning without text'}{times}",
            why="this warning has no explanation here" if entry is None else entry.why,
            advice="search NCCL's issues for its text" if entry is None else entry.advice,
            evidence=lines(*[each.line for each in warnings[:3]]),
        )


def _who(warnings: list[LoggedWarning]) -> str:
    ranks = [each.rank for each in warnings if each.rank is not None]
    hosts = sorted({each.host for each in warnings if each.host})
    where = f" on {', '.join(hosts[:4])}" if hosts else ""
    return f"{ranks_text(ranks)} warn{'s' if len(set(ranks)) == 1 else ''}{where}" if ranks else f"a warning{where}"


def find_timeouts(log: NcclLog) -> Iterator[Finding]:
    """Finds collectives that PyTorch's watchdog gave up, the rank that is behind, and calls that do not match."""
    groups: dict[str, list[Timeout]] = {}
    for timeout in log.timeouts.values():
        groups.setdefault(timeout.group, []).append(timeout)
    for group, timeouts in groups.items():
        yield _timeout(group, timeouts, log)


def _timeout(group: str, timeouts: list[Timeout], log: NcclLog) -> Finding:
    calls: dict[str, list[int]] = {}
    for each in timeouts:
        number = "" if each.sequence is None else f" {each.sequence}"
        calls.setdefault(f"{each.operation}{number}{f' ({each.sizes})' if each.sizes else ''}", []).append(each.rank)
    reason = _behind(group, log) or _timeout_reason(timeouts, num_calls=len(calls), log=log)
    shown = "; ".join(f"{ranks_text(each)} in {call}" for call, each in calls.items())
    waited = max((each.waited_s for each in timeouts if each.waited_s is not None), default=None)
    after, where = f" after {waited:.0f} s" if waited else "", f" in {group}" if group else ""
    return Finding(
        code="collective_timeout",
        severity="error",
        what=f"a collective timed out{after}{where}: {shown}",
        why=reason.why,
        advice=reason.advice,
        evidence=lines(*[each.line for each in timeouts[:2]], *reason.evidence),
    )


def _behind(group: str, log: NcclLog) -> Reason | None:
    """Returns the reason, where ranks say that they started fewer collectives than others."""
    groups: dict[str, dict[int, Progress]] = {}
    for each in log.progress.values():
        if each.group == group or not (group and each.group):
            groups.setdefault(each.group, {})[each.rank] = each
    for said in groups.values():
        most = max(each.enqueued for each in said.values())
        behind = sorted(rank for rank, each in said.items() if each.enqueued < most)
        if behind:
            break
    else:
        return None
    who, last = ranks_text(behind), said[behind[0]]
    why = f"{who} had not started it: the last collective there is number {last.enqueued}"
    advice = f"see what {who} did instead: data, validation, checkpoint, an exception, or another branch of the code"
    return Reason(why, advice, lines(last.line))


def _timeout_reason(timeouts: list[Timeout], *, num_calls: int, log: NcclLog) -> Reason:
    ranks = {each.rank for each in timeouts}
    silent = sorted(set(range(max((each.num_ranks or 0 for each in log.communicators), default=0))) - ranks)
    if len({each.sequence for each in timeouts}) > 1:
        late = min(timeouts, key=lambda each: (each.sequence is None, each.sequence or 0))
        why = f"ranks wait in different collectives; rank {late.rank} is the furthest behind"
        return Reason(why, "look for a collective that one rank skips or calls twice", lines(late.line))
    if num_calls > 1:
        why = "ranks call the same number with different operations or sizes"
        return Reason(why, "look for code that depends on the rank: logging, conditions, batches of unequal number")
    if len(silent) >= len(ranks) and log.warnings:
        why = "NCCL itself warned, and what it says is likelier the cause than this timeout"
        return Reason(why, "begin with the warnings")
    if silent:
        why = f"{ranks_text(silent)} did not time out: they never came to this collective, or had ended"
        return Reason(why, f"see what {ranks_text(silent)} did instead; py-spy dump --pid PID if they still run")
    why = "all ranks wait in the same collective: the network or a GPU stopped"
    return Reason(why, "dmesg for Xid and link errors; ibstat; run nccl-tests' all_reduce_perf on these hosts")

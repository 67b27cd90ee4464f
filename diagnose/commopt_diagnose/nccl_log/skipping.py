"""Chooses the lines of a log that are worth splitting, by tests that take less time than splitting does."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

INFO = b" NCCL INFO "
"""What stands behind the head of most of NCCL's lines."""

_OF_INTEREST = re.compile(
    rb"atchdog|nqueued|[Ll]ast error:|#\s+Rank\s|\] INFO |:\d+ WARN |^\s*\{\"|(?:CUDA|[Cc]uda|NCCL|HIP) failure[ :]"
    rb"|[NnRr](?:CCL|ccl).?[Vv]ersion|nvidia-nccl-cu|using nccl|nccl\w+ failed:|nccl\w+(?:Error|Usage|Argument): "
    rb"|nccl-library=|dump signal|currently unknown|mismatch between coll|destroy_process_group\(\) was"
    rb"|(?:with exception|what\(\)): +CUDA error|Aborting process due to"
    rb"|acquire GIL|\[rank\d+\]: ?\[E|\[rank\d+\]: [\w.]+(?:Error|Exception)\b"
    rb"|ncclUniqueId|monitoredBarrier|nccl: (?:unhandled|internal|invalid)|Nccl error"
    rb"|^\s*(?:Channel|Ring) \d+.* via |^\s*(?:NET/|Using network )"
    rb"|TCPStore|OOMKilled|Killed process \d|A worker died"
    rb"|oom[-_ ]kill|out of memory|Out Of Memory|low on resource|on signal \d|by signal: |aught signal |Signal \d+ \("
    rb"|[Bb]us error|[Ss]egmentation fault|segfault at|<Signals\.|\*\*\* SIG|exitcode *: -\d|return code = -\d"
    rb"|[Ee]xit [Cc]ode:? +1\d\d|CANCELLED AT|actor died|Xid \(|access fault by|HSA_STATUS_ERROR|may be stuck"
    rb"|CUDA_ERROR_[A-Z_]+: |\] PEER_[A-Z]+: |# Avg bus band|Not all ranks joining|missing ranks: |error msg: Culprit"
    rb"|socket has (?:timed out|failed to listen)|waiting for (?:clients|workers)\."
    rb"|RendezvousTimeout|values : \d|Out of memory while|GetKeyValue\(\) timed|cqe with error"
    rb"|libfabric:\d|libibverbs: W|without libuv|inconsistent 0 params|CUDA capability sm_"
    rb"|died from signal|death signal|got signal: 1|HW Exception by|job killed\b|memory pressure"
    rb"|double free or|(?:free|alloc|_consolidate)\(\): \w|corrupted (?:size vs|double-linked)|munmap_chunk\(\)"
)
# One of these is in each line of interest, and most parts of a training program's output have none.
_WORDS = (
    *(b"atchdog", b"nqueued", b"ast error:", b" Rank ", b"] INFO ", b" WARN ", b'{"', b" failure", b"ccl", b"CCL"),
    *(b"ignal ", b"currently unknown", b"mismatch", b"destroy_process", b"with exception", b"acquire GIL", b"[E"),
    *(b" via ", b"NET/", b"Using network", b"monitoredBarrier", b"may be stuck", b"oom", b"out of memory", b"Xid"),
    *(b"exitcode", b"[rank", b"TCPStore", b"OOMK", b"Killed process", b"r died ", b"*** SIG", b"<Signals.", b"ignal: "),
    *(b"Of Memory", b"low on resource", b"us error", b"egmentation fault", b"segfault", b"return code", b"xit code"),
    *(b"xit Code", b"CANCELLED", b"access fault", b"HSA_STATUS", b"socket has", b"RendezvousT", b"values : "),
    *(b"waiting for clients", b"waiting for workers", b"Out of memory", b"GetKeyValue", b"cqe with error"),
    *(b"double free", b"free(): ", b"alloc(): ", b"consolidate(): ", b"munmap_chunk", b"corrupted "),
    *(b"libfabric:", b"libibverbs: W", b"libuv", b"inconsistent 0 ", b"CUDA capability", b"CUDA_ERROR_", b"] PEER_"),
    *(b"Not all ranks joining", b"missing ranks: ", b"Culprit", b"what(): ", b"# Avg bus", b"Aborting process"),
    *(b"death signal", b"HW Exception", b"job killed", b"memory pressure"),
)
# Beginnings of lines about buffers and the threads of proxies, from which nothing is concluded. With
# NCCL_DEBUG_SUBSYS=ALL they are most of a log.
_DULL = (
    *(b"proxyProgressAsync ", b"ncclPollProxyResponse ", b"recvOpId=", b"resp.opId=", b"Received and initiated op"),
    *(b"New proxy ", b"Connected to proxy ", b"Allocated ", b"Imported shareable ", b"register comm ", b"Mem Realloc"),
)
_MAX_CHOICES = 1 << 13  # different lines of the tuner that are remembered: a program has far fewer sizes of messages


class Block:
    """A part of a log, whose words are looked for at once: that takes a fraction of the time that each line would."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    @cached_property
    def _words(self) -> tuple[bytes, ...]:
        return tuple(word for word in _WORDS if word in self._content)

    def is_of_interest(self, raw: bytes) -> bool:
        """Returns whether one of its lines, without NCCL's usual head, may have something to read."""
        if not any(map(raw.__contains__, self._words)):
            return False
        text = raw.partition(b"frame #")[0]  # a collector of logs may have put a whole error and its stack into a line
        return b"NCCL" in text or _OF_INTEREST.search(text) is not None


@dataclass
class Repeats:
    """Lines that are only counted.

    These are calls of collectives and choices of the tuner, which are most of a large log. The first call of each
    writer is read, as it has the number of ranks, and so is the first choice of each text.
    """

    num_skipped: int = 0
    choices: Counter[bytes] = field(default_factory=Counter)  # how often the tuner's lines came again, by their text
    num_left_out: int = 0  # lines of the tuner behind the first _MAX_CHOICES different ones
    _writers: set[bytes] = field(default_factory=set)

    def skips(self, raw: bytes, place: int) -> bool:
        """Returns whether a line need not be read; `INFO` is at the place."""
        start = place + len(INFO)
        if raw.startswith(_DULL, start) or raw.find(b"lloc Size ", start) >= 0:
            is_known = True
        elif raw.find(b": opCount ", start) >= 0:
            is_known = raw[:place] in self._writers
            self._writers.add(raw[:place])
        elif raw.find(b" Bytes -> ", start) >= 0:
            text = raw[start:]
            is_known = text in self.choices
            if is_known or len(self.choices) < _MAX_CHOICES:
                self.choices[text] += is_known
            else:
                self.num_left_out += 1
                is_known = True
        else:
            return False
        if not is_known or raw.find(b" NCCL ", start - 1) >= 0:
            return False  # the text is new, or another line has been written into this one
        self.num_skipped += 1
        return True

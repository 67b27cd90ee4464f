"""Every timeout and interval of the watches, in seconds, and the order that they need among each other.

Where no measurement is named, a number is a judgement, and its text says what it weighs against what. The orders are
in words at the numbers, and `tests/watch/test_times.py` holds them. All numbers are read as ``times.NAME`` at each use,
so that changing one here changes what runs. The process beside a rank reads this module, too: it imports nothing.
"""

# JoinWatch watches the start, until there is a process group.

JOIN_REPORT_AFTER_S = 20.0
"""A start is reported after this silence. Importing Lightning took 4 to 20 s on one machine, so a shorter silence would
report healthy starts; a longer one leaves a user before an empty terminal. It is above `JOIN_LOOK_S` and two
`JOIN_TRY_S`, so that at least one look is over."""

JOIN_LOOK_S = 1.0
"""A rank pauses so long between two looks at the store, each of which is a few messages to rank 0's host."""

JOIN_ANSWER_S = 0.25
"""The pause is so short while ranks wait for rank 0's answer, before which they cannot write anything. It is below
`JOIN_LOOK_S`."""

JOIN_TRY_S = 3.0
"""One connection to the store may take so long. TCP repeats a lost first packet after 1 s, so one may be lost and the
round trip take 2 s; longer tries would only delay the report that says why none succeeds."""

JOIN_GRACE_S = 5.0
"""A rank that still waits is ended so long after it has read of a failure. gloo notices a lost peer within this time,
so most ranks end by themselves. It is above `JOIN_LOOK_S` and `JOIN_TRY_S`, within which every rank looks at the
store."""

JOIN_CLOSE_S = 3.0
"""This is the unit of the thread's last words, which take one and a half of it at most; the rank waits for two. Half of
it is above `JOIN_ANSWER_S`: so long a rank that fails early waits for rank 0's answer."""

# EndedRanks looks at the processes of this host, before there is a process group.

PROCESSES_LOOK_S = 2.0
"""Two looks at all processes of the host are so far apart, as each reads a file for every process."""

ABSENT_S = 6.0
"""A rank counts as ended if no process of it was seen for so long. It is above two `PROCESSES_LOOK_S`, so that one look
alone decides nothing, and above what torchrun takes to end the other ranks of one that has failed, whose own status is
the better message."""

# FitWatch ends ranks that wait for one that has failed while the others train.

FIT_LOOK_S = 1.0
"""Two looks at the progress of training are so far apart. A look compares a few counters, but its thread needs the GIL,
so it should be rare; twice this time may pass unused between a death and the end of a rank that waits."""

STALLED_S = 2.0
"""The store is read after so long without a batch. It is above `FIT_LOOK_S`, so that one late look is not a stall."""

FIT_GRACE_S = 5.0
"""A rank is ended that waits in vain for so long. gloo notices a lost peer within this time, so most ranks end with an
exception of their own. It is above `LAST_MESSAGE_S`, `DEATH_S` and two `HANG_LOOK_S`, so that HangMonitor reports
first."""

CAUSE_S = 0.5
"""A rank with an error waits so long for its cause. The connections of a process are closed before the kernel shows its
end, so its peers raise a little before they can see who has died."""

LIFELINE_CONNECT_S = 2.0
"""One connection from a node's first rank to rank 0 may take so long. TCP repeats a lost first packet after 1 s, so one
may be lost. The thread that looks at training waits meanwhile, so this is below `FIT_GRACE_S`."""

SEEN_S = 10.0
"""Rank 0 keeps the store alive for so long, for the others to read how an epoch has ended. They look ten times a
second; one that has died never reads it, and delays rank 0 by this time."""

# HangMonitor has a watcher beside each rank. These say when it looks, reports and ends.

SLOW_FACTOR = 10
"""A phase may last so many times its limit if it is slow by nature, or if the rank computes or compiles. Ten times the
default of ``after_s`` is 600 s, a third of the process group's default timeout, whose error names no rank."""

HANG_LOOK_S = 0.25
"""Two looks of a watcher at the marks of its rank are so far apart. They need neither the GIL nor a system call of the
rank, so they may be frequent."""

MOVED_S = 1.0
"""A mark is progress if it is so fresh. This is above `HANG_LOOK_S`, by what a look may be late on a busy machine."""

PAUSE_S = 5.0
"""The job was suspended if a sleep of `HANG_LOOK_S` took so long. This is well above `HANG_LOOK_S`, so that a busy
machine is not taken for suspended, and below ``after_s``, as shorter suspensions count as time without progress."""

CONFIRM_S = 1.0
"""A second look at all ranks follows so long after the first. Each watcher looks at its rank in between, as this is
above `HANG_LOOK_S`: only so a rank that has just moved shows that."""

ASK_AGAIN_S = 5.0
"""All ranks are asked again after so long without progress. Each inquiry takes the GIL of every rank for its stacks,
which is weighed against how late a hang may be reported. It is above `CONFIRM_S`, by which the first one is late."""

DEATH_S = 2.0
"""The end of a rank is reported after this time. Ranks that end together are known to have ended by then, as this is
above `LAST_MESSAGE_S` and two `HANG_LOOK_S`, and the one report is that of the cause."""

LAST_MESSAGE_S = 0.5
"""A process that has ended counts as dead without a word after this time. Its last message waits in a socket of the
same host, so its watcher's thread only has to get a turn."""

EXIT_S = 0.2
"""A watcher looks so long for how its rank's process ends, once their connection is closed. The kernel closes the
descriptors of a process a moment before it ends it."""

EXIT_POLL_S = 0.001
"""These looks are so close together, as the parent may reap the process at any time, and the status with it."""

ORDERLY_S = 2.0
"""A rank is killed so long after it was asked to end. One that can answer at all calls ``os._exit``, which needs one
turn of the GIL."""

FAILED_S = 8.0
"""The same is longer for a rank that has raised, which may be writing a checkpoint. It is above `ORDERLY_S`."""

KEEP_S = 30.0
"""The state of a rank is written to a file so often. It is read only if no report was written, and may be so old; that
is weighed against writes to a file system that all ranks may share."""

RAS_S = 8.0
"""NCCL's RAS must answer within this time. It is above `RAS_EXTRA_S` by 1 s, the least timeout that NCCL is given."""

RAS_EXTRA_S = 6.0
"""The timeout that NCCL is given is shorter by this. NCCL may take 5 s more than it for its other processes, and 1 s is
for the connection."""

# A watcher reads the stacks and the state of its rank.

ANSWER_S = 3.0
"""A thread of the rank must answer its watcher within this time. It needs a turn of the GIL, which comes after 5 ms
where other threads run Python, but much later where one is in C code that keeps the GIL for a second or two."""

HOLDS_GIL_S = 0.5
"""The training thread holds the GIL in C code if it has used so much CPU time while its process did not answer. This is
below `ANSWER_S`, within which it must be used; a thread that waits for the GIL uses almost none."""

STACK_S = 1.0
"""A thread must write its stack within this time. It does so in a handler of a signal, and needs a turn on a core."""

QUIET_S = 0.1
"""A thread sleeps if it has not run for so long, and a stack is whole if it has not grown for so long. This is below
`STACK_S`."""

PROCESS_POLL_S = 0.01
"""Two looks at a stack that is being written, or at a process that is being ended, are so far apart. This is below
`QUIET_S`."""

COMPUTING_WINDOW_S = 4.0
"""The CPU time of a training thread is compared over so long at most, as the kernel counts it in ticks of 10 ms. A
quarter of it, the distance of samples, is above `HANG_LOOK_S`."""

# The watchers of all ranks ask each other.

CONNECT_S = 2.0
"""One connection to another watcher may take so long. TCP repeats a lost first packet after 1 s, so one may be lost; a
host that does not answer delays an inquiry by this time."""

SEND_S = 5
"""One write between a rank and its watcher may block so long, in whole seconds. It only blocks where the other end is
stopped and its socket is full, and then training must continue."""

HELLO_S = 5.0
"""A stranger must identify itself so soon after it has connected. That is a round trip, and a turn on a busy machine; a
connection that sends nothing takes a place for so long."""

HELLO_ANSWER_S = 5.0
"""A message that needs no stack must be answered within this time, which is a round trip, too."""

QUESTION_S = 10.0
"""The question must follow within this time, and its answer be sent, which may have megabytes of collectives."""

STATE_S = 30.0
"""Another rank's whole snapshot may take so long. This is above two of them, as one is repeated if the rank has moved
meanwhile: each waits for two `ANSWER_S` and for the stacks of four workers, `STACK_S` and `QUIET_S` each, 20.8 s in
all."""

GREET_S = 15.0
"""The watchers of all ranks must answer rank 0 within this time. It is above `CONNECT_S` and two `HELLO_ANSWER_S`, so
that a first try that lasts to its limits is followed by another."""

GREET_AGAIN_S = 1.0
"""Watchers that have not answered are asked again after this pause, as they may only be late."""

ACCEPT_AGAIN_S = 0.1
"""A server that has run out of descriptors or threads pauses so long, until others of its process give some back."""

MEET_S = 60.0
"""Ranks wait so long for all watchers, once in a run. A Python process starts on every host in this time, from a file
system that all may share; and it is above `GREET_S`. A run whose watchers do not meet trains on."""

MEET_FIRST_POLL_S = 0.02
"""Ranks look so often whether all watchers have come, as the first step of a run waits for it."""

MEET_LAST_POLL_S = 1.0
"""Ranks look so often once `MEET_S` is over and nobody waits any more. It is above `MEET_FIRST_POLL_S`, to spare the
store."""

"""All timeouts and intervals of the watches, in seconds, and the required order between them.

Numbers without a named measurement are judgements, and their texts say what is weighed against what. The texts also
state which number must exceed which, and `tests/watch/test_times.py` checks it. All numbers are read as ``times.NAME``
at each use, so that a change here takes effect everywhere. The watcher process beside a rank reads this module, too, so
it imports nothing.
"""

# JoinWatch watches the start, until there is a process group.

JOIN_REPORT_AFTER_S = 20.0
"""Silence after which a start is reported. Importing Lightning took 4 to 20 s on one machine, so a shorter silence
would report healthy starts; a longer one leaves a user before an empty terminal. It is above `JOIN_LOOK_S` and two
`JOIN_TRY_S`, so that at least one look is over."""

JOIN_LOOK_S = 1.0
"""Pause of a rank between two looks at the store. A look is a few messages to rank 0's host."""

JOIN_ANSWER_S = 0.25
"""The same pause while ranks wait for rank 0's answer, before which they cannot write anything. It is below
`JOIN_LOOK_S`."""

JOIN_TRY_S = 3.0
"""Timeout of one connection to the store. TCP repeats a lost first packet after 1 s, so one may be lost and the round
trip take 2 s; longer tries would only delay the report that says why none succeeds."""

JOIN_GRACE_S = 5.0
"""Time from when a rank reads of a failure until it is ended if it still waits. gloo notices a lost peer within this
time, so most ranks end by themselves. It is above `JOIN_LOOK_S` and `JOIN_TRY_S`, within which every rank looks at the
store."""

JOIN_CLOSE_S = 3.0
"""Unit of the time for the thread's last messages. The rank waits up to two units for them. A rank that fails early
waits half a unit for rank 0's answer, which must be above `JOIN_ANSWER_S`, and tries for a third of a unit to reach
rank 0, which may start a little later."""

# EndedRanks looks at the processes of this host, before there is a process group.

PROCESSES_LOOK_S = 2.0
"""Time between two looks at all processes of the host. A look reads a file for every process."""

ABSENT_S = 6.0
"""A rank counts as ended if no process of it was seen for this time. It is above two `PROCESSES_LOOK_S`, so that one
look alone decides nothing, and above what torchrun takes to end the other ranks of one that has failed, whose own
status is the better message."""

# FitWatch ends ranks that wait for one that has failed while the others train.

FIT_LOOK_S = 1.0
"""Time between two looks at the progress of training. A look compares a few counters, but its thread needs the GIL, so
it should be rare; twice this time may pass unused between a death and the end of a rank that waits."""

STALLED_S = 2.0
"""Time without a batch after which the store is read. It is above `FIT_LOOK_S`, so that one late look is not a
stall."""

FIT_GRACE_S = 5.0
"""Time after which a rank that waits for a failed one is ended. gloo notices a lost peer within this time, so most end
with an exception of their own. It is above `LAST_MESSAGE_S`, `DEATH_S` and two `HANG_LOOK_S`, so that HangMonitor
reports first."""

CAUSE_S = 0.5
"""Time for which a rank with an error waits for its cause. The connections of a process are closed before the kernel
shows its end, so its peers raise a little before they can see who has died."""

LIFELINE_CONNECT_S = 2.0
"""Timeout of one connection from a node's first rank to rank 0. TCP repeats a lost first packet after 1 s, so one may
be lost. The thread that looks at training waits meanwhile, so this is below `FIT_GRACE_S`."""

READ_RESULT_S = 10.0
"""Time for which rank 0 keeps the store alive, for the others to read how an epoch has ended. They look ten times a
second; one that has died never reads it, and delays rank 0 by this time."""

# HangMonitor has a watcher beside each rank. These say when it looks, reports and ends.

SLOW_FACTOR = 10
"""Factor of a phase's limit if the phase is slow by nature, or if the rank computes or compiles. Ten times the default
of ``after_s`` is 600 s, a third of the process group's default timeout, whose error names no rank."""

HANG_LOOK_S = 0.25
"""Time between two looks of a watcher at the marks of its rank. They need neither the GIL nor a system call of the
rank, so they may be frequent."""

MOVED_S = 1.0
"""Age up to which a mark counts as progress. This is above `HANG_LOOK_S`, by what a look may be late on a busy
machine."""

PAUSE_S = 5.0
"""The job was suspended if a sleep of `HANG_LOOK_S` took this time. It is well above `HANG_LOOK_S`, so that a busy
machine is not taken for suspended, and below ``after_s``, as shorter suspensions count as time without progress."""

CONFIRM_S = 1.0
"""Time from the first look at all ranks to the second. It is above `HANG_LOOK_S`, so that each watcher looks at its
rank in between and sees whether it has moved."""

ASK_AGAIN_S = 5.0
"""Time without progress after which all ranks are asked again. Each inquiry takes the GIL of every rank for its stacks,
which is weighed against how late a hang may be reported. It is above `CONFIRM_S`, by which the first one is late."""

DEATH_S = 2.0
"""The end of a rank is reported after this time. Ranks that end together are known to have ended by then, as this is
above `LAST_MESSAGE_S` and two `HANG_LOOK_S`, and the one report names the cause."""

LAST_MESSAGE_S = 0.5
"""A process that has ended without a last message counts as dead after this time. Such a message waits in a socket of
the same host, so its watcher's thread only has to get a turn."""

EXIT_S = 0.2
"""Time for which a watcher looks for the exit status of its rank's process, once their connection is closed. The kernel
closes the descriptors of a process a moment before it ends it."""

EXIT_POLL_S = 0.001
"""Time between these looks. It is short because the parent may reap the process, and its status, at any time."""

ORDERLY_S = 2.0
"""Time from asking a rank to end until it is killed. One that can answer at all calls ``os._exit``, which needs one
turn of the GIL."""

FAILED_S = 8.0
"""The same for a rank that has raised, which may be writing a checkpoint. It is above `ORDERLY_S`."""

KEEP_S = 30.0
"""Time between two writes of a rank's state to a file. The file is read only if no report was written, and may be this
old, which is weighed against writes to a file system that all ranks may share."""

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
"""The training thread holds the GIL in C code if it used this CPU time while its process did not answer. This is below
`ANSWER_S`, within which it must be used; a thread that waits for the GIL uses almost none."""

STACK_S = 1.0
"""A thread must write its stack within this time. It does so in a handler of a signal, and needs a turn on a core."""

QUIET_S = 0.1
"""A thread sleeps if it has not run for this time, and a stack is whole if it has not grown for it. This is below
`STACK_S`."""

PROCESS_POLL_S = 0.01
"""Time between two looks at a stack that is being written, or at a process that is being ended. This is below
`QUIET_S`."""

COMPUTING_WINDOW_S = 4.0
"""The longest time over which the CPU time of a training thread is compared. The kernel counts it in ticks of 10 ms. A
quarter of it, the distance of samples, is above `HANG_LOOK_S`."""

# The watchers of all ranks ask each other.

CONNECT_S = 2.0
"""Timeout of one connection to another watcher. TCP repeats a lost first packet after 1 s, so one may be lost; a host
that does not answer delays an inquiry by this time."""

SEND_S = 5
"""Timeout of one write between a rank and its watcher, in whole seconds. It only blocks where the other end is stopped
and its socket is full, and then training must continue."""

HELLO_S = 5.0
"""Time within which a stranger must identify itself after it has connected. That takes a round trip, and a turn on a
busy machine; a connection that sends nothing takes a place for this time."""

HELLO_ANSWER_S = 5.0
"""A message that needs no stack must be answered within this time, which is a round trip, too."""

QUESTION_S = 10.0
"""The question must follow within this time, and its answer be sent, which may have megabytes of collectives."""

STATE_S = 30.0
"""Timeout of another rank's whole snapshot. This is above two of them, as one is repeated if the rank has moved
meanwhile: each waits for two `ANSWER_S` and for the stacks of four workers, `STACK_S` and `QUIET_S` each, 20.8 s in
all."""

GREET_S = 15.0
"""The watchers of all ranks must answer rank 0 within this time. It is above `CONNECT_S` and two `HELLO_ANSWER_S`, so
that a first try that lasts to its limits is followed by another."""

GREET_AGAIN_S = 1.0
"""Watchers that have not answered are asked again after this pause, as they may only be late."""

ACCEPT_AGAIN_S = 0.1
"""Pause of a server that has run out of descriptors or threads, until others of its process give some back."""

MEET_S = 60.0
"""Time for which ranks wait for all watchers, once in a run. A Python process starts on every host in this time, from a
file system that all may share; and it is above `GREET_S`. A run whose watchers do not meet trains on."""

MEET_FIRST_POLL_S = 0.02
"""Time between two looks whether all watchers have come, for which the first step of a run waits."""

MEET_LAST_POLL_S = 1.0
"""The same time once `MEET_S` is over and nobody waits any more. It is above `MEET_FIRST_POLL_S`, to spare the
store."""

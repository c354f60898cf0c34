"""How a program on the processor and a stream of a GPU wait for each other."""

from __future__ import annotations

from .. import vectors as v
from ..waiting import atomic_load, atomic_store, give_way, nanoseconds, pause

EAGER = 20000  # polls without giving the processor away: a GPU's part of a layer is shorter
TIMED = 1024  # polls between looks at the clock


def take_request(arguments, thread, threads):
    """The first thread: wait for the next request. Arguments: address of the number of requests,
    of that of the last one that was answered, of two numbers: the first is not 0 if nobody is to
    wait, and becomes 2 after as many nanoseconds as the second.
    """
    if thread:
        return
    request, last = v.integer_at(arguments), v.integer_at(arguments + 8)
    stop = v.integer_at(arguments + 16)
    polls, begun = 0, nanoseconds()
    while atomic_load(request) == v.integer_at(last) and not atomic_load(stop):
        polls += 1
        if polls < EAGER:
            pause()
        else:
            give_way()
        if polls % TIMED == 0 and nanoseconds() - begun > v.integer_at(stop + 8):
            atomic_store(stop, 2)
    v.store_integer(last, atomic_load(request))


def send_reply(arguments, thread, threads):
    """The first thread: answer the last request. Arguments: address of the number of replies, of
    that of the last request.
    """
    if thread == 0:
        atomic_store(v.integer_at(arguments), v.integer_at(v.integer_at(arguments + 8)))

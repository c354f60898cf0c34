"""The program, as `iqforge` and as `python -m iqforge`. Ctrl-C is handled before most imports."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
PATIENCE = 1.0  # seconds until a Ctrl-C that nothing came of is said to be late
AGAIN = 0.02  # seconds until a Ctrl-C is tried again that arrived during an import
RAISED = b"\0"  # after the number of a signal: Python has come to raise it
_tells = -1  # the end of a pipe that the handler writes to


def run() -> NoReturn:
    """Run the command line and end the process with its exit status: 130 after Ctrl-C, also while
    modules are imported or the process ends.
    """
    status = INTERRUPTED
    try:
        atexit.register(lambda: _end(status))  # the first to be registered is the last to be called
        try:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGALRM, _interrupt)
                signal.signal(signal.SIGINT, _interrupt)
                _listen()
            from .cli import main

            status = main()
        except KeyboardInterrupt:  # before `main` could catch it
            print("\niqforge: interrupted", file=sys.stderr)
        except SystemExit:
            status = 0  # the exception has its own
            raise
        except Exception:
            status = 1
            raise
        finally:
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as of a rank, or after nohup
                signal.signal(signal.SIGINT, _leave)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does, and say so. While a module is imported, wait until
    it is there: modules in C print the exception, or make an ImportError of it.
    """
    if _imports(frame):
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        return
    with contextlib.suppress(OSError):
        os.write(_tells, RAISED)
    signal.default_int_handler(number, frame)


def _imports(frame: FrameType | None) -> bool:
    """Whether this frame is a part of an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _listen() -> None:
    """Let a second Ctrl-C end the process where Python does not come to raise the first one: it
    does between two of its own steps, and a step in compiled code can take minutes.
    """
    global _tells
    here, _tells = os.pipe()
    os.set_blocking(_tells, False)
    signal.set_wakeup_fd(_tells, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_stop_telling)
    threading.Thread(target=_wait_for_second, args=(here,), name="ctrl-c", daemon=True).start()


def _stop_telling() -> None:
    """Keep the signals of a forked process its own."""
    global _tells
    _tells = -1
    signal.set_wakeup_fd(-1)


def _wait_for_second(signals: int) -> None:
    """Read the numbers of signals as they arrive, and RAISED in their order, and end the process at
    a second SIGINT if Python has not raised the first, which is said after a while.
    """
    waits = late = False
    while True:
        patience = PATIENCE if waits and not late else None
        if not select.select([signals], [], [], patience)[0]:
            late = True
            print(
                "\niqforge: ends after this step of the computation; Ctrl-C again: at once",
                file=sys.stderr,
                flush=True,
            )
            continue
        found = os.read(signals, 1)
        if found == RAISED:
            waits = late = False
        elif found[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is _interrupt:
            if late:
                print("\niqforge: interrupted", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
            waits = True


def _leave(number: int, frame: object) -> NoReturn:
    """End at once, for a Ctrl-C while Python waits for threads and the like."""
    os._exit(INTERRUPTED)


def _end(status: int) -> None:
    """Keep Python from ending by the signal. It now gives SIGINT its default action; and if an
    interrupt has passed through code that `exec` runs (dataclasses are made by it), Python sends
    itself that signal even though the interrupt was caught.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if status == INTERRUPTED:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


if __name__ == "__main__":
    run()

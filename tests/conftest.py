"""What all tests need."""

from __future__ import annotations

import signal

# A shell's background job ignores Ctrl-C, and so would the children that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

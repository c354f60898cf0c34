"""How processes of torchrun find each other: each says that it has come, or why it has failed, so
that the others do not wait for it without knowing. Imports torch when it is used.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

from ...errors import DeviceError, UsageError, printable
from .ranks import Ranks, named_ranks

_POLL = 0.05  # seconds
_PATIENCE = 5.0  # seconds that a rank which has failed waits for others to read why
_FAILED = "failed"
_MOST_TEXT = 2000


def shared_store(ranks: Ranks, seconds: float) -> Any:
    """Return the store of all processes that torchrun has started: in its agent, else in rank 0.
    RuntimeError if it cannot be reached in so many seconds. UsageError without an address.
    """
    import torch.distributed as dist

    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise UsageError("the environment has RANK and no MASTER_ADDR: use torchrun")
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  it is public
        host,
        ranks.port,
        ranks.size,
        ranks.rank == 0 and not in_agent,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=not in_agent,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"iqforge/{attempt}", store)  # pyright: ignore[reportPrivateImportUsage]


def await_all(store: Any, ranks: Ranks, timeout: float) -> None:
    """Return when all ranks have come here. DeviceError with the reason of one that has failed
    before, or with the names of those that have not come within `timeout` seconds.
    """
    store.set(f"here/{ranks.rank}", "")
    missing = [rank for rank in range(ranks.size) if rank != ranks.rank]
    limit = time.monotonic() + timeout
    while True:
        if store.check([_FAILED]):
            store.set(f"read/{ranks.rank}", "")
            raise DeviceError(store.get(_FAILED).decode(errors="replace"))
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if not missing:
            return
        if time.monotonic() > limit:
            raise DeviceError(
                f"rank {ranks.rank} of {ranks.size} has waited {timeout:.0f} s for"
                f" {named_ranks(missing)} to start (--timeout)"
            )
        time.sleep(_POLL)


def tell_failure(ranks: Ranks, reason: str) -> None:
    """Let ranks that wait in `await_all`, or come there later, end with `reason`, and return when
    they know or some seconds have passed. Does nothing if they cannot be reached.
    """
    try:
        store = shared_store(ranks, _PATIENCE)
        text = f"rank {ranks.rank} of {ranks.size} has failed: {printable(reason, _MOST_TEXT)}"
        store.compare_set(_FAILED, "", text)  # the first reason stays
        store.set(f"read/{ranks.rank}", "")
        limit = time.monotonic() + _PATIENCE
        keys = [f"read/{rank}" for rank in range(ranks.size)]
        while time.monotonic() < limit and not store.check(keys):
            time.sleep(_POLL)
    except (RuntimeError, ValueError, UsageError):  # nobody is there
        return

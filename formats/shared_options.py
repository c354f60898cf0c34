"""Options that several commands share, with the same flags, and values that are checked alike."""

from __future__ import annotations

from typing import Any

from .options import option

_DEVICES = (
    "auto (default: all GPUs, or the CPU if there is none), cpu, cuda for all GPUs, cuda:N or"
    " cuda:N,M for some"
)


def threads_option(help: str = "number of threads (default: all cores)") -> Any:
    """Return the field of the number of CPU threads; 0 means one per core."""
    return option(0, "-t", "--threads", metavar="N", help=help)


def devices_option(what: str) -> Any:
    """Return the field of the devices that quantize or measure. what: what differs between them."""
    return option("cpu", "--device", metavar="D", help=f"{_DEVICES}; {what}")


def force_option() -> Any:
    """Return the field that lets a run use an importance matrix of another model."""
    return option(
        False, "--force", help="use an importance matrix that seems to belong to another model"
    )


def dry_run_option(
    help: str = "print what would be written, write nothing", aliases: tuple[str, ...] = ()
) -> Any:
    """Return the field of a run that only plans."""
    return option(False, "--dry-run", help=help, aliases=aliases)

"""Free memory of this machine."""

from __future__ import annotations


def available_memory() -> int | None:
    """Return the bytes that processes can take without swapping, or None if that is not known."""
    try:
        with open("/proc/meminfo") as file:
            return next(
                int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration, ValueError):
        return None

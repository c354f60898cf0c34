"""Pointers of Git LFS: what a clone has in place of large files if git-lfs was not installed."""

from __future__ import annotations

_BEGINNING = b"version https://git-lfs"


def lfs_hint(first: bytes) -> str:
    """Return what to add to an error about a file that begins with `first`, four bytes or more: how
    to get the file if this is a pointer of Git LFS, otherwise nothing.
    """
    first = first[: len(_BEGINNING)]
    if len(first) < 4 or not _BEGINNING.startswith(first):
        return ""
    return "; this seems to be a pointer of Git LFS: `git lfs pull` fetches the file itself"

"""Find a private folder for compiled code when none of the usual places can be written.

In a container that runs as another user, both the installed package and the home folder may be
read-only. Compiled code then goes to a private folder under the temporary directory. Code from that
folder is executed, so it must belong to this user and be closed to all others.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def can_be_written(folder: Path) -> bool:
    """Return whether files can be made in `folder`, which may not exist yet; create nothing."""
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


@functools.cache
def private_folder() -> Path:
    """Return a folder that only this user can enter, and say once that it is used.

    It is `iqforge-UID` under the temporary directory and keeps its contents between runs. If
    something else has that name, a new folder is made that is deleted when the process ends.
    """
    folder = Path(tempfile.gettempdir()) / f"iqforge-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_private(folder):
            taken, folder = folder, Path(tempfile.mkdtemp(prefix="iqforge-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            log.warning(
                "the usual folders for compiled code cannot be written, and %s is not a private"
                " folder of this user; compiled code is kept in %s until this process ends",
                taken,
                folder,
            )
            return folder
    log.warning(
        "the usual folders for compiled code cannot be written; it is kept in %s (set"
        " NUMBA_CACHE_DIR and IQFORGE_CACHE_DIR to choose other folders)",
        folder,
    )
    return folder


def _is_private(folder: Path) -> bool:
    found = folder.lstat()  # a link is not followed
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )

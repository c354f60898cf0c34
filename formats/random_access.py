"""Read ranges of a file into memory of the caller.

Files are read and not mapped: touching a mapped page beyond the end of a file that was truncated in
the meantime kills the process with SIGBUS, while a short read is an error like any other. For
ranges of a megabyte both take the same time.
"""

from __future__ import annotations

import os
import stat

import numpy as np

from ..errors import IqforgeError, MalformedFileError, NotFoundError, TruncatedFileError

_MOST_AT_ONCE = 1 << 30  # Linux reads at most 2^31 - 4096 bytes per call


class RandomAccessFile:
    """An open regular file, which several threads may read. `size` is its size when it was opened.
    `what` names the expected kind of file in errors. Raise NotFoundError, MalformedFileError for a
    folder or a device, IqforgeError for a file that cannot be opened.
    """

    def __init__(self, path: str | os.PathLike, what: str = "a file"):
        self.path = os.fspath(path)
        try:
            # Not opened before its kind is known: opening a pipe waits for a writer.
            kind = os.stat(self.path).st_mode
            if not stat.S_ISREG(kind):
                found = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
                if os.path.exists(os.path.join(self.path, "config.json")):
                    found += " with a checkpoint, which iqforge convert converts"
                raise MalformedFileError(f"expected {what}, this is {found}", file=self.path)
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115  closed by close()
            self.size = os.fstat(self._file.fileno()).st_size
        except FileNotFoundError:
            raise NotFoundError("no such file", file=self.path) from None
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def read(self, start: int, n_bytes: int, tensor: str | None = None) -> np.ndarray:
        """Return bytes from `start` on, uint8[n_bytes], read-only.

        Raise TruncatedFileError if the file ends too early, naming `tensor` and the byte at which
        it ends; IqforgeError if it cannot be read.
        """
        data = np.empty(n_bytes, np.uint8)
        self.read_into(start, data, tensor)
        data.flags.writeable = False
        return data

    def read_into(self, start: int, out: np.ndarray, tensor: str | None = None) -> None:
        """Fill `out`, contiguous uint8, with bytes from `start` on. Raise errors as `read` does."""
        target, n_bytes, done = out.reshape(-1).data, out.size, 0
        while done < n_bytes:
            try:
                n_read = os.preadv(
                    self._file.fileno(), [target[done : done + _MOST_AT_ONCE]], start + done
                )
            except (OSError, ValueError) as error:
                raise self._unreadable(error, tensor, start + done) from None
            if not n_read:
                raise TruncatedFileError(
                    f"the file ends here, {n_bytes - done} bytes before the end of what is read; it"
                    f" had {self.size} bytes when it was opened",
                    file=self.path,
                    tensor=tensor,
                    offset=start + done,
                )
            done += n_read

    def _unreadable(
        self, error: OSError | ValueError, tensor: str | None = None, offset: int | None = None
    ) -> IqforgeError:
        why = (isinstance(error, OSError) and error.strerror) or error
        return IqforgeError(f"cannot be read: {why}", file=self.path, tensor=tensor, offset=offset)

    def close(self) -> None:
        """Close the file. Arrays that were read stay valid."""
        self._file.close()

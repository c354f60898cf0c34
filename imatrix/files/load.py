"""Load and save importance matrix files of either layout."""

from __future__ import annotations

import os

from ...errors import ImatrixError, NotFoundError, TruncatedFileError, UsageError
from ..data import Imatrix
from .dat import load_dat, save_dat
from .gguf import load_gguf, save_gguf

FORMATS = ("dat", "gguf")


def load_imatrix(path: str | os.PathLike) -> Imatrix:
    """Load a file in either layout, or the diagonals of a file of second moments, recognized by its
    first bytes. Raise NotFoundError, ImatrixError or the errors of GGUF and safetensors files.
    """
    try:
        with open(path, "rb") as file:
            first = file.read(9)
    except FileNotFoundError:
        raise NotFoundError("no such importance matrix", file=path) from None
    except IsADirectoryError:
        raise ImatrixError("is a folder, expected an importance matrix", file=path) from None
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror}", file=path) from None
    if not first:
        raise TruncatedFileError("is empty, expected an importance matrix", file=path)
    if first[8:] == b"{" and os.fspath(path).endswith(".safetensors"):
        # Only these files need torch, whose import takes a second and 150 MB.
        from ..moments.file import load_moments
        from ..moments.lookup import imatrix_of

        return imatrix_of(load_moments(path))
    return load_gguf(path) if first[:4] == b"GGUF" else load_dat(path)


def output_format_of(path: str | os.PathLike, wanted: str | None = None) -> str:
    """Return `wanted`, or by default gguf for a name that ends in .gguf and dat for any other.
    Raise UsageError for an unknown format.
    """
    if wanted is not None and wanted not in FORMATS:
        raise UsageError(f"the imatrix format is '{wanted}', expected {' or '.join(FORMATS)}")
    return wanted or ("gguf" if os.fspath(path).endswith(".gguf") else "dat")


def save_imatrix(
    imatrix: Imatrix, path: str | os.PathLike, output_format: str | None = None
) -> None:
    """Write `imatrix` in `output_format` (dat or gguf; by the name's suffix if None). The file gets
    its name only when it is complete.
    """
    (save_gguf if output_format_of(path, output_format) == "gguf" else save_dat)(imatrix, path)

"""Find the positions of tensors in a PyTorch checkpoint (`pytorch_model.bin`) without executing
anything in it.

`torch.save` writes a zip archive without compression:

    <name>/data.pkl     a pickle of the dictionary of tensors, see pickle.py
    <name>/byteorder    "little" or "big"; older versions leave it out
    <name>/data/<key>   the bytes of one storage; tensors are strided views into it

So a tensor is a range of the file, like one of a safetensors file. Files of torch before 1.6 (a
bare pickle, or a tar) hold storages in another form. The error for them names the format.

`torch.load(weights_only=True, mmap=True)` is not an alternative. It maps the file, so one that is
cut while it is read kills the process with SIGBUS; the pages of all tensors that were read stay
resident until the last tensor is gone (500 MB after reading 600 MB); and a pickle whose key is a
tuple of doubled tuples keeps it busy forever.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from ...errors import (
    MalformedFileError,
    NotFoundError,
    TruncatedFileError,
    UnsupportedTypeError,
    printable,
)
from ...formats.git_lfs import lfs_hint
from ..tensors.stored import DTYPE_BITS, MAX_DIMENSIONS, StoredTensor
from .pickle import load_state_dict
from .storages import TorchView

MAX_PICKLE_BYTES = 256 << 20
_SAVE_AGAIN = "load it in a safe environment and save it again with torch.save"
_CHANGED = 1 << 0 | 1 << 5 | 1 << 6  # flags of an entry: encrypted, patched, strongly encrypted
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field


def read_torch_header(path: Path) -> dict[str, StoredTensor]:
    """Read all tensors of the file, in the order of its dictionary. Only the directory of the
    archive and the pickle are read.

    Raise NotFoundError, TruncatedFileError or MalformedFileError for files that are missing,
    contradict themselves or contain anything but tensors; UnsupportedTypeError for old formats,
    compression and big-endian files. Each names file and tensor.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_kind(path, file.read(4), size)
            with zipfile.ZipFile(file) as archive:
                entries, folder = _entries(path, archive)
                order = entries.get("byteorder")
                if order is not None and _read(path, archive, order, 16) != b"little":
                    raise UnsupportedTypeError("was written by a big-endian machine", file=path)
                state = load_state_dict(
                    _read(path, archive, entries["data.pkl"], MAX_PICKLE_BYTES), path
                )
            storages = _Storages(path, file, size, entries)
            return {
                name: _tensor(storages, name, view)
                for name, view in _tensors(path, state, folder).items()
            }
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror or error}", file=path) from None
    except NotImplementedError as error:  # of zipfile, for newer versions of the format
        raise UnsupportedTypeError(
            f"is a zip archive of a kind that is not supported ({printable(error)}); {_SAVE_AGAIN}",
            file=path,
        ) from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        raise MalformedFileError(
            f"is not a complete zip archive: {printable(error)}", file=path
        ) from None


def _check_kind(path: Path, first: bytes, size: int) -> None:
    if first == b"PK\x03\x04":
        return
    if not first:
        raise TruncatedFileError("the file is empty", file=path, offset=0)
    if first[0] == 0x80:
        raise UnsupportedTypeError(
            f"is a pickle as torch wrote them before version 1.6; {_SAVE_AGAIN}",
            file=path,
        )
    with open(path, "rb") as file:
        if size > 512 and file.read(512)[257:262] == b"ustar":
            raise UnsupportedTypeError(
                "is a tar archive as torch wrote them before version 0.1.10; save it with a"
                " newer one",
                file=path,
            )
    raise MalformedFileError(
        f"starts with {first!r}; a PyTorch checkpoint is a zip archive{lfs_hint(first)}",
        file=path,
        offset=0,
    )


def _entries(path: Path, archive: zipfile.ZipFile) -> tuple[dict[str, zipfile.ZipInfo], str]:
    """Return the entries by their names in the archive's folder, and that folder."""
    pickles = [
        info.filename
        for info in archive.infolist()
        if info.filename.count("/") == 1 and info.filename.endswith("/data.pkl")
    ]
    if len(pickles) != 1:
        raise MalformedFileError(
            f"has {len(pickles)} entries 'data.pkl', a PyTorch checkpoint has one", file=path
        )
    folder = pickles[0].removesuffix("data.pkl")
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename.startswith(folder):
            name = info.filename.removeprefix(folder)
            if name in entries:
                raise MalformedFileError(
                    f"archive entry '{printable(info.filename)}' occurs twice", file=path
                )
            entries[name] = info
    if "constants.pkl" in entries or any(name.startswith("code/") for name in entries):
        raise UnsupportedTypeError(
            "is a TorchScript program, not a dictionary of tensors", file=path
        )
    return entries, folder


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    entry = f"archive entry '{printable(info.filename)}'"
    if _is_changed(info):
        raise UnsupportedTypeError(
            f"{entry} is compressed or encrypted, torch does neither; {_SAVE_AGAIN}",
            file=path,
            offset=info.header_offset,
        )
    if info.file_size > limit:
        raise MalformedFileError(
            f"{entry} is {info.file_size} bytes long, {limit} are read",
            file=path,
            offset=info.header_offset,
        )
    return archive.read(info)


def _is_changed(info: zipfile.ZipInfo) -> bool:
    """Return whether an entry's bytes are not those of its content: compressed, patched or
    encrypted.
    """
    return info.compress_type != zipfile.ZIP_STORED or bool(info.flag_bits & _CHANGED)


def _tensors(path: Path, state: dict[Any, Any], folder: str) -> dict[str, TorchView]:
    for name, value in state.items():
        if not isinstance(name, str):
            raise MalformedFileError(
                f"has the key {printable(name)}, which is not the name of a tensor", file=path
            )
        if isinstance(value, dict):
            raise MalformedFileError(
                f"'{printable(name)}' holds another dictionary; the tensors must be on the first"
                " level",
                file=path,
            )
        if not isinstance(value, TorchView):
            raise MalformedFileError(
                f"holds a {type(value).__name__}, not a tensor", file=path, tensor=name
            )
    return state


class _Storages:
    """The positions of storages in the file."""

    def __init__(self, path: Path, file, size: int, entries: dict[str, zipfile.ZipInfo]):
        self.path, self._file, self._size, self._entries = path, file, size, entries
        self._begins: dict[str, int] = {}

    def begin(self, name: str, view: TorchView) -> int:
        """Return the first byte of the view's storage. Its entry must exist, be uncompressed and
        have the size that the pickle says.
        """
        storage = view.storage
        info = self._entries.get(f"data/{storage.key}")
        if info is None:
            raise MalformedFileError(
                f"its storage 'data/{printable(storage.key)}' is not in the archive",
                file=self.path,
                tensor=name,
            )
        if _is_changed(info):
            raise UnsupportedTypeError(
                f"its storage is compressed or encrypted, torch does neither; {_SAVE_AGAIN}",
                file=self.path,
                tensor=name,
            )
        claimed = storage.numel * DTYPE_BITS[storage.dtype] // 8
        if info.file_size != claimed or info.compress_size != claimed:
            raise MalformedFileError(
                f"its storage takes {claimed} bytes, the archive has {info.file_size}",
                file=self.path,
                tensor=name,
                offset=info.header_offset,
            )
        if storage.key not in self._begins:
            self._begins[storage.key] = self._data_begin(name, info)
        begin = self._begins[storage.key]
        if begin + claimed > self._size:
            raise TruncatedFileError(
                f"its data ends at {begin + claimed}, the file has {self._size} bytes",
                file=self.path,
                tensor=name,
                offset=begin,
            )
        return begin

    def _data_begin(self, name: str, info: zipfile.ZipInfo) -> int:
        """Return where the data of an entry begins. Only the local header tells: it repeats the
        name and has extra padding.
        """
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise MalformedFileError(
                "the archive's directory points to no entry",
                file=self.path,
                tensor=name,
                offset=info.header_offset,
            )
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length


def _tensor(storages: _Storages, name: str, view: TorchView) -> StoredTensor:
    if len(view.shape) > MAX_DIMENSIONS:
        raise MalformedFileError(
            f"has {len(view.shape)} dimensions, at most {MAX_DIMENSIONS} are read",
            file=storages.path,
            tensor=name,
        )
    start = storages.begin(name, view)
    size = DTYPE_BITS[view.dtype] // 8
    # Elements from the first to the last that the view touches.
    reach = (
        1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides))
        if math.prod(view.shape)
        else 0
    )
    available = view.storage.numel * DTYPE_BITS[view.storage.dtype] // 8
    if (view.offset + reach) * size > available:
        raise MalformedFileError(
            f"shape {list(view.shape)} with strides {list(view.strides)} from element {view.offset}"
            f" leaves its storage of {available} bytes",
            file=storages.path,
            tensor=name,
            offset=start,
        )
    begin = start + view.offset * size
    return StoredTensor(
        name, view.dtype, view.shape, storages.path, begin, begin + reach * size, _strides(view)
    )


def _strides(view: TorchView) -> tuple[int, ...] | None:
    """Return None if rows follow each other without gaps. Strides of dimensions of size 1 have no
    meaning.
    """
    dense = 1
    for n, stride in zip(reversed(view.shape), reversed(view.strides)):
        if n != 1 and stride != dense:
            return view.strides
        dense *= n
    return None

"""The objects that the pickle of a state dict is made of: names, storages, and the tensors that the
functions it names rebuild. None of these is looked up or called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import MalformedFileError, UnsupportedTypeError, printable
from .storages import DTYPES, STORAGE_DTYPES, UNTYPED, TorchStorage, TorchView

_NAMES = {
    "collections": ("OrderedDict",),
    "torch": (*STORAGE_DTYPES, *DTYPES, "Size"),
    "torch.storage": ("UntypedStorage",),
    "torch._utils": (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
    ),
}


@dataclass(frozen=True)
class Name:
    """A class or function that the file names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return printable(f"{self.module}.{self.name}")


@dataclass
class Place:
    """Where a file is read: the `position` of the opcode in its pickle."""

    file: Any
    position: int = 0

    def error(self, message: str) -> MalformedFileError:
        """Return the error that says this of the place."""
        return MalformedFileError(message, file=self.file, offset=self.position)


def kind_of(value: Any) -> str:
    """Return what errors call a value."""
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, TorchView)
        else f"a {type(value).__name__}"
    )


def checked(kind: type, value: Any) -> Any:
    """Return the value. Raise TypeError if it is of another class."""
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found {kind_of(value)}")
    return value


def named(place: Place, module: str, name: str) -> Name:
    """Return the name of a class or function. Raise MalformedFileError for one that no state dict
    needs.
    """
    found = Name(module, name)
    if name not in _NAMES.get(module, ()):
        what = (
            "a kind of tensor that is not supported"
            if module.split(".")[0] == "torch"
            else "which no state dict needs"
        )
        raise place.error(f"its pickle names {found}, {what}; nothing was executed")
    return found


def storage_of(place: Place, identifier: Any) -> TorchStorage:
    """Return the storage that a persistent identifier names: the tuple ("storage", class, key,
    device, elements). Raise MalformedFileError for another one.
    """
    kind, storage, key, _, numel = checked(tuple, identifier)
    dtype = (
        UNTYPED
        if checked(Name, storage).name == "UntypedStorage"
        else STORAGE_DTYPES.get(storage.name)
    )
    if kind != "storage" or dtype is None or type(numel) is not int or numel < 0:
        raise place.error("its pickle refers to something that is not a storage")
    return TorchStorage(dtype, checked(str, key), numel)


def rebuilt(place: Place, function: Any, arguments: tuple) -> Any:
    """Return what a call would build: a dictionary, a shape, or a tensor as a view. Raise
    MalformedFileError for functions that no state dict needs, UnsupportedTypeError for tensors of
    types that cannot be converted.
    """
    full = str(checked(Name, function))
    if full == "collections.OrderedDict":
        if arguments:
            raise place.error("an OrderedDict with arguments")
        return {}
    elif full == "torch.Size":
        (sizes,) = arguments
        return tuple(sizes)
    elif full == "torch._utils._rebuild_parameter":
        return checked(TorchView, arguments[0])
    elif full == "torch._utils._rebuild_tensor_v3":
        return _view(place, arguments[:4], _dtype(place, arguments[6]))
    elif full in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
        return _view(place, arguments[:4], None)
    else:
        raise place.error(f"its pickle calls {full}; nothing was executed")


def _dtype(place: Place, name: Any) -> str:
    if (found := DTYPES.get(checked(Name, name).name)) is None:
        raise UnsupportedTypeError(
            f"has tensors of {name}, which are not supported", file=place.file
        )
    return found


def _view(place: Place, arguments: tuple, dtype: str | None) -> TorchView:
    storage, offset, shape, strides = arguments
    numbers = [offset, *checked(tuple, shape), *checked(tuple, strides)]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(
        shape
    ) != len(strides):
        raise place.error(
            f"offset, shape and strides of a tensor are not sizes: {len(shape)} and"
            f" {len(strides)} dimensions"
        )
    return TorchView(checked(TorchStorage, storage), dtype or storage.dtype, offset, shape, strides)

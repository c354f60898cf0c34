"""Interpret the pickle in a PyTorch checkpoint without the pickle module: nothing is imported and
nothing is called.

A state dict takes some forty opcodes and a few names (`torch._utils._rebuild_tensor_v2`, storages,
OrderedDict). Any other name or opcode is an error, whatever it would have done. The opcodes are
those that Python documents in `pickletools`.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

from ...errors import MalformedFileError, UnsupportedTypeError, printable
from .storages import DTYPES, STORAGE_DTYPES, UNTYPED, TorchStorage, TorchView

_MAX_ITEMS = 4_000_000  # on the stack and in the memo; a checkpoint of 100,000 tensors needs less
_MARK = object()


@dataclass(frozen=True)
class Name:
    """A class or function that the file names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return printable(f"{self.module}.{self.name}")


def load_state_dict(text: bytes, file) -> dict[Any, Any]:
    """Return the dictionary that the pickle `text` builds, with tensors as `TorchView`s.

    Raise MalformedFileError for a pickle that is cut off, is not a dictionary, or uses opcodes or
    names that no state dict needs; UnsupportedTypeError for kinds of tensors that cannot be
    converted. Errors name `file`.
    """
    machine = _Machine(file)
    try:
        for opcode, argument, position in pickletools.genops(text):
            machine.position = position or 0
            machine.step(opcode.name, argument)
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        UnicodeDecodeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise MalformedFileError(
            f"its pickle is broken: {printable(error)}", file=file, offset=machine.position
        ) from None
    if not isinstance(machine.result, dict):
        raise MalformedFileError(
            f"holds {_kind(machine.result)}, not a dictionary of tensors", file=file
        )
    return machine.result


def _kind(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, TorchView)
        else f"a {type(value).__name__}"
    )


class _Machine:
    def __init__(self, file):
        self._file, self.position = file, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.result: Any = None

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _CONSTANTS:
            self._push(_CONSTANTS[opcode]())
        elif opcode in _ARGUMENTS:
            self._push(argument)
        elif (
            action := getattr(self, f"_{opcode.lower()}", None)
        ) is not None and opcode in _ACTIONS:
            action(argument)
        else:
            raise self._error(
                f"its pickle uses the opcode {opcode}, which no state dict needs; nothing was"
                " executed"
            )

    def _error(self, message: str) -> MalformedFileError:
        return MalformedFileError(message, file=self._file, offset=self.position)

    def _push(self, value: Any) -> None:
        if len(self._stack) + len(self._memo) >= _MAX_ITEMS:
            raise self._error(f"its pickle needs more than {_MAX_ITEMS} objects")
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        index = next(
            i for i in range(len(self._stack) - 1, -2, -1) if i < 0 or self._stack[i] is _MARK
        )
        if index < 0:
            raise ValueError("no mark on the stack")
        items = self._stack[index + 1 :]
        del self._stack[index:]
        return items

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    # --- opcodes

    def _proto(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise self._error(f"its pickle has protocol {version}; 2 to 5 are read")

    def _frame(self, _) -> None:
        pass

    def _mark(self, _) -> None:
        self._push(_MARK)

    def _stop(self, _) -> None:
        self.result = self._pop()

    def _binput(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _long_binput = _binput

    def _memoize(self, _) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _binget(self, index: int) -> None:
        self._push(self._memo[index])

    _long_binget = _binget

    def _tuple(self, _) -> None:
        self._push(tuple(self._since_mark()))

    def _tuple1(self, _) -> None:
        self._push((self._pop(),))

    def _tuple2(self, _) -> None:
        second, first = self._pop(), self._pop()
        self._push((first, second))

    def _tuple3(self, _) -> None:
        third, second, first = self._pop(), self._pop(), self._pop()
        self._push((first, second, third))

    def _append(self, _) -> None:
        value = self._pop()
        _of(list, self._stack[-1]).append(value)

    def _appends(self, _) -> None:
        values = self._since_mark()
        _of(list, self._stack[-1]).extend(values)

    def _setitem(self, _) -> None:
        value, key = self._pop(), self._pop()
        self._store([key, value])

    def _setitems(self, _) -> None:
        self._store(self._since_mark())

    def _store(self, flat: list[Any]) -> None:
        target = _of(dict, self._stack[-1])
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, (str, int)):  # hashing or printing others may take forever
                raise self._error(f"a dictionary has a {type(key).__name__} as a key")
            if key in target:
                raise self._error(f"key '{printable(key)}' occurs twice")
            target[key] = value

    def _build(self, _) -> None:
        """Ignore attributes of the object below: those of a state dict (`_metadata`) do not concern
        tensors.
        """
        self._pop()
        if not isinstance(self._stack[-1], dict):
            raise self._error(
                f"its pickle sets attributes of {_kind(self._stack[-1])}; nothing was executed"
            )

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self, _) -> None:
        name, module = self._pop(), self._pop()
        self._name(_of(str, module), _of(str, name))

    def _name(self, module: str, name: str) -> None:
        found = Name(module, name)
        if name not in _NAMES.get(module, ()):
            what = (
                "a kind of tensor that is not supported"
                if module.split(".")[0] == "torch"
                else "which no state dict needs"
            )
            raise self._error(f"its pickle names {found}, {what}; nothing was executed")
        self._push(found)

    def _binpersid(self, _) -> None:
        kind, storage, key, _, numel = _of(tuple, self._pop())
        dtype = (
            UNTYPED
            if _of(Name, storage).name == "UntypedStorage"
            else STORAGE_DTYPES.get(storage.name)
        )
        if kind != "storage" or dtype is None or type(numel) is not int or numel < 0:
            raise self._error("its pickle refers to something that is not a storage")
        self._push(TorchStorage(dtype, _of(str, key), numel))

    def _reduce(self, _) -> None:
        arguments, function = _of(tuple, self._pop()), self._pop()
        full = str(_of(Name, function))
        if full == "collections.OrderedDict":
            if arguments:
                raise self._error("an OrderedDict with arguments")
            self._push({})
        elif full == "torch.Size":
            (sizes,) = arguments
            self._push(tuple(sizes))
        elif full == "torch._utils._rebuild_parameter":
            self._push(_of(TorchView, arguments[0]))
        elif full == "torch._utils._rebuild_tensor_v3":
            self._push(self._view(arguments[:4], self._dtype(arguments[6])))
        elif full in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            self._push(self._view(arguments[:4], None))
        else:
            raise self._error(f"its pickle calls {full}; nothing was executed")

    _newobj = _reduce

    def _dtype(self, name: Any) -> str:
        if (found := DTYPES.get(_of(Name, name).name)) is None:
            raise UnsupportedTypeError(
                f"has tensors of {name}, which are not supported", file=self._file
            )
        return found

    def _view(self, arguments: tuple, dtype: str | None) -> TorchView:
        storage, offset, shape, strides = arguments
        numbers = [offset, *_of(tuple, shape), *_of(tuple, strides)]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(
            shape
        ) != len(strides):
            raise self._error(
                f"offset, shape and strides of a tensor are not sizes: {len(shape)} and"
                f" {len(strides)} dimensions"
            )
        return TorchView(_of(TorchStorage, storage), dtype or storage.dtype, offset, shape, strides)


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found {_kind(value)}")
    return value


_CONSTANTS = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
}
_ARGUMENTS = frozenset(
    {
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINSTRING",
        "BINSTRING",
    }
)
_ACTIONS = frozenset(
    {
        "PROTO",
        "FRAME",
        "MARK",
        "STOP",
        "BINPUT",
        "LONG_BINPUT",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "BUILD",
        "GLOBAL",
        "STACK_GLOBAL",
        "BINPERSID",
        "REDUCE",
        "NEWOBJ",
    }
)
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

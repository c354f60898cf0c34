"""Interpret the pickle in a PyTorch checkpoint without the pickle module: nothing is imported and
nothing is called.

A state dict takes some forty opcodes and a few names (`torch._utils._rebuild_tensor_v2`, storages,
OrderedDict). Any other name or opcode is an error, whatever it would have done. The opcodes are
those that Python documents in `pickletools`. `objects.py` has what they make.
"""

from __future__ import annotations

import pickletools
from typing import Any

from ...errors import MalformedFileError, printable
from .objects import Place, checked, kind_of, named, rebuilt, storage_of

_MAX_ITEMS = 4_000_000  # on the stack and in the memo; a checkpoint of 100,000 tensors needs less
_MARK = object()


def load_state_dict(text: bytes, file) -> dict[Any, Any]:
    """Return the dictionary that the pickle `text` builds, with tensors as `TorchView`s.

    Raise MalformedFileError for a pickle that is cut off, is not a dictionary, or uses opcodes or
    names that no state dict needs; UnsupportedTypeError for kinds of tensors that cannot be
    converted. Errors name `file`.
    """
    machine = _Machine(file)
    try:
        for opcode, argument, position in pickletools.genops(text):
            machine.place.position = position or 0
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
            f"its pickle is broken: {printable(error)}", file=file, offset=machine.place.position
        ) from None
    if not isinstance(machine.result, dict):
        raise MalformedFileError(
            f"holds {kind_of(machine.result)}, not a dictionary of tensors", file=file
        )
    return machine.result


class _Machine:
    def __init__(self, file):
        self.place = Place(file)
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
            raise self.place.error(
                f"its pickle uses the opcode {opcode}, which no state dict needs; nothing was"
                " executed"
            )

    def _push(self, value: Any) -> None:
        if len(self._stack) + len(self._memo) >= _MAX_ITEMS:
            raise self.place.error(f"its pickle needs more than {_MAX_ITEMS} objects")
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
            raise self.place.error(f"its pickle has protocol {version}; 2 to 5 are read")

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
        checked(list, self._stack[-1]).append(value)

    def _appends(self, _) -> None:
        values = self._since_mark()
        checked(list, self._stack[-1]).extend(values)

    def _setitem(self, _) -> None:
        value, key = self._pop(), self._pop()
        self._store([key, value])

    def _setitems(self, _) -> None:
        self._store(self._since_mark())

    def _store(self, flat: list[Any]) -> None:
        target = checked(dict, self._stack[-1])
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, (str, int)):  # hashing or printing others may take forever
                raise self.place.error(f"a dictionary has a {type(key).__name__} as a key")
            if key in target:
                raise self.place.error(f"key '{printable(key)}' occurs twice")
            target[key] = value

    def _build(self, _) -> None:
        """Ignore attributes of the object below: those of a state dict (`_metadata`) do not concern
        tensors.
        """
        self._pop()
        if not isinstance(self._stack[-1], dict):
            raise self.place.error(
                f"its pickle sets attributes of {kind_of(self._stack[-1])}; nothing was executed"
            )

    def _global(self, argument: str) -> None:
        self._push(named(self.place, *argument.split(" ", 1)))

    def _stack_global(self, _) -> None:
        name, module = self._pop(), self._pop()
        self._push(named(self.place, checked(str, module), checked(str, name)))

    def _binpersid(self, _) -> None:
        self._push(storage_of(self.place, self._pop()))

    def _reduce(self, _) -> None:
        arguments, function = checked(tuple, self._pop()), self._pop()
        self._push(rebuilt(self.place, function, arguments))

    _newobj = _reduce


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

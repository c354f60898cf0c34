"""Results of `iqforge bench` as md, csv, json, jsonl or sql, in the layout of llama-bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from .flags import OPTIONS, Option

FORMATS = ("md", "csv", "json", "jsonl", "sql", "none")


class Printer:
    """Takes records as they come. `begin`, `add` for each, `end`."""

    def __init__(self, write: Callable[[str], None]):
        self.write = write

    def begin(self) -> None:
        """Write what precedes all results."""

    def add(
        self, record: dict[str, Any], samples_ns: Sequence[int], samples_ts: Sequence[float]
    ) -> None:
        """Write a result: its fields, and its samples in nanoseconds and tokens per second."""

    def end(self) -> None:
        """Write what follows all results."""


class Markdown(Printer):
    """A table: model, size, parameters, backend, settings that were chosen, test, speed, and how
    near that is to the device's limit.
    """

    _WIDTHS: ClassVar = {
        "model": -30,
        "size": 10,
        "params": 10,
        "backend": -10,
        "sm": -6,
        "ts": -8,
        "test": 13,
        "t/s": 18,
        "GB/s": 7,
        "TFLOP/s": 7,
        "of limit": 12,
    }

    def __init__(
        self,
        write: Callable[[str], None],
        varied: Sequence[Option],
        cuda: bool,
        limits: str = "",
        tests: Sequence[str] = (),
        split: bool = False,
    ):
        """tests: labels of what will be measured, which the column of tests has to hold. split:
        several devices share the model.
        """
        super().__init__(write)
        self._test_width = max([self._WIDTHS["test"], *map(len, tests)])
        shown = {option.field for option in varied}
        shown |= {"n_gpu_layers"} if cuda else {"n_threads"}
        self.options = [option for option in OPTIONS if option.field in shown]
        # These two come first.
        self.options.sort(key=lambda option: option.field not in ("n_gpu_layers", "n_threads"))
        self.columns = [
            "model",
            "size",
            "params",
            "backend",
            *(option.column for option in self.options),
            *(("sm", "ts") if split else ()),
            "test",
            "t/s",
            "GB/s",
            "TFLOP/s",
        ]
        self.columns += ["of limit"] if cuda else []
        self.limits, self.build = limits, ""

    def begin(self) -> None:
        self._line(dict(zip(self.columns, self.columns)))
        self.write(
            "|"
            + "|".join(
                f" {'-' * (abs(w) - 1)}{':' if w > 0 else '-'} "
                for w in map(self._width, self.columns)
            )
            + "|"
        )

    def add(self, record, samples_ns, samples_ts) -> None:
        cells = {
            "model": record["model_type"],
            "size": _bytes(record["model_size"]),
            "params": _count(record["model_n_params"]),
            "backend": "CUDA" if record["cuda"] else "CPU",
            "sm": record["split_mode"],
            "ts": record["tensor_split"],
            "test": record["test"],
            "t/s": f"{record['avg_ts']:.2f} ± {record['stddev_ts']:.2f}",
            "GB/s": _number(record["gbytes_per_s"], 0 if record["cuda"] else 1),
            "TFLOP/s": _number(record["tflop_per_s"], 1 if record["cuda"] else 3),
            "of limit": _share(record),
        }
        for option in self.options:
            value = record[option.field]
            cells[option.column] = str(int(value) if isinstance(value, bool) else value)
        self.build = f"{record['build_commit']} ({record['build_number']})"
        self._line(cells)

    def end(self) -> None:
        if self.limits:
            self.write(f"\nlimits: {self.limits}")
        self.write(f"\nbuild: {self.build}")

    def _line(self, cells: dict[str, str]) -> None:
        shown = (
            (
                cells[c].rjust(self._width(c))
                if self._width(c) > 0
                else cells[c].ljust(-self._width(c))
            )
            for c in self.columns
        )
        self.write("| " + " | ".join(shown) + " |")

    def _width(self, column: str) -> int:
        if column == "test":
            return self._test_width
        if column in self._WIDTHS:
            return self._WIDTHS[column]
        option = next(o for o in self.options if o.column == column)
        width = len(column) if column in ("ngl", "threads") else max(len(column), 6)
        return width if option.kind in (int, bool) else -width


class Csv(Printer):
    """A header, then every value in double quotes."""

    _header_done = False

    def add(self, record, samples_ns, samples_ts) -> None:
        if not self._header_done:
            self.write(",".join(record))
            self._header_done = True
        self.write(
            ",".join('"' + plain(value).replace('"', '""') + '"' for value in record.values())
        )


class Json(Printer):
    """An array of objects."""

    _first = True

    def begin(self) -> None:
        self.write("[")

    def add(self, record, samples_ns, samples_ts) -> None:
        body = json.dumps(
            _with_samples(record, samples_ns, samples_ts), indent=2, ensure_ascii=False
        )
        self.write(
            ("" if self._first else "  ,\n") + "\n".join(f"  {line}" for line in body.splitlines())
        )
        self._first = False

    def end(self) -> None:
        self.write("]")


class JsonLines(Printer):
    """One object per line."""

    def add(self, record, samples_ns, samples_ts) -> None:
        self.write(json.dumps(_with_samples(record, samples_ns, samples_ts), ensure_ascii=False))


class Sql(Printer):
    """A table and rows for it."""

    _table_done = False

    def add(self, record, samples_ns, samples_ts) -> None:
        if not self._table_done:
            columns = ",\n".join(f"  {name} {_sql_type(value)}" for name, value in record.items())
            self.write(f"CREATE TABLE IF NOT EXISTS test (\n{columns}\n);\n")
            self._table_done = True
        self.write(
            f"INSERT INTO test ({', '.join(record)}) VALUES"
            f" ({', '.join(_sql(value) for value in record.values())});"
        )


def printer(
    form: str,
    write: Callable[[str], None],
    varied: Sequence[Option],
    cuda: bool,
    limits: str = "",
    tests: Sequence[str] = (),
    split: bool = False,
) -> Printer:
    """Return the printer of a format; `none` prints nothing."""
    if form == "md":
        return Markdown(write, varied, cuda, limits, tests, split)
    return {"csv": Csv, "json": Json, "jsonl": JsonLines, "sql": Sql, "none": Printer}[form](write)


def plain(value: Any) -> str:
    """A value as llama-bench writes it into text: booleans as 0 and 1, floats with six digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _with_samples(record, samples_ns, samples_ts) -> dict[str, Any]:
    return record | {"samples_ns": list(samples_ns), "samples_ts": list(samples_ts)}


def _sql_type(value: Any) -> str:
    # What is not known in the first row is one of our rates.
    if isinstance(value, float) or value is None:
        return "REAL"
    return "INTEGER" if isinstance(value, int) else "TEXT"


def _sql(value: Any) -> str:
    if value is None:
        return "NULL"
    return "'" + plain(value).replace("'", "''") + "'"


def _bytes(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(record: dict[str, Any]) -> str:
    for field, word in (("share_of_bandwidth", "bw"), ("share_of_flop_rate", "flop")):
        if record[field] is not None:
            return f"{100 * record[field]:.1f} % {word}"
    return ""

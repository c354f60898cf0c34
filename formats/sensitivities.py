"""Files of sensitivities: what `iqforge sensitivity` measured on each tensor, as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..errors import MalformedFileError, NotFoundError
from .output import PartFile

FORMAT = "iqforge sensitivities 1"


@dataclass(frozen=True)
class Probe:
    """A measurement: storing `tensors` with relative squared errors that add up to `error` gave a
    mean KL divergence of `kld`.
    """

    tensors: tuple[str, ...]
    error: float
    kld: float


def save_probes(path: str | os.PathLike, probes: Sequence[Probe], **how: object) -> None:
    """Write measurements and `how` they were made as JSON."""
    content = {"format": FORMAT, **how, "probes": [asdict(probe) for probe in probes]}
    with PartFile(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def load_probes(path: str | os.PathLike) -> list[Probe]:
    """Read a file of `save_probes`. Raise NotFoundError or MalformedFileError naming the file."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise MalformedFileError(
                f"is not a sensitivity file: expected the format '{FORMAT}'", file=path
            )
        probes = [
            Probe(tuple(map(str, found["tensors"])), float(found["error"]), float(found["kld"]))
            for found in content["probes"]
        ]
    except FileNotFoundError:
        raise NotFoundError(
            "sensitivity file not found; iqforge sensitivity makes one", file=path
        ) from None
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror}", file=path) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedFileError(f"is not a sensitivity file: {error}", file=path) from None
    for number, probe in enumerate(probes):
        if not (
            math.isfinite(probe.kld)
            and math.isfinite(probe.error)
            and probe.error >= 0
            and probe.kld >= 0
        ):
            raise MalformedFileError(
                f"probe {number} has error {probe.error} and divergence {probe.kld}", file=path
            )
    return probes

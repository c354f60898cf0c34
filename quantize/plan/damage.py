"""How much worse a model gets when a tensor is stored with some error: what types are chosen by for
a given size.

Damage is the mean KL divergence, in nats per token, of the model's predictions. To first order it
is a sum over tensors of

    sensitivity * error,   error = sum w e^2 / sum w x^2

with the importances w, errors e and values x of the tensor's weights: the energy that the error
adds to the tensor's products, as part of their energy. The same tensor's divergence divided by its
error is the same within some percent for every type from 2 to 5 bits, so one measurement per tensor
does for all types (docs/benchmarks/budget.md). Sensitivities are measured (`Sensitivities.load`),
or taken from the role that a tensor has (`Sensitivities.of_roles`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ...errors import MalformedFileError, NotFoundError, UsageError
from ...formats.output import PartFile
from ...formats.source import TensorInfo
from .roles import OUTPUT, TOKEN_EMBEDDING, ModelFacts

FORMAT = "iqforge sensitivities 1"

# Sensitivity of all tensors of a role together, shared out evenly among the layers: every layer
# adds its part to one sum (the residual stream), so that the same relative error in one layer of
# many does so much less. The first part found in a name counts; the last is for the rest. Geometric
# means of what `iqforge sensitivity` measured on a dense model of 5 layers and one with experts of
# 3, of which the second's were scaled to the same sum, as only ratios count:
# docs/benchmarks/budget.md.
_BY_PART = (
    ("attn_qkv", 0.8),
    ("attn_q", 0.16),
    ("attn_k", 0.22),
    ("attn_v", 0.47),
    ("attn_output", 0.55),
    ("ffn_gate", 0.51),
    ("ffn_up", 0.35),
    ("ffn_down", 0.88),
    ("", 0.5),
)
_OUTPUT, _EMBEDDING = 0.95, 0.25
# a measured sensitivity counts as at least this part of what the role suggests: the text hardly met
# the tensor
_LEAST_OF_ROLE = 0.1


@dataclass(frozen=True)
class Probe:
    """What storing `tensors` with relative squared errors that add up to `error` did to a model: a
    mean KL divergence of `kld`.
    """

    tensors: tuple[str, ...]
    error: float
    kld: float


@dataclass(frozen=True)
class Sensitivities:
    """Divergence per unit of relative squared error, by the name of a tensor. `note` says where
    they are from.
    """

    values: Mapping[str, float]
    note: str

    @classmethod
    def of_roles(cls, tensors: Sequence[TensorInfo], facts: ModelFacts) -> Sensitivities:
        """By what the names of tensors say, without having seen the model run."""
        return cls(
            {tensor.name: role_sensitivity(tensor.name, facts) for tensor in tensors}, "roles"
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike, tensors: Sequence[TensorInfo], facts: ModelFacts
    ) -> Sensitivities:
        """Those of a file that `save_probes` wrote, each halfway (geometrically) to what its role
        suggests: a measurement is of one text and one type, and taken alone does worse where
        divergences do not add up, as with experts (docs/benchmarks/budget.md).

        NotFoundError, MalformedFileError; UsageError for a tensor that it does not have.
        """
        measured: dict[str, float] = {}
        for probe in load_probes(path):
            measured |= dict.fromkeys(
                probe.tensors, probe.kld / probe.error if probe.error else 0.0
            )
        for tensor in tensors:
            if tensor.name not in measured:
                raise UsageError(
                    f"{os.fspath(path)} has no sensitivity of it: was it measured on another"
                    " model?",
                    tensor=tensor.name,
                )
        roles = {tensor.name: role_sensitivity(tensor.name, facts) for tensor in tensors}
        logs = [
            math.log(measured[name] / role) for name, role in roles.items() if measured[name] > 0
        ]
        scale = math.exp(math.fsum(logs) / len(logs)) if logs else 1.0
        values = {
            name: math.sqrt(max(measured[name], _LEAST_OF_ROLE * scale * role) * scale * role)
            for name, role in roles.items()
        }
        return cls(values, os.path.basename(path))

    def damage(self, name: str, error: float) -> float:
        """Predicted mean divergence, in nats, of a tensor stored with this relative squared error."""
        return self.values[name] * error


def role_sensitivity(name: str, facts: ModelFacts) -> float:
    """What the role of a tensor suggests, in nats per unit of relative squared error."""
    if name == OUTPUT:
        return _OUTPUT
    if name == TOKEN_EMBEDDING:
        return _EMBEDDING + (_OUTPUT if facts.tied else 0.0)
    return next(value for part, value in _BY_PART if part in name) / max(1, facts.n_layers)


def save_probes(path: str | os.PathLike, probes: Sequence[Probe], **how: object) -> None:
    """Write measurements, and `how` they were made, as JSON."""
    content = {"format": FORMAT, **how, "probes": [asdict(probe) for probe in probes]}
    with PartFile(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def load_probes(path: str | os.PathLike) -> list[Probe]:
    """What `save_probes` wrote. NotFoundError or MalformedFileError naming the file."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise MalformedFileError(
                f"is no file of sensitivities: expected the format '{FORMAT}'", file=path
            )
        probes = [
            Probe(tuple(map(str, found["tensors"])), float(found["error"]), float(found["kld"]))
            for found in content["probes"]
        ]
    except FileNotFoundError:
        raise NotFoundError(
            "no such file of sensitivities; iqforge sensitivity makes one", file=path
        ) from None
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror}", file=path) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedFileError(f"is no file of sensitivities: {error}", file=path) from None
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

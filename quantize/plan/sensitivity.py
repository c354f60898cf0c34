"""Predict how much worse a model gets when a tensor is stored with some error. The choice of types
for a given size depends on it.

Damage is the mean KL divergence, in nats per token, of the model's predictions. To first order it
is a sum over tensors of

    sensitivity * error,   error = sum w e^2 / sum w x^2

with the importances w, errors e and values x of the tensor's weights: the energy that the error
adds to the tensor's products, relative to their energy. The divergence of a tensor divided by its
error is the same within a few percent for every type from 2 to 5 bits, so one measurement per
tensor is enough for all types (docs/benchmarks/budget.md). Sensitivities are measured
(`Sensitivities.load`), or estimated from the role of a tensor (`Sensitivities.of_roles`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...formats.sensitivities import load_probes
from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT, TOKEN_EMBEDDING, TensorName
from .roles import ModelFacts

# Sensitivity of all tensors of a role together, divided evenly among the layers: every layer adds
# its share to one sum (the residual stream), so that the same relative error matters less in one
# layer of many. Geometric means of the measurements of `iqforge sensitivity` on a dense model of 5
# layers and a model with experts of 3, the latter scaled to the same sum, as only ratios count:
# docs/benchmarks/budget.md.
_BY_PRODUCT = {
    "attn_qkv": 0.8,
    "attn_q": 0.16,
    "attn_k": 0.22,
    "attn_v": 0.47,
    "attn_output": 0.55,
    "ffn_gate": 0.51,
    "ffn_up": 0.35,
    "ffn_down": 0.88,
    "": 0.5,
}
_OUTPUT, _EMBEDDING = 0.95, 0.25
# A measured sensitivity counts as at least this fraction of the role's. If it is smaller, the text
# has hardly used the tensor.
_LEAST_OF_ROLE = 0.1


@dataclass(frozen=True)
class Sensitivities:
    """Divergence per unit of relative squared error, by tensor name. note: where they come from.
    is_measured: on this model; otherwise only their ratios mean something.
    """

    values: Mapping[str, float]
    note: str
    is_measured: bool = False

    @classmethod
    def of_roles(cls, tensors: Sequence[TensorInfo], facts: ModelFacts) -> Sensitivities:
        """Estimate sensitivities from the names of tensors, without running the model."""
        return cls(
            {tensor.name: role_sensitivity(tensor.name, facts) for tensor in tensors}, "roles"
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike, tensors: Sequence[TensorInfo], facts: ModelFacts
    ) -> Sensitivities:
        """Read a file of `save_probes`. Each sensitivity is the geometric mean of the measured one
        and that of the role: a measurement is of one text and one type, and alone does worse where
        divergences do not add up, as with experts (docs/benchmarks/budget.md).

        Raise NotFoundError, MalformedFileError, or UsageError for a tensor that the file lacks.
        """
        measured: dict[str, float] = {}
        for probe in load_probes(path):
            measured |= dict.fromkeys(
                probe.tensors, probe.kld / probe.error if probe.error else 0.0
            )
        for tensor in tensors:
            if tensor.name not in measured:
                raise UsageError(
                    f"{os.fspath(path)} has no sensitivity of this tensor: was it measured on"
                    " another model?",
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
        return cls(values, os.path.basename(path), is_measured=True)

    def damage(self, name: str, error: float) -> float:
        """Predict the mean divergence, in nats, of storing a tensor with this relative squared
        error.
        """
        return self.values[name] * error


def role_sensitivity(name: str, facts: ModelFacts) -> float:
    """Return the typical sensitivity of a tensor's role, in nats per unit of relative squared
    error.
    """
    if name == OUTPUT:
        return _OUTPUT
    if name == TOKEN_EMBEDDING:
        return _EMBEDDING + (_OUTPUT if facts.tied else 0.0)
    return _BY_PRODUCT[TensorName.parse(name).product] / max(1, facts.n_layers)

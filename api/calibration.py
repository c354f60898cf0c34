"""`quantize_models` with calibration texts: join the runtime, which runs them through the model
layer by layer, and the run, which rounds one tensor after another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .models import collecting_options, open_model, texts_of
from .source import PathLike, excluded_names, renamed_imatrix, selected_imatrix

if TYPE_CHECKING:
    import numpy as np

    from ..formats.source import Source
    from ..imatrix.data import Imatrix
    from ..quantize.options import QuantizeOptions
    from ..quantize.plan.changes import Changes
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.rounding.late import LateRounding, LayerChoices
    from ..quantize.rounding.methods import Rounders
    from ..quantize.rounding.rows import RowMetrics
    from ..quantize.run.piece import ImportanceLookup

log = logging.getLogger(__name__)


class Calibration:
    """The second moments of a model's layers on calibration texts, collected when they are needed.

    src: the model. folder: where the states between layers are kept, in a file without a name.
    Close it.
    """

    def __init__(
        self,
        src: PathLike,
        texts: PathLike | Sequence[PathLike],
        options: QuantizeOptions,
        folder: str,
    ):
        from ..runtime import let_threads_sleep

        let_threads_sleep()  # before torch is imported
        import torch

        from ..imatrix.moments.layers import LayerMoments
        from ..imatrix.moments.options import HessianOptions
        from ..imatrix.moments.sequential import SequentialMoments
        from ..imatrix.texts import Text
        from ..quantize.rounding.kernels.feedback import product
        from ..runtime.layerwise import layers_are_separate
        from ..runtime.options import LoadOptions

        self._options = options
        given = [Text(*one) for several in texts_of(texts) for one in several]
        if not given:
            raise UsageError("there is no calibration text")
        # Products on the CPU depend on torch's number of threads: that of the run must not decide.
        self._threads = torch.get_num_threads()
        # The first of several devices: chunks are not shared among them.
        device = options.device.split(",")[0]
        load = LoadOptions(device=device, threads=os.cpu_count() or 1)
        load = replace(load, precision="f32") if options.sequential else collecting_options(load)
        self._model = open_model(src, load)
        try:
            if self._model.precision != "f32" and not layers_are_separate(self._model):
                self._model.close()
                self._model = open_model(src, replace(load, precision="f32"))
            self._precision = self._model.precision  # before it is widened
            collecting = HessianOptions(
                n_ctx=options.calibrate_ctx,
                chunks=options.calibrate_chunks,
                batch_tokens=2048 if self._model.precision == "f32" else 8192,
            )
            of_model = self._model, given, collecting, folder
            self._layers = (
                SequentialMoments(*of_model, product)
                if options.sequential
                else LayerMoments(*of_model)
            )
        except BaseException:
            self._model.close()
            raise
        self.texts = [
            [hashlib.sha256(str(one.content).encode("utf-8", "surrogatepass")).hexdigest(), n]
            for one, n in zip(given, self._layers.tokens, strict=True)
        ]
        self._names = tuple(os.path.basename(one.name) for one in given if one.name)

    def close(self) -> None:
        import torch

        self._layers.close()
        self._model.close()
        torch.set_num_threads(self._threads)

    def __enter__(self) -> Calibration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def planned_imatrix(self) -> Imatrix:
        """Return an importance matrix with the names and shapes of all entries, to plan with. Its
        values are ones.
        """
        from ..imatrix.moments.lookup import planned_entries

        return self._imatrix(planned_entries(self._layers.inputs.values()))

    def _imatrix(self, entries: dict[str, Any]) -> Imatrix:
        from ..imatrix.data import Imatrix

        n_ctx = self._options.calibrate_ctx
        return Imatrix(entries, self._layers.n_chunks, n_ctx, self._names)

    def lookup(self, changes: Changes, model: Source) -> ImportanceLookup:
        """Return how the run looks up importances: the layer of a tensor is collected first.
        `model` is the source before `changes`.
        """
        from ..formats.tensor_names import TensorName
        from ..imatrix.moments.lookup import with_all_experts

        before = changes.names_before(model)
        excluded = excluded_names(changes, model)

        def importance(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
            layer = TensorName.parse(before.get(name, name)).layer
            if layer is None or name in excluded:
                return None
            self._layers.advance(layer)
            own = {
                name: entry
                for name, entry in self._layers.entries.items()
                if TensorName.parse(name).layer == layer
            }
            used = selected_imatrix(self._imatrix(with_all_experts(own)), changes)
            renamed = renamed_imatrix(used, changes)
            return None if renamed is None else renamed.importance(name, shape)

        return importance

    def roundings(
        self,
        changes: Changes,
        model: Source,
        source: Source,
        planned: Sequence[PlannedTensor],
        lookup: ImportanceLookup | None,
        n_finished: int = 0,
        rounders: Rounders | None = None,
    ) -> dict[str, LateRounding]:
        """Return how the tensors of a plan are rounded, by name of the target. The first
        `n_finished` are made already. rounders: where rows are rounded, by default the CPU.
        """
        from ..quantize.rounding.methods import ON_CPU, guides
        from ..quantize.rounding.rows import RowMetrics

        before = changes.names_before(model)
        rows = RowMetrics(source) if self._options.couple_rows else None
        found = {}
        for index, plan in enumerate(planned):
            layer = self._layer_of(plan, before)
            if plan.kept or not plan.target.type.is_quantized or layer is None:
                continue
            if index >= n_finished or self._options.validate:
                self._layers.wanted.add(layer)
            used = changes.uses_entry(before.get(plan.source.name, plan.source.name))
            if index < n_finished or not used or plan.symmetric or not guides(plan.target.type):
                continue
            self._layers.needed[layer] += 1
            found[plan.target.name] = self._rounding(
                source, plan, layer, before, lookup, rounders or ON_CPU, rows
            )
        return found

    def choices(
        self,
        changes: Changes,
        model: Source,
        planned: Sequence[PlannedTensor],
        found: Mapping[str, LateRounding],
        noted: Mapping[str, dict[str, Any]],
    ) -> list[LayerChoices]:
        """Return how the tensors of a plan were made, by role: `found` by this run, others by an
        earlier one, which has `noted` that, or by the search.
        """
        from ..quantize.rounding.late import Made, MadeBefore, layer_choices, searched

        before = changes.names_before(model)

        def has_moments(plan: PlannedTensor) -> bool:
            used = changes.uses_entry(before.get(plan.source.name, plan.source.name))
            return self._layer_of(plan, before) is not None and used and not plan.symmetric

        made: dict[str, Made] = {**searched(planned, has_moments)}
        made |= {name: MadeBefore.of_record(record) for name, record in noted.items()}
        made |= found
        names = [plan.target.name for plan in planned]
        return layer_choices([made[name] for name in names if name in made])

    def _rounding(
        self,
        source: Source,
        plan: PlannedTensor,
        layer: int,
        before: dict[str | None, str],
        lookup: ImportanceLookup | None,
        rounders: Rounders,
        rows: RowMetrics | None,
    ) -> LateRounding:
        from ..imatrix.moments.lookup import moments_of
        from ..imatrix.moments.sequential import SequentialMoments
        from ..quantize.rounding.late import Late, LateRounding
        from ..quantize.run.parallel import thread_count

        name, shape = plan.source.name, plan.source.shape

        def find() -> Late:
            store = self._layers.layer(layer)
            named, weights = before.get(name, name), None if lookup is None else lookup(name, shape)
            found = None if store is None else moments_of(store, named, shape)
            if found is None or not isinstance(self._layers, SequentialMoments):
                return Late(found, weights)
            return Late(found, weights, self._layers.targets(layer, named))

        return LateRounding(
            source,
            plan,
            find,
            lambda: self._layers.done(layer),
            shrink=self._options.hessian_shrink,
            refine=self._options.refine,
            threads=thread_count(self._options.threads),
            rounders=rounders,
            one_text=len(self.texts) == 1,
            rows=rows,
            stretch=self._options.stretch,
        )

    def follow(
        self,
        changes: Changes,
        model: Source,
        planned: Sequence[PlannedTensor],
        stored: Callable[[str], np.ndarray],
    ) -> set[str]:
        """Let layers read what the layers before them give with their rounded tensors. stored:
        returns the bytes of a tensor of the output that is written. Return the targets before which
        all others must be written; none without `sequential`.

        A tensor that comes after one of a later layer is not followed, and a warning says so. Raise
        UsageError for one that the model does not have in this form.
        """
        from ..imatrix.moments.sequential import RoundedTensor, SequentialMoments
        from ..quantize.rounding.followed import followed_tensors

        if not isinstance(self._layers, SequentialMoments):
            return set()
        before = changes.names_before(model)
        found = followed_tensors(
            planned,
            lambda plan: before.get(plan.source.name, plan.source.name),
            lambda plan: self._layer_of(plan, before),
            {tensor.name: tensor.shape for tensor in self._model.source.tensors},
        )
        if found.late:
            log.warning(
                "%s: later layers are not told of the errors of tensors that come after them: %s%s",
                self._model.source.path,
                found.late[0],
                f" and {len(found.late) - 1} more" if len(found.late) > 1 else "",
            )

        def rounded(layer: int | None) -> list[RoundedTensor]:
            return [
                RoundedTensor(name, plan.target.type, stored(plan.target.name))
                for name, plan in found.tensors[layer]
            ]

        self._layers.rounded = rounded
        return found.waits

    @staticmethod
    def _layer_of(plan: PlannedTensor, before: dict[str | None, str]) -> int | None:
        from ..formats.tensor_names import TensorName

        return TensorName.parse(before.get(plan.source.name, plan.source.name)).layer

    def key(self) -> str:
        """Return what the moments depend on besides the model, the texts and the options."""
        import torch

        return json.dumps([self._model.device.type, self._precision, torch.__version__])

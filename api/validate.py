"""Read files back and check them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..formats.options import from_keywords
from .source import PathLike, loaded_imatrix, open_source

if TYPE_CHECKING:
    from ..imatrix.data import Imatrix
    from ..quantize.options import ValidateOptions
    from ..quantize.run.report import Checked


def validate_model(
    path: PathLike,
    against: PathLike | None = None,
    imatrix: PathLike | Imatrix | None = None,
    *,
    options: ValidateOptions | None = None,
    progress: Callable[[int, int, Checked], None] | None = None,
    **keywords: Any,
) -> list[Checked]:
    """Decode every tensor of a GGUF file (also the first shard of a split one) and look for NaN and
    infinity.

    against: the file or checkpoint folder that it was made of: tensors of one type must have the
    same bytes, the errors of others are measured, with `imatrix` weighted too. keywords: fields of
    `quantize.options.ValidateOptions`, which win over `options`; force: use an importance matrix
    that seems to belong to another model. progress: called with number, count and result of every
    tensor. A tensor that is not sound has a `fault`.

    Raise the errors of opening the files, ImatrixError for an importance matrix of another model,
    and ShapeError for a tensor that `against` lacks or has in another shape.
    """
    from ..formats.gguf.reader import open_gguf
    from ..imatrix.belongs import check_belongs
    from ..quantize.options import ValidateOptions
    from ..quantize.report.validate import validate_tensors
    from ..quantize.run.parallel import thread_count

    [o] = from_keywords(validate_model, keywords, (ValidateOptions, options))
    loaded, found = loaded_imatrix(imatrix), []
    with ExitStack() as opened:
        written = opened.enter_context(open_gguf(path))
        source = None if against is None else opened.enter_context(open_source(against))
        if loaded is not None and source is not None:
            loaded = check_belongs(loaded, written.tensors, force=o.force)
        for checked in validate_tensors(
            written,
            source,
            importance=None if loaded is None else loaded.importance,
            threads=thread_count(o.threads),
        ):
            found.append(checked)
            if progress is not None:
                progress(len(found) - 1, len(written.tensors), checked)
    return found

"""`iqforge auto` from Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import printable
from ..formats.options import from_keywords
from .figures import size_of

if TYPE_CHECKING:
    from ..api.source import PathLike
    from ..runtime.evaluate.comparison import Comparison
    from ..runtime.options import LoadOptions
    from .auto import Auto
    from .auto_options import AutoOptions
    from .auto_plan import AutoPlan


@dataclass(frozen=True)
class AutoResult:
    """What `auto_model` has made: the quantized file, the importance matrix, the types of all
    tensors, the model card, the page and the figures as JSON; and how it compares with the
    unquantized model.
    """

    model: Path
    imatrix: Path
    types: Path
    card: Path
    page: Path
    figures: Path
    comparison: Comparison

    def __repr__(self) -> str:
        """Say the size, the loss on the first text and the path, in a line."""
        [made] = self.comparison.models
        kld = made.texts[0].kld or (0.0, 0.0)
        return (
            f"<AutoResult {size_of(made.file_bytes)}, {made.bits_per_weight:.2f} bits per weight,"
            f" mean KLD {kld[0]:.5f}: {printable(self.model, 400)}>"
        )


def auto_model(
    source: PathLike,
    folder: PathLike | None = None,
    *,
    options: AutoOptions | None = None,
    load: LoadOptions | None = None,
    on_line: Callable[[str], None] | None = None,
    **keywords: Any,
) -> AutoResult:
    """Make a quantized file of a given size, with a model card and the figures that prove it:
    convert, collect an importance matrix, choose the type of every tensor, quantize, read back and
    compare.

    source: a checkpoint folder, `hf://REPO[@REVISION]`, or an unquantized GGUF file. folder: for
    everything that is written, by default the model's name with `-gguf`. A run that was
    interrupted resumes there, and gives the same bytes. on_line: is given what the command prints.
    keywords: fields of `proof.auto_options.AutoOptions` and of `runtime.options.LoadOptions`; they
    win over `options` and `load`.

    - Exactly one of target_size (bytes of the file, or a text like "12G"), target_bpw (bits per
      weight), and fit_gpu (memory of a GPU, with a cache of `context` tokens, 8192).
    - texts: calibration texts, by default the one that comes with iqforge. tests: texts to measure
      on, by default the last fifth of every calibration text.
    - n_ctx (512), chunks (all), test_chunks (20): see `collect_imatrix` and `measure_perplexity`.
    - types, damage: see `recipe_for_target`. sensitivity (True): measure how much each tensor
      matters, for models of up to a billion parameters. name: of the model and its files. clean:
      remove the unquantized file at the end.

    Raise UsageError for a target that cannot be reached, before anything is written.
    """
    chain = opened_chain(auto_model, source, folder, options, load, keywords, on_line=on_line)
    chain.plan()  # checks the disk
    comparison, files = chain.run(), chain.files
    return AutoResult(
        files.out, files.imatrix, files.types, files.card, files.page, files.figures, comparison
    )


def plan_auto(
    source: PathLike,
    folder: PathLike | None = None,
    *,
    options: AutoOptions | None = None,
    load: LoadOptions | None = None,
    **keywords: Any,
) -> AutoPlan:
    """Return what `auto_model` with the same arguments will do, how long that takes, and how much
    disk space. Raise UsageError for a target that cannot be reached, OutputError if the disk has
    too little space.
    """
    return opened_chain(plan_auto, source, folder, options, load, keywords).plan()


def opened_chain(
    function: Callable[..., Any],
    source: PathLike,
    folder: PathLike | None,
    options: AutoOptions | None,
    load: LoadOptions | None,
    keywords: dict[str, Any],
    *,
    on_line: Callable[[str], None] | None = None,
    bars: bool = False,
) -> Auto:
    """Return the chain of a call of `function`. Without a folder it is named after the source."""
    from .. import api
    from ..api.models import warn_of_unused
    from ..runtime.options import LoadOptions
    from .auto_options import AutoOptions

    chosen, loading = from_keywords(function, keywords, (AutoOptions, options), (LoadOptions, load))
    _ = chosen.target  # its error before anything is imported or read
    from ..runtime.start_ranks import device_here
    from .auto import Auto

    warn_of_unused(loading, keywords)
    loading = replace(loading, device=str(device_here(loading)))
    path = os.fspath(source)
    name = os.path.basename(os.path.abspath(path.removeprefix("hf://").split("@")[0]))
    return Auto(
        api,
        path,
        Path(folder or f"{name.removesuffix('.gguf')}-gguf"),
        chosen,
        loading,
        write=on_line or _nothing,
        bars=bars,
    )


def _nothing(line: str) -> None:
    pass

"""Embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .models import opened_model, split_options
from .source import PathLike

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.text_options import EmbeddingOptions


def embed(
    model: PathLike | Model,
    texts: str | Sequence[str],
    *,
    options: EmbeddingOptions | None = None,
    load: LoadOptions | None = None,
    **keywords: Any,
) -> list[np.ndarray]:
    """Return an embedding of every text: what the model's last norm gives.

    model: a path, opened with `load`, or an open model. keywords: fields of
    `runtime.text_options.EmbeddingOptions` and, for a path, of `runtime.options.LoadOptions`; they
    win over `options` and `load`.

    - pooling: "mean" over the tokens, "cls" for the first one, "last" for the last one, each a
      float32[width], or "none" for float32[tokens, width]; by default what the file says, or
      "none".
    - normalize (2): -1 for no normalization, 0 for integers up to 32760, p for the p-norm.
    """
    from ..runtime.evaluate.embedding import embedding, pooling_of
    from ..runtime.text_options import EmbeddingOptions

    options, load = split_options(embed, model, keywords, EmbeddingOptions, options, load)
    with opened_model(model, load) as loaded:
        pooling = pooling_of(loaded, options.pooling)
        given = [texts] if isinstance(texts, str) else texts
        return [embedding(loaded, text, pooling, options.normalize) for text in given]

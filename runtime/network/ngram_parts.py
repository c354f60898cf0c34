"""Builders of the layer that adds embeddings of n-grams."""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.block import Branch
from ..layers.recurrent.ngrams import Ngrams, NgramSpec
from .decoder import Decoder
from .gated_stream_parts import GatedStreamParts

_TABLE = "per_layer_token_embd"
_MOST_TOKENS = 64  # of an n-gram; no model has more than a few


def ngram_branches(d: Decoder, streams: GatedStreamParts) -> dict[int, tuple[Branch, ...]]:
    """Return the first branch of the layer that adds embeddings of n-grams; nothing if the file
    describes none. ConfigError, with file and key, for what is not possible.
    """
    p = d.p
    if not p.has("ple.layers"):
        return {}
    [layer], spec = p.integers("ple.layers", 1, most=d.n_layers - 1), _spec(d)
    width, rows = p.integer("embedding_length_per_layer_input"), d.w.n_rows_of(f"{_TABLE}.weight")
    needed = max(a + b for a, b in zip(spec.offsets, spec.sizes, strict=True))
    if needed > rows:
        raise ConfigError(
            f"heads of n-grams have {needed} rows, but {_TABLE}.weight has {rows}", file=p.file
        )
    n_in, all_streams = width * len(spec.sizes), streams.n * d.width
    at, w = f"blk.{layer}.ple", d.w
    module = Ngrams(
        spec,
        table=w.embedding(_TABLE, rows, width),
        key=w.linear(f"{at}_key", n_in, all_streams, role="ple_key", split="replicated"),
        value=w.linear(f"{at}_value", n_in, d.width, role="ple_value", split="replicated"),
        norms=[streams.norm(f"{at}_norm_{name}") for name in ("key", "query", "conv")],
        convolution=w.values(f"{at}_conv1d.weight", (all_streams, spec.taps)),
        place=d.n_layers + layer,
        tensors=(
            f"{_TABLE}.weight",
            *(
                f"{at}_{name}.weight"
                for name in ("key", "value", "norm_key", "norm_query", "norm_conv", "conv1d")
            ),
        ),
    )
    return {layer: (Branch(None, module, takes_batch=True, apart=True),)}


def _spec(d: Decoder) -> NgramSpec:
    p = d.p
    n_vocab = d.w.n_rows_of("token_embd.weight")
    size = p.integer("ple.ngram_size", least=2, most=_MOST_TOKENS)
    heads = (size - 1) * p.integer("ple.heads_per_ngram")
    # Tokens times multipliers are integers of 64 bits.
    most = (2**63 - 1) // n_vocab
    return NgramSpec(
        size,
        p.integer("ple.eos_token_id", least=0, most=n_vocab - 1),
        p.integer("ple.conv_kernel"),
        p.integers("ple.layer_multipliers", size, least=1, most=most),
        p.integers("ple.head_offsets", heads),
        p.integers("ple.head_vocab_sizes", heads, least=1),
    )

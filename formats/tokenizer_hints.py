"""Keys for properties of tokenizers that GGUF's usual keys cannot say.

The converter writes one only where a tokenizer differs from what its name or model family implies,
so that most files have none of them. Other runtimes ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence

# Bool: texts are normalized to Unicode's composed form (NFC). Implied by `tokenizer.ggml.pre`.
NFC_KEY = "tokenizer.ggml.normalizer.nfc"
# Bools: how WordPiece normalizes texts, both true by default.
LOWERCASE_KEY = "tokenizer.ggml.normalizer.lowercase"
STRIP_ACCENTS_KEY = "tokenizer.ggml.normalizer.strip_accents"
# Where SentencePiece BPE puts a space. "always": in front of every stretch of text between added
# tokens, not only of the whole text. "metaspace-always", "metaspace-first": in front of every
# stretch, or of the whole text, but of none that begins with a space, as a `Metaspace` step does.
SPACE_PREFIX_KEY = "iqforge.tokenizer.space_prefix"
# Ids of added tokens that take the whitespace before them, and after them.
LSTRIP_KEY = "iqforge.tokenizer.lstrip"
RSTRIP_KEY = "iqforge.tokenizer.rstrip"

_CONTROL = 3
# RoBERTa and its relatives take the spaces before a mask.
_ROBERTA = ("roberta-bpe", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es")


def implied_strips(
    model: str, pre: str, family: str, tokens: Sequence[str], types: Sequence[int]
) -> tuple[set[int], set[int]]:
    """Return the ids of tokens that take the whitespace before them, and after them, in files
    without a key that says so.

    model, pre: the values of these keys. family: `general.architecture`.
    """
    left = {
        i
        for i, token in enumerate(tokens)
        if (token == "<mask>" and (pre in _ROBERTA or model == "t5"))
        or (token == "[MASK]" and pre == "modern-bert")
    }
    right = set()
    if family == "phi3" and model == "llama":  # Phi-3's marks around turns; Phi-4's model is gpt2
        right = {
            i
            for i, (token, type) in enumerate(zip(tokens, types))
            if type == _CONTROL and token.startswith("<|") and token != "<|endoftext|>"
        }
    return left, right

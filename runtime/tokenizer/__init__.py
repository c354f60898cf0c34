"""Tokenizers built from nothing but the `tokenizer.*` metadata of a GGUF file.

Each kind of vocabulary (`tokenizer.ggml.model`) has its own file: `byte_level` (gpt2), `spm`
(llama), `unigram` (t5), `characters` (gemma4) and `wordpiece` (bert). The work is done by the
packages `tokenizers` and `sentencepiece`; the files here turn metadata into what they take.
"""

from .stream import TextStream
from .tokenizer import Tokenizer
from .vocabulary import SpecialTokens, TokenType

__all__ = ["SpecialTokens", "TextStream", "TokenType", "Tokenizer"]

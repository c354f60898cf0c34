"""The pre-tokenizers of byte-level BPE vocabularies: GGUF name (`tokenizer.ggml.pre`) and regexes
that split a text.

The first regex cuts a text into its matches and the stretches between them, the second cuts every
piece again, and so on; the pieces are then mapped to bytes and merged. This is what a Hugging Face
`Sequence` of `Split` (behaviour `Isolated`) steps followed by `ByteLevel` does. The steps `Digits`
and `ByteLevel` with its own regex are written here as the equivalent regexes. Several names may
share one set of regexes.

Three more properties of these tokenizers have no usual key in GGUF, so they are part of what a name
means: `ignore_merges` takes a piece that is itself a token whole, without looking at merges; `nfc`
normalizes texts to Unicode's composed form (NFC) first; `add_bos` adds BOS. The keys
`tokenizer_hints.NFC_KEY` and `add_bos_token` of a file win over the last two.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import TokenizerError, printable
from . import pretokenizer_regexes as regexes_of
from .pretokenizer_regexes import (
    BYTE_LEVEL_REGEX,
    CONTRACTIONS,
    DIGIT_RUNS_REGEX,
    DIGIT_TRIPLES,
    SINGLE_DIGITS_REGEX,
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting. `names[0]` is the name given to a tokenizer that splits like this."""

    names: tuple[str, ...]
    regexes: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


# Where several entries have the same regexes, the first one that suits names a tokenizer.
_TABLE = [
    PreTokenizer(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
            *("midm-2.0", "jina-v5-nano"),
        ),
        (regexes_of.LLAMA3,),
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (regexes_of.LLAMA3,)),
    PreTokenizer(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "jina-v2-de"),
            *("jina-v2-es", "roberta-bpe", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais"),
            *("trillion", "granite-docling"),
        ),
        (BYTE_LEVEL_REGEX,),
    ),
    PreTokenizer(("olmo", "mpt", "modern-bert"), (BYTE_LEVEL_REGEX,), nfc=True),
    PreTokenizer(
        (*("starcoder", "smollm", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),),
        (SINGLE_DIGITS_REGEX, BYTE_LEVEL_REGEX),
    ),
    PreTokenizer(("command-r",), (SINGLE_DIGITS_REGEX, BYTE_LEVEL_REGEX), nfc=True),
    PreTokenizer(("qwen2",), (regexes_of.QWEN2,), nfc=True),
    PreTokenizer(
        (
            *("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"),
            *("kormo", "f2llmv2", "openpangu"),
        ),
        (regexes_of.QWEN2,),
    ),
    PreTokenizer(("qwen35",), (regexes_of.QWEN35,), nfc=True),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (regexes_of.GPT4O,)),
    PreTokenizer(("granite-embed-multi-97m",), (regexes_of.GPT4O,), ignore_merges=True),
    PreTokenizer(("tekken",), (regexes_of.TEKKEN,), ignore_merges=True, add_bos=True),
    PreTokenizer(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        (DIGIT_TRIPLES, regexes_of.HAN_AND_KANA, regexes_of.DEEPSEEK_V3),
    ),
    PreTokenizer(("deepseek-coder",), (*regexes_of.DEEPSEEK_CODER, SINGLE_DIGITS_REGEX)),
    PreTokenizer(("deepseek-llm",), (*regexes_of.DEEPSEEK_LLM, SINGLE_DIGITS_REGEX)),
    PreTokenizer(("kimi-k2",), (regexes_of.KIMI,), ignore_merges=True),
    PreTokenizer(("youtu",), (regexes_of.YOUTU_SCRIPTS, regexes_of.YOUTU), ignore_merges=True),
    PreTokenizer(("jais-2",), (regexes_of.JAIS2,)),
    PreTokenizer(("minicpm5",), (DIGIT_TRIPLES, regexes_of.MINICPM5), ignore_merges=True),
    PreTokenizer(("laguna",), (regexes_of.LINES, regexes_of.QWEN2)),
    PreTokenizer(("ufakzeka",), (regexes_of.UFAKZEKA,)),
    PreTokenizer(("seed-coder",), (regexes_of.SEED_CODER,)),
    PreTokenizer(("bailingmoe", "bailingmoe2", "llada-moe"), (regexes_of.BAILING,)),
    PreTokenizer(("exaone-moe",), (regexes_of.EXAONE_MOE,)),
    PreTokenizer(
        ("tiny_aya", "cohere2moe", "cohere2_moe"),
        (regexes_of.TINY_AYA_DIGITS, regexes_of.GPT4O),
    ),
    PreTokenizer(
        ("afmoe",),
        (regexes_of.AFMOE_DIGITS, regexes_of.AFMOE_SCRIPTS, regexes_of.DEEPSEEK_V3),
    ),
    PreTokenizer(
        ("spark2_5",),
        (DIGIT_TRIPLES, regexes_of.HAN_AND_KANA, regexes_of.SPARK, SINGLE_DIGITS_REGEX),
    ),
    PreTokenizer(("superbpe",), (DIGIT_RUNS_REGEX, regexes_of.SUPERBPE_DIGITS)),
    PreTokenizer(("bloom", "poro-chat", "gpt3-finnish"), (regexes_of.BLOOM,)),
    PreTokenizer(("viking",), (regexes_of.BLOOM, SINGLE_DIGITS_REGEX)),
    PreTokenizer(("chameleon",), (*regexes_of.CHAMELEON, BYTE_LEVEL_REGEX), add_bos=True),
    PreTokenizer(
        ("falcon",), (regexes_of.FALCON_PUNCTUATION, BYTE_LEVEL_REGEX, regexes_of.ASCII_TRIPLES)
    ),
    PreTokenizer(
        ("default",),
        (
            regexes_of.DEFAULT_PUNCTUATION,
            BYTE_LEVEL_REGEX,
            DIGIT_RUNS_REGEX,
            regexes_of.ASCII_TRIPLES,
        ),
    ),
]

# Names that mean BPE over characters, with spaces written as U+2581, under the model `gpt2`.
CHARACTER_NAMES = frozenset(["gemma4", "granite-embed-multi-311m", "sarvam-moe"])
# Names that runtimes know and this table cannot split by. A file may carry them.
OTHER_NAMES = frozenset(["bert-bge", "hunyuan-moe", "whitespace"]) | CHARACTER_NAMES

PRETOKENIZERS: dict[str, PreTokenizer] = {name: entry for entry in _TABLE for name in entry.names}
if len(PRETOKENIZERS) != sum(len(entry.names) for entry in _TABLE):
    raise RuntimeError("the table of pre-tokenizers has a duplicate name")


def pretokenizer(name: str) -> PreTokenizer:
    """Return the entry called `name` (a value of `tokenizer.ggml.pre`). Raise TokenizerError, which
    names similar ones, if there is none.
    """
    if found := PRETOKENIZERS.get(name):
        return found
    if name in OTHER_NAMES:
        raise TokenizerError(f"pre-tokenizer '{name}' is not supported yet")
    close = difflib.get_close_matches(name, [*PRETOKENIZERS, *OTHER_NAMES], n=3, cutoff=0.5)
    hint = (
        f"; did you mean {', '.join(close)}?"
        if close
        else f"; known are {', '.join(PRETOKENIZERS)}"
    )
    raise TokenizerError(f"unknown pre-tokenizer '{printable(name)}'{hint}")


def check_name(name: str) -> str:
    """Return `name` if it is one that runtimes know, whether or not this table can split by it.
    Raise TokenizerError otherwise.
    """
    if name not in OTHER_NAMES:
        pretokenizer(name)
    return name


def name_of(
    regexes: tuple[str, ...], ignore_merges: bool | None = None, nfc: bool | None = None
) -> str:
    """Return the GGUF name of the pre-tokenizer that splits by exactly these regexes.

    Where several share them, one with the tokenizer's own `nfc` is preferred, then one with its
    `ignore_merges`, then the first. Raise TokenizerError, which shows the regexes, if none does.
    """
    wanted = tuple(map(_canonical, regexes))
    matching = [entry for entry in _TABLE if tuple(map(_canonical, entry.regexes)) == wanted]
    if not matching:
        shown = ", ".join(f'"{printable(regex, 1000)}"' for regex in regexes) or "none"
        raise TokenizerError(
            f"no known pre-tokenizer splits by the regexes of this tokenizer ({shown}); name one"
            f" with --pre NAME, where NAME is one of {', '.join(PRETOKENIZERS)}"
        )
    if nfc:
        matching = [entry for entry in matching if entry.nfc] or matching
    return next(
        (entry for entry in matching if entry.ignore_merges == ignore_merges), matching[0]
    ).names[0]


def _canonical(regex: str) -> str:
    """Return one spelling for regexes that published files write in several: line breaks as they
    are or escaped, letter case by list or flag.
    """
    regex = (
        regex.replace("\r", r"\r")
        .replace("\n", r"\n")
        .replace(r"\p{N}{1}|", r"\p{N}|")
        .replace("[A-za-z]", "[A-Za-z]")
    )
    return regex.replace("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", CONTRACTIONS)

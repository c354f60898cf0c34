"""The pre-tokenizers of byte-level BPE vocabularies: GGUF name (`tokenizer.ggml.pre`) and regexes
that split a text.

The first regex cuts a text into its matches and the stretches between them, the second cuts every
piece again, and so on; the pieces are then mapped to bytes and merged. This is what a Hugging Face
`Sequence` of `Split` (behaviour `Isolated`) steps followed by `ByteLevel` does. The steps `Digits`
and `ByteLevel` with its own regex are written here as the equivalent regexes. Regexes are those of
the published tokenizer.json files; several names may share one set of them.

With `ignore_merges`, a piece that is itself a token is taken whole, without merging. GGUF has no
key for it: runtimes derive it from the name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import TokenizerError, printable

# The default regex of the `ByteLevel` step of Hugging Face tokenizers, and a digit-wise `Digits`
# step.
BYTE_LEVEL_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SINGLE_DIGITS_REGEX = r"\p{N}"
DIGIT_RUNS_REGEX = r"\p{N}+"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
).replace(r"\"", '"')


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting. `names[0]` is the name given to a tokenizer that splits like this."""

    names: tuple[str, ...]
    regexes: tuple[str, ...]
    ignore_merges: bool = False


_TABLE = [
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        (_LLAMA3,),
        True,
    ),
    PreTokenizer(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    PreTokenizer(
        ("gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "modern-bert"), (BYTE_LEVEL_REGEX,)
    ),
    PreTokenizer(
        ("starcoder", "smollm", "refact", "command-r", "codeshell", "exaone"),
        (SINGLE_DIGITS_REGEX, BYTE_LEVEL_REGEX),
    ),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    PreTokenizer(("qwen35",), (_QWEN35,)),
    PreTokenizer(("gpt-4o", "llama4"), (_GPT4O,)),
    PreTokenizer(("tekken",), (_TEKKEN,), True),
    PreTokenizer(
        ("deepseek-v3", "hunyuan-dense"),
        (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3_WORDS),
    ),
    PreTokenizer(
        ("deepseek-coder",),
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    ),
    PreTokenizer(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", BYTE_LEVEL_REGEX, "[0-9][0-9][0-9]")),
    PreTokenizer(
        ("default",),
        (r"[\p{P}\$\+<=>\^~\|]+", BYTE_LEVEL_REGEX, DIGIT_RUNS_REGEX, "[0-9][0-9][0-9]"),
    ),
]

# Names without regexes in this table. A file may have them, but this package cannot split text for
# them.
OTHER_NAMES = frozenset(
    [
        "afmoe",
        "bailingmoe",
        "bailingmoe2",
        "bert-bge",
        "bloom",
        "chameleon",
        "cohere2moe",
        "deepseek-llm",
        "exaone-moe",
        "exaone4",
        "gemma4",
        "gpt3-finnish",
        "grok-2",
        "hunyuan-moe",
        "hy_v4",
        "jais-2",
        "jina-v1-en",
        "jina-v2-code",
        "kimi-k2",
        "laguna",
        "mellum",
        "mellum2",
        "minicpm5",
        "minimax-m2",
        "poro-chat",
        "roberta-bpe",
        "seed-coder",
        "spark2_5",
        "superbpe",
        "talkie",
        "tiny_aya",
        "trillion",
        "viking",
        "youtu",
    ]
)

PRETOKENIZERS: dict[str, PreTokenizer] = {name: entry for entry in _TABLE for name in entry.names}
if len(PRETOKENIZERS) != sum(len(entry.names) for entry in _TABLE):
    raise RuntimeError("the table of pre-tokenizers has a duplicate name")


def pretokenizer(name: str) -> PreTokenizer:
    """Return the entry called `name` (a value of `tokenizer.ggml.pre`). Raise TokenizerError naming
    the nearest ones if there is none.
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
    """Return `name` if runtimes know it, whether or not this table has its regexes. Raise
    TokenizerError otherwise.
    """
    if name not in OTHER_NAMES:
        pretokenizer(name)
    return name


def name_of(regexes: tuple[str, ...], ignore_merges: bool | None = None) -> str:
    """Return the GGUF name of the pre-tokenizer that splits by exactly these regexes.

    Where several share them, the one with the tokenizer's own `ignore_merges` is preferred. Raise
    TokenizerError showing the regexes if no name has them.
    """
    wanted = tuple(map(_canonical, regexes))
    matching = [entry for entry in _TABLE if tuple(map(_canonical, entry.regexes)) == wanted]
    if not matching:
        shown = ", ".join(f'"{printable(regex, 1000)}"' for regex in regexes) or "none"
        raise TokenizerError(
            f"no known pre-tokenizer splits by the regexes of this tokenizer ({shown}); name one"
            f" with --pre NAME, where NAME is one of {', '.join(PRETOKENIZERS)}"
        )
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
    return regex.replace("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _CONTRACTIONS)

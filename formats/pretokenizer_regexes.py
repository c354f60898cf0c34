"""The regexes by which byte-level BPE tokenizers split a text, as in their tokenizer.json files.

`pretokenizers` says which names mean which. The regexes are written for Oniguruma, which the
package `tokenizers` uses; Python's `re` cannot read them all.
"""

from __future__ import annotations

# What the `ByteLevel` step of Hugging Face tokenizers splits by when it uses its own regex, and a
# digit-wise `Digits` step.
BYTE_LEVEL_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SINGLE_DIGITS_REGEX = r"\p{N}"
DIGIT_RUNS_REGEX = r"\p{N}+"
DIGIT_TRIPLES = r"\p{N}{1,3}"
ASCII_TRIPLES = "[0-9][0-9][0-9]"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"  # the character before a word, such as a space
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"

LLAMA3 = rf"{CONTRACTIONS}|{_START}\p{{L}}+|{DIGIT_TRIPLES}|{_SYMBOLS}[\r\n]*|{_SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
MINICPM5 = rf"{CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}+|{_SYMBOLS}[\r\n]*|{_SPACES}"
UFAKZEKA = rf"{_START}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
JAIS2 = (
    rf"{CONTRACTIONS}|{_START}\p{{L}}+|{DIGIT_TRIPLES}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
SEED_CODER = rf"{CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    rf"{CONTRACTIONS}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
    rf"{_SYMBOLS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _cased(digits: str, contractions: str = f"{CONTRACTIONS}?") -> str:
    """Return a regex whose words end where a capital follows a small letter, as in o200k."""
    return (
        rf"{_START}{_UPPER}*{_LOWER}+{contractions}|{_START}{_UPPER}+{_LOWER}*{contractions}"
        rf"|{digits}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
    )


GPT4O = _cased(DIGIT_TRIPLES)
YOUTU = _cased(SINGLE_DIGITS_REGEX)
TEKKEN = _cased(SINGLE_DIGITS_REGEX, contractions="")

_UPPER_NOT_HAN, _LOWER_NOT_HAN = (
    letters.removesuffix("]") + r"&&[^\p{Han}]]" for letters in (_UPPER, _LOWER)
)
KIMI = (
    r"[\p{Han}]+"
    rf"|{_START}{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{CONTRACTIONS}?"
    rf"|{_START}{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{CONTRACTIONS}?"
    rf"|{DIGIT_TRIPLES}|{_SYMBOLS}[\r\n]*|{_SPACES}"
)

_PUNCTUATED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
DEEPSEEK_V3 = rf"{_PUNCTUATED_WORDS}[\r\n]*|{_SPACES}"
SPARK = rf"{_PUNCTUATED_WORDS}|[\r\n]|\s+(?!\S)|\s+"
HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{HAN_AND_KANA}"
)
# Numbers in groups of three from the right: what follows a group is a multiple of three digits.
AFMOE_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
TINY_AYA_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"
SUPERBPE_DIGITS = r"(?=(\d{3})+(?!\d))"

DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
# Letters that have a case, as DeepSeek LLM's file lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    DEEPSEEK_CODER[-1],
)
FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
DEFAULT_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    SINGLE_DIGITS_REGEX,
    r"[\p{P}!-/:-@\[-`{-~]",
)
LINES = r"[^\n]+|[\n]+"

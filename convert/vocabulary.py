"""tokenizer.json and its companions -> the `tokenizer.*` keys of a GGUF file, for byte-level BPE vocabularies.

What decides each key: tokens and merges come from tokenizer.json; ids of special tokens and whether they are added from
tokenizer_config.json, then the post-processor, then config.json; the pre-tokenizer's name from the regexes themselves.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from ..errors import TokenizerError, printable
from ..formats.gguf.values import Value, ValueType, array, boolean, string, u32
from ..formats.pretokenizers import BYTE_LEVEL_REGEX, DIGIT_RUNS_REGEX, SINGLE_DIGITS_REGEX, check_name, name_of
from .chat_template import chat_template_metadata
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 24
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# Kind of special token -> key of its id; the spelling of the separator's key is the format's.
_ID_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id",
            "mask": "mask_token_id", "eot": "eot_token_id"}


def vocabulary_metadata(checkpoint: Checkpoint, n_vocab: int, pre: str | None = None) -> dict[str, Value]:
    """All `tokenizer.*` keys of the checkpoint, in the order of the reference. `n_vocab` rows of the embedding need a token each.

    `pre` names the pre-tokenizer instead of deriving it. TokenizerError for a vocabulary of another kind, for ids beyond `n_vocab` or
    used twice, for malformed merges, and for an unknown pre-tokenizer.
    """
    file = checkpoint.path / "tokenizer.json"
    tokenizer = checkpoint.json("tokenizer.json")
    if tokenizer is None:
        if (checkpoint.path / "tokenizer.model").exists():
            raise TokenizerError("SentencePiece vocabularies are not supported yet", file=checkpoint.path / "tokenizer.model")
        raise TokenizerError("is missing; a vocabulary is read from it", file=file)
    try:
        return _Vocabulary(checkpoint, tokenizer, n_vocab).metadata(pre)
    except TokenizerError as error:
        error.file = error.file or file
        raise


class _Vocabulary:
    def __init__(self, checkpoint: Checkpoint, tokenizer: dict[str, Any], n_vocab: int):
        self._checkpoint, self._tokenizer, self._n_vocab = checkpoint, tokenizer, n_vocab
        self._config = checkpoint.json("tokenizer_config.json") or {}
        self._model = tokenizer.get("model")
        if not isinstance(self._model, dict) or self._model.get("type", "BPE") != "BPE" or not isinstance(self._model.get("vocab"), dict):
            kind = self._model.get("type") if isinstance(self._model, dict) else None
            raise TokenizerError(f"vocabularies of type {printable(kind)} are not supported yet; byte-level BPE is")
        if self._model.get("byte_fallback") or not _has_byte_level(tokenizer):
            raise TokenizerError("is not a byte-level BPE vocabulary (SentencePiece-like ones are not supported yet)")
        self._added = self._added_tokens()
        self._tokens, self._types = self._token_list()
        self._ids = {token: number for number, token in reversed(list(enumerate(self._tokens)))}

    def metadata(self, pre: str | None) -> dict[str, Value]:
        keys = {
            "model": string("gpt2"),
            "pre": string(self._pretokenizer_name(pre)),
            "tokens": array(ValueType.STRING, self._tokens),
            "token_type": array(ValueType.INT32, self._types),
            "merges": array(ValueType.STRING, self._merges()),
            **self._special_tokens(),
        }
        return {**{f"tokenizer.ggml.{key}": value for key, value in keys.items()}, **chat_template_metadata(self._checkpoint, self._config)}

    # --- tokens -----------------------------------------------------------------------------------------------------------------

    def _added_tokens(self) -> dict[int, tuple[str, bool]]:
        """id -> (content, special). Entries of tokenizer_config.json win: transformers loads them last."""
        entries = self._tokenizer.get("added_tokens") or []
        decoder = self._config.get("added_tokens_decoder") or {}
        if not isinstance(entries, list) or not isinstance(decoder, dict):
            raise TokenizerError("added tokens are not listed as expected")
        found = {}
        for number, entry in [*((e.get("id") if isinstance(e, dict) else None, e) for e in entries), *decoder.items()]:
            if isinstance(number, str) and number.isdecimal() and len(number) < 10:
                number = int(number)
            if type(number) is not int or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise TokenizerError(f"added token {printable(entry)} lacks an id or its content")
            found[number] = (entry["content"], entry.get("special") is True)
        return found

    def _token_list(self) -> tuple[list[str], list[int]]:
        if self._n_vocab > MAX_TOKENS:
            raise TokenizerError(f"key 'vocab_size' is {self._n_vocab}; more than {MAX_TOKENS} tokens are not read",
                                 file=self._checkpoint.config.file)
        tokens: list[str | None] = [None] * self._n_vocab
        types = [NORMAL] * self._n_vocab

        def place(number: object, token: str) -> None:
            if type(number) is not int or not 0 <= number < self._n_vocab:
                raise TokenizerError(f"token '{printable(token)}' has id {printable(number)}; config.json has vocab_size {self._n_vocab}")
            if tokens[number] not in (None, token):
                raise TokenizerError(f"id {number} is that of '{printable(tokens[number])}' and of '{printable(token)}'")
            try:
                token.encode()
            except UnicodeEncodeError:
                raise TokenizerError(f"token {number} is not valid Unicode") from None
            tokens[number] = token

        for token, number in self._model["vocab"].items():
            place(number, token)
        named = self._named_special_tokens()
        for number, (token, special) in self._added.items():
            place(number, token)
            control = special or token in named or looks_special(token)
            types[number] = CONTROL if control else USER_DEFINED
            if not control:
                tokens[number] = token.replace("\u2581", " ")
        for number, token in enumerate(tokens):
            if token is None:
                tokens[number], types[number] = f"[PAD{number}]", UNUSED
        return tokens, types

    def _named_special_tokens(self) -> set[str]:
        """Tokens that tokenizer_config.json gives a role; transformers treats them as special whatever their own entry says."""
        roles = [value for key, value in self._config.items() if key.endswith("_token") and not key.startswith("add_")]
        extra = self._config.get("additional_special_tokens") or self._config.get("extra_special_tokens")
        extra = extra if isinstance(extra, list) else list(extra.values()) if isinstance(extra, dict) else []
        return {content for item in [*roles, *extra] if (content := _content(item))}

    def _merges(self) -> list[str]:
        """`a b` per merge. Newer files hold pairs; a space inside a part is then written as the byte-level alphabet writes it."""
        merges, stored = [], self._model.get("merges") or []
        for merge in stored if isinstance(stored, list) else [stored]:
            parts = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
                raise TokenizerError(f"merge {len(merges)}, {printable(merge)}, is not two parts")
            merges.append(" ".join(part.replace(" ", "\u0120") for part in parts))
        return merges

    # --- pre-tokenizer ----------------------------------------------------------------------------------------------------------

    def _pretokenizer_name(self, given: str | None) -> str:
        if given is not None:
            return check_name(given)
        return name_of(split_regexes(self._tokenizer.get("pre_tokenizer")), ignore_merges=self._model.get("ignore_merges") is True)

    # --- special tokens ---------------------------------------------------------------------------------------------------------

    def _special_tokens(self) -> dict[str, Value]:
        named = {kind: _content(self._config.get(f"{kind}_token")) for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
        named["bos"] = named["bos"] or named["cls"]
        named["eos"] = named["eos"] or named["sep"]
        template = _Template(self._tokenizer.get("post_processor"))
        if not self._config:  # nothing but the template tells what begins and ends a text
            named["bos"], named["eos"] = named["bos"] or template.first, named["eos"] or template.last
        if template.last and named["eos"] and template.last != named["eos"]:
            named["eot"], named["eos"] = named["eos"], template.last
        ids = {kind: self._ids[token] for kind, token in named.items() if kind in _ID_KEYS and token in self._ids}
        for kind in _ID_KEYS:
            if kind not in ids and (number := self._configured_id(kind)) is not None:
                ids[kind] = number
        added = {"bos": template.first is not None and template.first in (named["bos"], named["cls"]),
                 "eos": template.last is not None and template.last == named["eos"]}
        if (separator := template.adds_separator(named["sep"], named["eos"])) is not None:
            added["sep"] = separator
        if template.roberta:
            added = {"bos": True, "eos": True, "sep": True}
        for kind in ("bos", "eos", "sep"):
            if isinstance(self._config.get(f"add_{kind}_token"), bool):
                added[kind] = self._config[f"add_{kind}_token"]
        return {**{_ID_KEYS[kind]: u32(number) for kind, number in ids.items()},
                **{f"add_{kind}_token": boolean(value) for kind, value in added.items()}}

    def _configured_id(self, kind: str) -> int | None:
        """`<kind>_token_id` of config.json; of a list, which names alternatives, the first."""
        value = self._checkpoint.config.values.get(f"{kind}_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if value is None or (type(value) is int and value < 0):  # -1 is written for "none"
            return None
        if type(value) is not int or value >= self._n_vocab:
            raise TokenizerError(f"key '{kind}_token_id' is {printable(value)}, expected an id below {self._n_vocab}",
                                 file=self._checkpoint.config.file)
        return value


class _Template:
    """What a TemplateProcessing post-processor puts around one text (`first`, `last`) and between two."""

    def __init__(self, post_processor: Any):
        self.first = self.last = None
        self.roberta = False
        self._between: list[str | None] = []
        steps = post_processor.get("processors", [post_processor]) if isinstance(post_processor, dict) else []
        for step in steps if isinstance(steps, list) else []:
            kind = step.get("type") if isinstance(step, dict) else None
            if kind == "RobertaProcessing":
                self.roberta = True
            elif kind == "TemplateProcessing":
                self._read(_pieces(step.get("single")), _pieces(step.get("pair")))

    def _read(self, single: list[tuple[str, str]], pair: list[tuple[str, str]]) -> None:
        if len(single) > 1:
            self.first, self.last = (name if kind == "SpecialToken" else None for kind, name in (single[0], single[-1]))
        if pair and self.first and pair[0] == ("SpecialToken", self.first):
            pair = pair[1:]
        if pair and self.last and pair[-1] == ("SpecialToken", self.last):
            pair = pair[:-1]
        if len(pair) > 2 and pair[0] == ("Sequence", "A") and pair[-1] == ("Sequence", "B"):
            self._between = [name if kind == "SpecialToken" else None for kind, name in pair[1:-1]]

    def adds_separator(self, sep: str | None, eos: str | None) -> bool | None:
        """Whether two texts are parted by a separator; None if nothing stands between them."""
        if not self._between:
            return None
        ends = [token is not None and token in (sep, eos) for token in self._between]
        return (ends[0] and self.last is None) or (len(ends) == 2 and ends[1])


def _pieces(template: Any) -> list[tuple[str, str]]:
    pieces = []
    for item in template if isinstance(template, list) else []:
        for kind in ("SpecialToken", "Sequence"):
            if isinstance(item, dict) and isinstance(item.get(kind), dict) and isinstance(item[kind].get("id"), str):
                pieces.append((kind, item[kind]["id"]))
    return pieces


def _content(entry: Any) -> str | None:
    """The text of a token that is given as a string or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def looks_special(token: str) -> bool:
    """Whether a token that is not marked special is one by its look, as `<|...|>` and `<unused7>` are."""
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or bool(re.fullmatch(r"<\|.*\|>|<｜.*｜>|<unused.*", token, re.DOTALL))


def _steps(entry: Any, parts: str) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer or decoder, sequences opened."""
    if not isinstance(entry, dict):
        return []
    if entry.get("type") != "Sequence":
        return [entry]
    inner = entry.get(parts)
    return [step for item in (inner if isinstance(inner, list) else []) for step in ([item] if isinstance(item, dict) else [])]


def _has_byte_level(tokenizer: dict[str, Any]) -> bool:
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers") + _steps(tokenizer.get("decoder"), "decoders")
    return any(step.get("type") == "ByteLevel" for step in steps)


def split_regexes(pre_tokenizer: Any) -> tuple[str, ...]:
    """The regexes by which a `pre_tokenizer` entry of tokenizer.json splits. TokenizerError for a step that cannot be written as one."""
    regexes = []
    for step in _steps(pre_tokenizer, "pretokenizers"):
        kind = step.get("type")
        if kind == "Split":
            regexes.append(_split_regex(step))
        elif kind == "Digits":
            regexes.append(SINGLE_DIGITS_REGEX if step.get("individual_digits") else DIGIT_RUNS_REGEX)
        elif kind == "ByteLevel":
            if step.get("use_regex", True):
                regexes.append(BYTE_LEVEL_REGEX)
            if step.get("add_prefix_space"):
                log.warning("this tokenizer puts a space before a text; GGUF runtimes do not for this kind of vocabulary")
        else:
            raise TokenizerError(f"pre-tokenizer step {printable(kind)} has no counterpart in GGUF; name the pre-tokenizer with --pre NAME")
    return tuple(regexes)


def _split_regex(step: dict[str, Any]) -> str:
    pattern, how = step.get("pattern"), (step.get("behavior"), bool(step.get("invert")))
    # "Removed" with "invert" keeps the matches: the same pieces, as these regexes match every character.
    if how not in (("Isolated", False), ("Removed", True)):
        raise TokenizerError(f"a pre-tokenizer that splits with behavior {printable(how[0])}, invert {how[1]}, has no counterpart in GGUF; "
                             "name one with --pre NAME")
    for kind, regex in (("Regex", str), ("String", re.escape)):
        if isinstance(pattern, dict) and isinstance(pattern.get(kind), str):
            return regex(pattern[kind])
    raise TokenizerError("a pre-tokenizer step splits by neither a regex nor a string")

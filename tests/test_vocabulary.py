"""Vocabularies: tokens, types, merges, special tokens and templates, and the pre-tokenizer
recognized by its regexes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.vocabulary.bpe import split_regexes
from iqforge.convert.vocabulary.metadata import vocabulary_metadata
from iqforge.convert.vocabulary.tokens import looks_special
from iqforge.errors import IqforgeError, TokenizerError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.pretokenizers import (
    BYTE_LEVEL_REGEX,
    PRETOKENIZERS,
    check_name,
    name_of,
    pretokenizer,
)

from .shared import shared
from .tiny_checkpoint import BOS, EOS, PROSE, SPLIT_REGEX, tokenizer_json, write_tokenizer

BYTE_LEVEL_CASES = [
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss_bf16",
    "llama",
    "llama31",
    "ministral3",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "tok_bpe_added",
    "tok_bpe_pairs",
]


@pytest.mark.parametrize("case", BYTE_LEVEL_CASES)
def test_keys_equal_the_reference(case: str):
    with open_gguf(shared(f"golden/convert/{case}/expected-f32.gguf")) as file:
        expected = {
            key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")
        }
    with open_checkpoint(shared(f"golden/convert/{case}/hf")) as checkpoint:
        made = vocabulary_metadata(checkpoint, checkpoint.config.integer("vocab_size"))
    assert made == expected and list(made) == list(expected)


@pytest.mark.parametrize("case", ["gemma3", "mixtral", "phi3", "tok_spm"])
def test_sentencepiece_keys_equal_the_reference(case: str):
    with open_gguf(shared(f"golden/convert/{case}/expected-f32.gguf")) as file:
        expected = {
            key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")
        }
    with open_checkpoint(shared(f"golden/convert/{case}/hf")) as checkpoint:
        made = vocabulary_metadata(checkpoint, checkpoint.config.integer("vocab_size"))
    if case == "gemma3":
        # The reference drops ids that config.json gives as a list. Without one, runtimes would stop
        # at id 2, its <bos>.
        assert made.pop("tokenizer.ggml.eos_token_id").data == 1
    assert made == expected


def vocabulary(
    folder: Path,
    n_vocab: int = 320,
    pre: str | None = None,
    *,
    change=None,
    config: dict | None = None,
    model_config: dict | None = None,
) -> dict:
    """Return the `tokenizer.*` values of the tiny tokenizer after `change(tokenizer.json)`, with
    these configs.
    """
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(model_config or {}))
    tokenizer = json.loads(tokenizer_json())
    if change is not None:
        change(tokenizer)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    made = vocabulary_metadata(open_checkpoint(folder), n_vocab, pre)
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value.data
        for key, value in made.items()
    }


def test_tiny_tokenizer(tmp_path: Path):
    made = vocabulary(tmp_path)
    assert (
        made["model"] == "gpt2"
        and made["pre"] == "llama-bpe"
        and made["bos_token_id"] == 0
        and made["eos_token_id"] == 1
    )
    assert (
        made["tokens"][:2] == [BOS, EOS]
        and made["tokens"][300:302] == ["[PAD300]", "[PAD301]"]
        and len(made["tokens"]) == 320
    )
    assert made["token_type"] == [3, 3] + [1] * 298 + [5] * 20
    assert (
        made["add_bos_token"] is True
        and made["add_eos_token"] is False
        and made["add_sep_token"] is False
    )
    assert all(merge.count(" ") == 1 for merge in made["merges"])


def test_wordpiece(tmp_path: Path):
    """The vocabulary is trained here. Greedy matching from the left, as in runtimes, gives the
    tokenizer's tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        [PROSE],
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    (tmp_path / "config.json").write_text('{"type_vocab_size": 2}')
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", '
        '"unk_token": "[UNK]", "mask_token": "[MASK]"}'
    )
    made = {
        key.removeprefix("tokenizer.ggml."): value.data
        for key, value in vocabulary_metadata(open_checkpoint(tmp_path), 310).items()
    }
    assert (
        made["model"] == "bert" and made["token_type_count"] == 2 and made["tokens"][:5] == special
    )
    assert made["token_type"][:6] == [3, 3, 3, 3, 3, 1] and made["token_type"][300:] == [5] * 10
    assert (
        made["bos_token_id"],
        made["eos_token_id"],
        made["seperator_token_id"],
        made["mask_token_id"],
    ) == (2, 3, 3, 4)
    assert made["add_bos_token"] is True and made["add_eos_token"] is True
    ids = {token: number for number, token in enumerate(made["tokens"])}
    for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(
        tokenizer.normalizer.normalize_str(PROSE)
    ):
        rest, found = "\u2581" + word, []
        while rest:
            length = max(
                (n for n in range(1, len(rest) + 1) if rest[:n] in ids and rest[:n] != "\u2581"),
                default=0,
            )
            if not length:
                found = [1]
                break
            found.append(ids[rest[:length]])
            rest = rest[length:]
        assert found == tokenizer.encode(word, add_special_tokens=False).ids, word


def test_normalizer_that_runtimes_do_not_have(tmp_path: Path, caplog):
    plain = vocabulary(tmp_path)
    assert not caplog.messages
    for empty in (None, {"type": "Sequence", "normalizers": []}):
        assert (
            vocabulary(tmp_path, change=lambda t: t.update(normalizer=empty)) == plain
            and not caplog.messages
        )
    composed = plain | {"normalizer.nfc": True}
    nfc = vocabulary(tmp_path, change=lambda t: t.update(normalizer={"type": "NFC"}))
    assert nfc == composed and not caplog.messages
    lower = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    with pytest.raises(TokenizerError, match="Lowercase"):
        vocabulary(tmp_path, change=lambda t: t.update(normalizer=lower))
    assert (
        vocabulary(tmp_path, pre="llama-bpe", change=lambda t: t.update(normalizer=lower))
        == composed
        and "(NFC, Lowercase)" in caplog.text
    )


def test_merges_in_both_spellings(tmp_path: Path):
    def as_strings(tokenizer):
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]

    assert vocabulary(tmp_path)["merges"] == vocabulary(tmp_path, change=as_strings)["merges"]
    made = vocabulary(tmp_path, change=lambda t: t["model"].update(merges=[["a b", "c"]]))
    assert made["merges"] == ["a\u0120b c"]


@pytest.mark.parametrize(
    "merge", ["ab", "a b c", ["a"], ["a", "b", "c"], ["a", 1], "a ", 7, None, {"a": "b"}]
)
def test_malformed_merges(tmp_path: Path, merge):
    with pytest.raises(TokenizerError, match="merge 0"):
        vocabulary(tmp_path, change=lambda t: t["model"].update(merges=[merge]))


def test_types_of_added_tokens(tmp_path: Path):
    def add(tokenizer):
        for number, (content, special) in enumerate(
            [("<think>", False), ("<|odd|>", False), ("\u2581x", False), ("<s>", True)], 300
        ):
            tokenizer["added_tokens"].append(
                {"id": number, "content": content, "special": special, "normalized": False}
            )

    made = vocabulary(
        tmp_path,
        change=add,
        config={
            "added_tokens_decoder": {"304": {"content": "tool", "special": False}},
            "pad_token": "<think>",
        },
    )
    assert made["tokens"][300:305] == ["<think>", "<|odd|>", " x", "<s>", "tool"]
    # <think> has a role here, which makes it a control token.
    assert made["token_type"][300:305] == [
        3,
        3,
        4,
        3,
        4,
    ]
    assert made["padding_token_id"] == 300


@pytest.mark.parametrize(
    "token, special",
    [
        ("<|x|>", True),
        ("<｜x｜>", True),
        ("<unused12>", True),
        ("<pad>", True),
        ("[@BOS@]", True),
        ("<think>", False),
        ("<x|>", False),
        ("[PAD]", False),
    ],
)
def test_looks_special(token: str, special: bool):
    assert looks_special(token) == special


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t["model"]["vocab"].update(extra=320), "vocab_size 320"),
        (lambda t: t["model"]["vocab"].update(extra=-1), "id -1"),
        (lambda t: t["model"]["vocab"].update(extra=2), "id 2 is that of"),
        (lambda t: t["model"]["vocab"].update(extra="x"), "id x"),
        (lambda t: t["model"]["vocab"].update({"\ud800": 310}), "Unicode"),
        (lambda t: t["added_tokens"].append({"id": 400, "content": "x"}), "id 400"),
        (lambda t: t["added_tokens"].append({"id": 300}), "lacks an id or its content"),
        (lambda t: t["added_tokens"].append(3), "lacks an id or its content"),
        (lambda t: t.update(added_tokens={}, model=[]), "not supported yet"),
        (lambda t: t["model"].update(type="Unigram"), "type Unigram"),
        (lambda t: t["model"].update(type="WordPiece"), "continuing_subword_prefix"),
        (lambda t: t["model"].update(byte_fallback=True), "neither byte-level"),
        (lambda t: t.update(pre_tokenizer=None, decoder=None), "neither byte-level"),
        (
            lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="[ab]+"),
            r'"\[ab\]\+".*--pre NAME',
        ),
        (
            lambda t: t["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Metaspace"}),
            "Metaspace",
        ),
        (
            lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithNext"),
            "MergedWithNext",
        ),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern=3), "neither a regex"),
    ],
)
def test_malformed_vocabularies(tmp_path: Path, change, words: str):
    with pytest.raises(TokenizerError, match=words) as raised:
        vocabulary(tmp_path, change=change)
    assert "tokenizer.json" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model": {"vocab": 3}}', '{"model": null}', "{}"]
)
def test_files_that_are_no_tokenizer(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(IqforgeError, match="tokenizer.json"):
        vocabulary_metadata(open_checkpoint(tmp_path), 320)


def test_claimed_size_is_not_believed(tmp_path: Path):
    with pytest.raises(TokenizerError, match="vocab_size"):
        vocabulary(tmp_path, 2**31 - 1)


@pytest.mark.parametrize("extra", ["x", 3, {"a": "<think>"}, [3, None]])
def test_odd_lists_of_special_tokens(tmp_path: Path, extra):
    assert (
        len(
            vocabulary(
                tmp_path,
                config={"extra_special_tokens": extra, "bos_token": 7, "add_bos_token": "yes"},
            )["tokens"]
        )
        == 320
    )


def test_missing_vocabulary(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json: is missing"):
        vocabulary_metadata(open_checkpoint(tmp_path), 320)


def test_special_tokens_from_each_source(tmp_path: Path):
    made = vocabulary(
        tmp_path,
        config={"eos_token": {"content": EOS}, "add_bos_token": False, "add_eos_token": True},
        model_config={
            "bos_token_id": 5,
            "eos_token_id": 7,
            "pad_token_id": [9, 10],
            "unk_token_id": -1,
        },
    )
    assert (
        made["bos_token_id"] == 5
        and made["eos_token_id"] == 1
        and made["padding_token_id"] == 9
        and "unknown_token_id" not in made
    )
    assert made["add_bos_token"] is False and made["add_eos_token"] is True
    with pytest.raises(TokenizerError, match="bos_token_id.*below 320"):
        vocabulary(
            tmp_path,
            config={},
            model_config={"bos_token_id": 320},
            change=lambda t: t.update(post_processor=None),
        )


def test_template_that_ends_in_another_token(tmp_path: Path):
    def end_in_bos(tokenizer):
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": BOS}}],
            "pair": [
                {"Sequence": {"id": "A"}},
                {"SpecialToken": {"id": EOS}},
                {"Sequence": {"id": "B"}},
                {"SpecialToken": {"id": BOS}},
            ],
        }

    made = vocabulary(tmp_path, change=end_in_bos)
    assert (
        made["eos_token_id"] == 0
        and made["eot_token_id"] == 1
        and made["add_eos_token"] is True
        and made["add_bos_token"] is False
    )


def test_chat_templates(tmp_path: Path):
    assert vocabulary(tmp_path, config={"chat_template": "T"})["chat_template"] == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert vocabulary(tmp_path)["chat_template"] == "J"
    assert vocabulary(tmp_path, config={"chat_template": "T"})["chat_template"] == "T"
    named = [{"name": "default", "template": "D"}, {"name": "tool use", "template": "U"}]
    made = vocabulary(tmp_path, config={"chat_template": named})
    assert (
        made["chat_template"] == "D"
        and made["chat_template.tool_use"] == "U"
        and made["chat_templates"] == ["tool_use"]
    )
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert vocabulary(tmp_path)["chat_template.rag"] == "R"
    with pytest.raises(TokenizerError, match="chat_template"):
        vocabulary(tmp_path, config={"chat_template": [3]})


# --- pre-tokenizers
# --------------------------------------------------------------------------------------------------


def test_names_and_regexes_lead_to_each_other():
    for name, entry in PRETOKENIZERS.items():
        named = pretokenizer(name_of(entry.regexes, entry.ignore_merges, entry.nfc))
        assert (named.regexes, named.ignore_merges) == (entry.regexes, entry.ignore_merges), name
        assert named.nfc == entry.nfc or (named.names[0] == "qwen2" and not entry.nfc), name
    assert name_of((SPLIT_REGEX,)) == "llama-bpe" and name_of((SPLIT_REGEX,), False) == "glm4"
    # Line breaks spelled as they are.
    assert name_of((SPLIT_REGEX.replace(r"\r", "\r").replace(r"\n", "\n"),)) == "llama-bpe"
    assert check_name("gemma4") == "gemma4"
    with pytest.raises(TokenizerError, match="not supported yet"):
        pretokenizer("gemma4")
    with pytest.raises(TokenizerError, match="did you mean llama-bpe"):
        check_name("llama_bpe")


def test_every_regex_compiles_and_loses_no_character():
    from tokenizers import Regex, pre_tokenizers

    text = (
        "Hello, don't STOP 12345 \u6f22\u5b57\u304b\u306a  x\r\n\n\tcaf\u00e9 e\u0301 \u2026 <a>==b"
    )
    for name in PRETOKENIZERS:
        steps = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pretokenizer(name).regexes]
        )
        assert "".join(piece for piece, _ in steps.pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    "steps, regexes",
    [
        ({"type": "ByteLevel", "use_regex": True}, (BYTE_LEVEL_REGEX,)),
        ({"type": "ByteLevel"}, (BYTE_LEVEL_REGEX,)),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "use_regex": True},
                ],
            },
            (r"\p{N}", BYTE_LEVEL_REGEX),
        ),
        (
            {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Removed", "invert": True},
            ("x+",),
        ),
        (
            {
                "type": "Split",
                "pattern": {"String": "a.b"},
                "behavior": "Isolated",
                "invert": False,
            },
            (r"a\.b",),
        ),
        (None, ()),
    ],
)
def test_steps_of_a_pre_tokenizer(steps, regexes):
    assert split_regexes(steps) == regexes


def test_given_name_overrides(tmp_path: Path):
    assert vocabulary(tmp_path, pre="kimi-k2")["pre"] == "kimi-k2"

"""Every kind of vocabulary: trained here, converted, and compared on 10,000 random texts with the
tokenizer that it comes from, with the texts of special tokens taken as tokens and as text.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.vocabulary.gemma4 import gemma4_vocabulary
from iqforge.convert.vocabulary.metadata import vocabulary_metadata
from iqforge.convert.vocabulary.tiktoken import byte_letters
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.pretokenizers import pretokenizer
from iqforge.formats.values import Value, string
from iqforge.runtime.tokenizer import TextStream, Tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from .random_texts import random_texts
from .sentencepiece_models import TEXT, trained_model
from .shared import shared

N_TEXTS = 10_000  # per kind; its variants get fewer
FEWER = 2000
MARKS = ["<|user|>", "<|end|>", "<tool>"]  # control, control, user-defined


def converted(folder: Path, n_vocab: int, reader=None, **files: object) -> dict[str, Value]:
    """Write the files of a checkpoint (JSON, or bytes for tokenizer.model) and convert them."""
    (folder / "config.json").write_text(json.dumps(files.pop("config", {})))
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / f"{name}.model").write_bytes(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    with open_checkpoint(folder) as checkpoint:
        return vocabulary_metadata(checkpoint, n_vocab, reader=reader)


def add_marks(tokenizer: tokenizers.Tokenizer, **flags: bool) -> None:
    tokenizer.add_special_tokens([AddedToken(mark, special=True, **flags) for mark in MARKS[:2]])
    tokenizer.add_tokens([AddedToken(MARKS[2], normalized=False)])


def decoder_entries(tokenizer: tokenizers.Tokenizer) -> dict[str, dict]:
    """Return the added tokens as tokenizer_config.json lists them."""
    return {
        str(number): {"content": t.content, "special": t.special, "lstrip": t.lstrip}
        | {"rstrip": t.rstrip, "single_word": False, "normalized": False}
        for number, t in tokenizer.get_added_tokens_decoder().items()
    }


def check(
    metadata: dict[str, Value],
    reference: tokenizers.Tokenizer,
    texts: list[str],
    ids: dict[int, int] | None = None,
) -> Tokenizer:
    """Compare `encode` with the reference. ids: those of the reference that have others in GGUF."""
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("") == tokenizer.encode("", add_special=True)
    for parse_special in (True, False):
        reference.encode_special_tokens = not parse_special
        expected = reference.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, expected):
            found = tokenizer.encode(text, add_special=False, parse_special=parse_special)
            assert found == [(ids or {}).get(i, i) for i in encoding.ids], (parse_special, text)
    return tokenizer


# --- byte-level BPE
# --------------------------------------------------------------------------------------------------

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def split(regex: str):
    return pre_tokenizers.Split(Regex(regex), "isolated")


def byte_level(*steps, nfc: bool = False, use_regex: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.mark.parametrize(
    "pre, steps, options",
    [
        ("qwen2", [split(QWEN2)], {"nfc": True}),
        ("qwen2", [split(QWEN2)], {}),  # the name implies NFC, a key says otherwise
        ("gpt-4o", [split(O200K)], {}),
        ("gpt-2", [], {"use_regex": True}),
        ("olmo", [], {"use_regex": True, "nfc": True}),
        ("command-r", [pre_tokenizers.Digits(True)], {"use_regex": True, "nfc": True}),
    ],
)
def test_byte_level_bpe(tmp_path: Path, pre: str, steps: list, options: dict):
    reference = byte_level(*steps, **options)
    add_marks(reference, rstrip=pre == "gpt-4o", lstrip=pre == "gpt-4o")
    metadata = converted(tmp_path, 500, tokenizer=json.loads(reference.to_str()))
    assert metadata["tokenizer.ggml.pre"].data == pre
    stripping = [key for key in metadata if key.startswith("iqforge.")]
    assert len(stripping) == (2 if pre == "gpt-4o" else 0)
    texts = random_texts(N_TEXTS if options == {"nfc": True} else FEWER, 1, MARKS)
    tokenizer = check(metadata, reference, texts)
    if not options.get("nfc"):
        for text in texts[:500]:
            assert tokenizer.decode(tokenizer.encode(text)) == text


# Some split regexes spell out what no step says; what they cut is written down here.
@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("superbpe", "ab 1234567", ["ab ", "1", "234", "567"]),
        ("afmoe", "12345 x", ["12", "345", " x"]),
        ("tiny_aya", "12345 x", ["12", "345", " x"]),
        ("kimi-k2", "Hello漢字World 1234", ["Hello", "漢字", "World", " ", "123", "4"]),
        ("deepseek-v3", "Hi 12345日本.no", ["Hi", " ", "123", "45", "日本", ".no"]),
        ("deepseek-llm", "Hi 12日本\nx ", ["Hi", " ", "1", "2", "日本", "\n", "x", " "]),
        ("deepseek-coder", "a! 12\n", ["a", "!", " ", "1", "2", "\n"]),
        ("minicpm5", "x 12345", ["x", " ", "123", "45"]),
        ("laguna", "a\n\nb 12", ["a", "\n\n", "b", " ", "1", "2"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, "  ", " b"]),
        ("bloom", "Hello, world.", ["Hello", ",", " world", "."]),
        ("viking", "Hello, 12", ["Hello", ",", " ", "1", "2"]),
        ("falcon", "a==b 12345", ["a", "==", "b", " ", "123", "45"]),
        ("default", "a==b 12345", ["a", "==", "b", " ", "123", "45"]),
        ("bailingmoe", "I'm 12\n\n", ["I", "'m", " ", "1", "2", "\n\n"]),
        ("seed-coder", "a!\n12", ["a", "!", "\n", "1", "2"]),
        ("exaone-moe", "\uac00 \ub098 1", ["\uac00 \ub098", " ", "1"]),
        ("ufakzeka", "Ali'nin", ["Ali", "'nin"]),
        ("youtu", "\uac00\ub098ab12", ["\uac00\ub098", "ab", "1", "2"]),
        ("spark2_5", "a1234\n\n", ["a", "1", "2", "3", "4", "\n", "\n"]),
        ("chameleon", "a    b12", ["a", "    ", "b", "1", "2"]),
        ("tekken", "HelloWorld's12", ["Hello", "World", "'s", "1", "2"]),
        ("gpt-4o", "HelloWorld's1234", ["Hello", "World's", "123", "4"]),
        ("qwen35", "ne\u0301 12", ["ne\u0301", " ", "1", "2"]),
        ("starcoder", "a 12", ["a", " ", "1", "2"]),
        ("gpt-2", "it's 12 !", ["it", "'s", " 12", " !"]),
    ],
)
def test_what_a_name_splits(pre: str, text: str, pieces: list[str]):
    steps = pre_tokenizers.Sequence([split(regex) for regex in pretokenizer(pre).regexes])
    assert [piece for piece, _ in steps.pre_tokenize_str(text)] == pieces


# --- tiktoken
# --------------------------------------------------------------------------------------------------


def test_tiktoken(tmp_path: Path):
    """Against all merges of a pair of tokens, by the rank of what they make, as transformers builds
    such a tokenizer.
    """
    kimi = O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]*", "]*")
    trained = json.loads(byte_level(split(rf"[\p{{Han}}]+|{kimi}")).to_str())["model"]
    letters = byte_letters()
    byte_of = {letter: byte for byte, letter in enumerate(letters)}
    made = ["".join(merge) for merge in trained["merges"]]
    ranks = {token: rank for rank, token in enumerate([*letters, *made])}
    lines = [
        f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}"
        for token, rank in ranks.items()
    ]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    n = len(ranks)
    merges = [
        (token[:k], token[k:])
        for token in made
        for k in range(1, len(token))
        if token[:k] in ranks and token[k:] in ranks
    ]
    reference = tokenizers.Tokenizer(models.BPE(ranks, merges, ignore_merges=True))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [split(rf"[\p{{Han}}]+|{kimi}"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    add_marks(reference)
    metadata = converted(
        tmp_path,
        n + 300,
        config={"model_type": "kimi_k2"},
        tokenizer_config={"added_tokens_decoder": decoder_entries(reference)},
    )
    assert metadata["tokenizer.ggml.pre"].data == "kimi-k2"
    check(metadata, reference, random_texts(N_TEXTS, 2, MARKS))
    del metadata["tokenizer.ggml.merges"]  # some files of this kind leave them to the ranks
    check(metadata, reference, random_texts(FEWER, 2, MARKS))


# --- SentencePiece
# --------------------------------------------------------------------------------------------------


def bpe_by_scores(processor: sentencepiece.SentencePieceProcessor) -> tokenizers.Tokenizer:
    """Return what transformers makes of a SentencePiece BPE: every way to join two tokens to one is
    a merge, in the order of what it makes, then of the two.
    """
    vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
    merges = [
        pair
        for token in vocab
        for pair in sorted(
            (
                (token[:k], token[k:])
                for k in range(1, len(token))
                if token[:k] in vocab and token[k:] in vocab
            ),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )
    ]
    return tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )


@pytest.fixture(scope="module")
def llama_model() -> bytes:
    return trained_model(
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_sentencepiece_bpe(tmp_path: Path, llama_model: bytes, scheme: str):
    processor = sentencepiece.SentencePieceProcessor(model_proto=llama_model)
    reference = bpe_by_scores(processor)
    reference.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    reference.add_special_tokens(special)
    add_marks(reference, rstrip=True)
    metadata = converted(
        tmp_path,
        450,
        tokenizer=llama_model,
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "legacy": scheme == "always",
            "add_prefix_space": scheme != "never",
            "added_tokens_decoder": decoder_entries(reference),
        },
    )
    assert metadata["tokenizer.ggml.model"].data == "llama"
    texts = random_texts(FEWER if scheme == "never" else N_TEXTS, 3, [*MARKS, "<s>"])
    if scheme == "first":
        # This step of transformers puts no space before one that the text begins with;
        # SentencePiece does, and so do we (see below).
        texts = [text for text in texts if not text.startswith((" ", "\u2581"))]
    tokenizer = check(metadata, reference, texts)
    plain = random_texts(N_TEXTS, 4) if scheme == "first" else []
    for text in plain:
        expected = processor.encode(text)
        assert tokenizer.encode(text) == [1, *expected], text
    for text in plain[:500]:
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize(
    "scheme", ["always", "metaspace-always", "metaspace-first", "metaspace-never"]
)
def test_tokenizer_json_made_from_sentencepiece(tmp_path: Path, scheme: str):
    reference = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    reference.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    reference.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    )
    stored = json.loads(reference.to_str())
    stored["added_tokens"] = stored["added_tokens"][:3]  # bytes are ordinary tokens of such files
    reference = tokenizers.Tokenizer.from_str(json.dumps(stored))
    if scheme.startswith("metaspace-"):
        reference.normalizer = normalizers.Sequence([])
        reference.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme=scheme.removeprefix("metaspace-"), split=False
        )
    add_marks(reference)
    metadata = converted(
        tmp_path,
        430,
        tokenizer=json.loads(reference.to_str()),
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    if scheme == "metaspace-never":
        assert "iqforge.tokenizer.space_prefix" not in metadata
    else:
        assert metadata["iqforge.tokenizer.space_prefix"].data == scheme
    check(metadata, reference, random_texts(FEWER, 5, [*MARKS, "<s>"]))


@pytest.mark.parametrize("case", ["tok_spm", "mixtral", "phi3", "gemma3"])
def test_files_of_the_reference_against_sentencepiece(case: str):
    folder = shared(f"golden/convert/{case}")
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "hf" / "tokenizer.model")
    )
    with open_gguf(folder / "expected-f32.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    for text in random_texts(FEWER, 6):
        assert tokenizer.encode(text, add_special=False) == processor.encode(text), text
    if (folder / "tokens.json").exists():
        for entry in json.loads((folder / "tokens.json").read_text()):
            assert tokenizer.encode(entry["text"], add_special=False) == entry["ids"]
            assert tokenizer.encode(entry["text"]) == entry["ids_special"]
    if case == "phi3":  # its marks take the line break after them
        ids = tokenizer.encode("<|user|>\nHi<|end|>", add_special=False, parse_special=True)
        assert ids == [403, *tokenizer._model.encode("Hi", at_start=False), 402]


def test_pieces_that_are_runs_of_spaces(tmp_path: Path):
    """SentencePiece recognizes its user-defined pieces after it has written spaces as U+2581."""
    model = trained_model(
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581", "<html>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = Tokenizer.from_metadata(converted(tmp_path, 450, tokenizer=model))
    assert tokenizer.encode("a     b<html>", add_special=False)[1:3] == [
        processor.piece_to_id("\u2581\u2581\u2581"),
        processor.piece_to_id("\u2581\u2581"),
    ]
    for text in random_texts(2000, 7, ["<html>"]):
        assert tokenizer.encode(text, add_special=False) == processor.encode(text), text


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_unigram(tmp_path: Path, rule: str):
    """Against what transformers makes of such a model for T5."""
    model = trained_model(
        model_type="unigram",
        vocab_size=200,
        normalization_rule_name=rule,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    entries = {
        str(i): {"content": processor.id_to_piece(i), "special": True, "rstrip": False}
        for i in range(3)
    }
    n = len(processor)
    entries |= {
        str(n + i): {"content": mark, "special": i < 2, "lstrip": i == 0}
        for i, mark in enumerate(MARKS)
    }
    metadata = converted(
        tmp_path,
        n + 20,
        tokenizer=model,
        tokenizer_config={
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "added_tokens_decoder": entries,
        },
    )
    assert metadata["tokenizer.ggml.model"].data == "t5"
    charsmap = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", string("")).data or b"")
    assert bool(charsmap) == (rule != "identity")
    # Text never becomes a control token unless asked for, so these have other names here.
    pieces = [
        (f"\U0010ffff{i}" if i in (0, 1) else processor.id_to_piece(i), processor.get_score(i))
        for i in range(n)
    ]
    reference = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    if charsmap:
        reference.normalizer = normalizers.Precompiled(charsmap)
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    reference.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<pad>", "</s>", "<unk>")]
    )
    names = [e["content"] for e in entries.values()]
    reference.add_special_tokens(
        [AddedToken(mark, special=True, lstrip=mark == MARKS[0]) for mark in MARKS[:2]]
    )
    reference.add_tokens([AddedToken(MARKS[2], normalized=False)])
    ids = {
        reference.token_to_id(name): int(number)
        for number, name in zip(entries, names)
        if reference.token_to_id(name) != int(number)
    }
    tokenizer = check(
        metadata,
        reference,
        random_texts(FEWER if rule == "identity" else N_TEXTS, 8, [*MARKS, "</s>"]),
        ids,
    )
    assert tokenizer.encode("a") == [*tokenizer.encode("a", add_special=False), 1]
    assert tokenizer.decode(tokenizer.encode("of each block", add_special=False)) == "of each block"


# --- WordPiece and Gemma 4
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"lowercase": False}, {"lowercase": False, "strip_accents": True}]
)
def test_wordpiece(tmp_path: Path, options: dict):
    reference = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer(**options)
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    reference.train_from_iterator(
        [TEXT],
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    reference.decoder = tokenizers.decoders.WordPiece()
    reference.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    metadata = converted(
        tmp_path, 420, tokenizer=json.loads(reference.to_str()), tokenizer_config=names
    )
    texts = random_texts(FEWER if options else N_TEXTS, 9, special[2:])
    texts.append("x" * 101 + " " + "a" * 100)  # words of more than 100 letters are unknown
    tokenizer = check(metadata, reference, texts)
    for text in texts[:500]:
        ids = tokenizer.encode(text)
        assert ids[0] == 2 and ids[-1] == 3
        assert tokenizer.decode(ids, skip_special=True) == reference.decode(ids)


def test_gemma4(tmp_path: Path):
    reference = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    reference.normalizer = normalizers.Replace(" ", "\u2581")
    reference.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>"]
    reference.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    stored = json.loads(reference.to_str())
    stored["added_tokens"] = [
        entry | {"special": entry["content"] != "<|channel>"}
        for entry in stored["added_tokens"][: len(special)]
    ]
    reference = tokenizers.Tokenizer.from_str(json.dumps(stored))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    metadata = converted(
        tmp_path, 510, reader=gemma4_vocabulary, tokenizer=stored, tokenizer_config=config
    )
    texts = random_texts(N_TEXTS, 10, special)
    tokenizer = check(metadata, reference, texts)
    assert tokenizer.encode("a")[0] == 2
    for text in texts[:500]:
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("case", ["gemma4_e", "gemma4_moe"])
def test_files_of_the_reference_for_gemma4(case: str):
    folder = shared(f"golden/convert/{case}")
    reference = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    with open_gguf(folder / "expected-f32.gguf") as file:
        metadata = file.metadata
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    check(metadata, reference, random_texts(FEWER, 11, added))


# --- text as it comes
# --------------------------------------------------------------------------------------------------


def test_text_comes_in_whole_characters(tmp_path: Path, llama_model: bytes):
    tokenizer = Tokenizer.from_metadata(
        converted(tmp_path, 450, tokenizer=llama_model, config={"bos_token_id": 1})
    )
    for text in [*random_texts(300, 12), "Größe", "  two"]:
        text = text.replace("\u2581", " ")
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, from_start=True)
        pieces = [stream.feed(token) for token in ids] + [stream.end()]
        assert "".join(pieces) == text and "\ufffd" not in "".join(pieces[:-1])
        # What follows a prompt keeps its space.
        later = TextStream(tokenizer)
        assert "".join(map(later.feed, ids)) + later.end() == (" " + text if text else "")

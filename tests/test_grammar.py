"""Texts that follow grammars and JSON schemas."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import UsageError
from iqforge.runtime.chat.session import ChatSession
from iqforge.runtime.chat.template import ChatTemplate
from iqforge.runtime.generate import end_tokens
from iqforge.runtime.grammar.constraint import Grammar
from iqforge.runtime.grammar.gbnf import gbnf_to_lark
from iqforge.runtime.sampling.chain import SamplerChain
from iqforge.runtime.sampling.settings import SamplerSettings

from .random_schemas import random_schema

DEMO = Path(iqforge.__file__).parent / "demo" / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = iqforge.convert_model(DEMO, tmp_path_factory.mktemp("demo") / "demo.gguf")
    with iqforge.load_model(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(model):
    return model.tokenizer


@pytest.fixture(scope="module")
def end(model):
    return end_tokens(model)


# ---- JSON schemas


def random_text(grammar: Grammar, tokenizer, seed: int) -> str:
    """Return a text of random tokens; what closes strings and lists becomes ever more probable."""
    rng = np.random.default_rng(seed)
    n = tokenizer.n_tokens
    pieces = [tokenizer.token_bytes(i) for i in range(n)]
    closing = np.array([piece[:1] in (b'"', b"}", b"]") for piece in pieces])
    settings = SamplerSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    chain = SamplerChain(settings, tokenizer.token_bytes, 1000, grammar.new())
    found = []
    for position in range(600):
        logits = rng.normal(0, 2, n) + closing * (2 + 0.05 * position)
        for token in grammar.end:
            logits[token] = 5
        token = chain.sample(torch.from_numpy(logits.astype(np.float32)), position)
        if token in grammar.end:
            return b"".join(pieces[token] for token in found).decode()
        found.append(token)
    raise AssertionError(f"seed {seed}: no end after {tokenizer.decode(found)!r}")


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(50), id="50"),
        pytest.param(range(50, 1000), id="950", marks=pytest.mark.full),
    ],
)
def test_random_schemas(tokenizer, end, seeds):
    """Every output is valid."""
    import jsonschema

    for seed in seeds:
        schema = random_schema(seed)
        text = random_text(
            Grammar("json_schema", json.dumps(schema), tokenizer, end), tokenizer, seed
        )
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"seed {seed}: {schema}: {text!r}") from error


# ---- GBNF

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CASES = {
    JSON: (['{"a": [1, 2.5, true, {"b": "x\\u00e9é"}]}', "{}"], ["[1]", '{"a" 1}', '{"a": 01}']),
    # White space of `ws` can be the end of the line that `root` wants: nothing is greedy.
    SUMS: (["a+b=c\n", "(a*3 )=x\n", "a =\n b \n \n"], ["1+=c\n", "a=b"]),
    'root ::= "tr" [a-z] | "true!"': (["tru", "trx", "true!"], ["true", "trx!"]),
    'root ::= root "a" | "b"': (["b", "baa"], ["a", "bb"]),
    'root ::= "a" ( | "b") "c"': (["ac", "abc"], ["abbc"]),
    'root ::= (\n "a" |\n "b" ) other # or\n\nother ::= "\\u00e9" "x"{2,3} .': (
        ["aéxx!", "béxxx日", "aéxx\n"],
        ["céxx!", "aéx!", "aéxx"],
    ),
    "root ::= [ぁ-ゟ]+ [、-〾]?": (["ぁゟ", "あ、"], ["ア", "、"]),
    r"root ::= [\]^\-a\[] [^^-]": (["]a", "^b", "-c", "[]"], ["b]", "a-", "a^"]),
    'root ::= "x"{3}"y"{2,}"z"{0,1}': (["xxxyy", "xxxyyyz"], ["xxyy", "xxxy", "xxxyyzz"]),
    'root ::= "a"{0} "b" [c]{0,0} ("d" e){0}\ne ::= "e"': (["b"], ["ab", "bc", "bde"]),
    'root ::= "a"{0}': ([""], ["a"]),
    'root ::= a-b_1\na-b_1 ::= [+*/] "" [^\\n]': (["+a", "/*"], ["+\n", "a"]),
    "root ::= " + "(" * 90 + "w" + ' | "b" w)' * 90 + ' "c"\nw ::= "w"': (
        ["wc", "bwc"],
        ["w", "bc"],
    ),
    'root ::= "\\U0001F642\\x41\\t"': (["🙂A\t"], ["🙂A"]),
}


@pytest.mark.parametrize("text", CASES)
def test_gbnf(tokenizer, end, text):
    grammar = Grammar("gbnf", text, tokenizer, end)
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_tokens)}
    for one, is_good in [(x, True) for x in CASES[text][0]] + [(x, False) for x in CASES[text][1]]:
        for tokens in (
            [single[bytes([byte])] for byte in one.encode()],
            tokenizer.encode(one, add_special=False),
        ):
            assert follows(grammar, tokens) == is_good, one


def follows(grammar: Grammar, tokens: list[int]) -> bool:
    text = grammar.new()
    for token in [*tokens, next(iter(grammar.end))]:
        mask = text.mask()
        assert mask.any() and all(text.allows(int(one)) for one in mask.nonzero()[0][:50])
        if not text.allows(token):
            return False
        text.accept(token)
    return True


def test_a_mask_is_every_token_that_is_allowed(tokenizer, end):
    grammar = Grammar("gbnf", SUMS, tokenizer, end)
    text = grammar.new()
    for token in tokenizer.encode("ab + (c1", add_special=False):
        if not text.allows(token):
            break
        text.accept(token)
    mask = text.mask()
    assert mask.tolist() == [text.allows(token) for token in range(tokenizer.n_tokens)]
    assert 10 < mask.sum() < len(mask)


@pytest.mark.parametrize(
    "text, problem",
    [
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= other", "line 1: there is no rule 'other'"),
        ('root ::= "a', "line 1: this has no end"),
        ('root ::= "a"\nb ::= [a', "line 2: this has no end"),
        ('root ::= ("a"', r"this \( has no \)"),
        ('root ::= "a")', r"unexpected '\)'"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "no characters"),
        ('root ::= "a"{3,2}', "cannot repeat"),
        ('root ::= "a"{x}', "expected {n}"),
        ('root ::= "\\q"', "not an escape"),
        ('root ::= "\\ud800"', "not a character"),
        ('root = "a"', "expected ::="),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ("root ::= <think>", "tokens in grammars"),
        ("*", "expected the name of a rule"),
        ("", "no rule 'root'"),
        ('root ::= ("a"{1000} | "b"){1000}', "more than 100,000 copies"),
        ("root ::= " + "(" * 3000, "nested too deeply"),
    ],
)
def test_malformed_grammars(text, problem):
    with pytest.raises(UsageError, match=problem):
        gbnf_to_lark(text)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "is not JSON: line 1"),
        ("3", "not an object"),
        ("false", "is false, which allows nothing"),
        ('{"type": "nothing"}', "JSON schema is not supported: Invalid type: nothing"),
        ('{"type": "string", "pattern": "("}', r"regex parse error: \(: unclosed group$"),
        ('{"type": "string", "pattern": "(?=a)b"}', r"error: \(\?=a\)b: look-around, .* not supp"),
        ('{"not": {"type": "string"}}', r'not supported: Unimplemented keys: \["not"\]'),
        ('{"$ref": "http://example.org/x"}', "not supported"),
        ('{"items":' * 3000 + "{}" + "}" * 3000, "nested too deeply"),
        ('{"minimum": 100000000000000000000}', "a value in the JSON schema is not supported"),
        ('{"const": "\\ud800"}', "a value in the JSON schema is not supported"),
        ('{"const": NaN}', "NaN is not a value"),
        ('{"const": ' + "1" * 5000 + "}", "cannot be read"),
    ],
)
def test_malformed_schemas(tokenizer, end, text, problem):
    with pytest.raises(UsageError, match=problem):
        Grammar("json_schema", text, tokenizer, end)


def test_one_of_is_any_of(tokenizer, end, caplog):
    """As in llama.cpp: a text may follow several alternatives that are not exclusive."""
    both = [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]
    grammar = Grammar("json_schema", json.dumps({"oneOf": both}), tokenizer, end)
    assert [one.message for one in caplog.records] == [
        "oneOf in the JSON schema is followed as anyOf, as in llama.cpp"
    ]
    for text in ("7", "3", "-2"):
        assert follows(grammar, tokenizer.encode(text, add_special=False))
    exclusive = {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}
    Grammar("json_schema", json.dumps(exclusive), tokenizer, end)
    assert len(caplog.records) == 1


def test_unknown_keywords_are_annotations(tokenizer, end):
    schema = {"type": "integer", "frobnicate": 1, "title": "N", "$comment": "x"}
    assert follows(Grammar("json_schema", json.dumps(schema), tokenizer, end), [
        *tokenizer.encode("3", add_special=False)
    ])  # fmt: skip


def test_other_properties_are_allowed_unless_the_schema_forbids_them(tokenizer, end):
    schema: dict = {"properties": {"n": {"type": "integer"}}, "type": "object"}
    tokens = tokenizer.encode('{"n": 1,\n "more": [2]}', add_special=False)
    for forbidden, fits in ({}, True), ({"additionalProperties": False}, False):
        grammar = Grammar("json_schema", json.dumps(schema | forbidden), tokenizer, end)
        assert follows(grammar, tokens) == fits


def test_a_grammar_needs_an_end(tokenizer):
    with pytest.raises(UsageError, match="a token that ends it"):
        Grammar("gbnf", 'root ::= "a"', tokenizer, frozenset())


# ---- generation


def test_what_is_allowed_is_drawn_as_without_a_grammar(model):
    """A grammar that allows everything changes nothing."""
    prompt = "The function returns"
    free = "".join(iqforge.generate(model, prompt, 20, seed=3))
    anything = "root ::= [\\x00-\\U0010FFFF]*"
    assert "".join(iqforge.generate(model, prompt, 20, seed=3, grammar=anything)) == free


def test_generated_texts_follow(model):
    digits = 'root ::= ([0-9]{3} "-"){2} [0-9]{2} "!"'
    for seed in range(3):
        text = "".join(iqforge.generate(model, "Call ", 60, seed=seed, grammar=digits))
        assert len(text) == 11 and text[-1] == "!" and text[3] == text[7] == "-"
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    for options in ({"temperature": 0}, {"mirostat": 2}, {"dry_multiplier": 0.8}):
        pieces = iqforge.generate(model, "x = ", 100, json_schema=json.dumps(schema), **options)
        assert json.loads("".join(pieces))["n"] <= 9


def test_answers_follow(model):
    session = iqforge.open_chat(model, chat_template="chatml", grammar='root ::= "yes" | "no"')
    messages: list = [{"role": "user", "content": "Is it?"}]
    for _ in range(2):  # every answer begins the grammar again
        text = "".join(session.answer(messages))
        assert text in ("yes", "no")
        messages += [{"role": "assistant", "content": text}, messages[0]]
    assert isinstance(session, ChatSession) and isinstance(session.template, ChatTemplate)


def test_command(tmp_path, capsys):
    words = ["generate", "--device", "cpu", "-m", str(DEMO), "-p", "x", "--no-display-prompt"]
    (tmp_path / "g.gbnf").write_text('root ::= "one" | "two"\n')
    (tmp_path / "s.json").write_text('{"enum": ["three"]}')
    for flags, texts in (
        (["--grammar", 'root ::= "a"{3}'], ["aaa\n"]),
        (["--grammar-file", str(tmp_path / "g.gbnf")], ["one\n", "two\n"]),
        (["-j", '{"const": 5}'], ["5\n"]),
        (["-jf", str(tmp_path / "s.json")], ['"three"\n']),
    ):
        assert main([*words, *flags]) == 0
        assert capsys.readouterr().out in texts
    for flags, problem in (
        (["--grammar", "x"], "line 1: expected ::="),
        (["-j", "{}", "--grammar", "x"], "only one grammar"),
        (["-j", "{}", "--ignore-eos"], "drop ignore_eos"),
        (["--grammar-file", "/nonexistent"], "no such file"),
    ):
        assert main([*words, *flags]) == 1
        assert problem in capsys.readouterr().err


def test_nothing_is_left_of_an_impossible_bias(model):
    """The bias forbids the only way on."""
    tokens = {
        token
        for token in range(model.tokenizer.n_tokens)
        if model.tokenizer.token_bytes(token)[:1] == b"a"
    }
    biases = tuple(f"{token}-inf" for token in itertools.islice(tokens, 2000))
    with pytest.raises(iqforge.IqforgeError, match="no token is possible"):
        list(iqforge.generate(model, "x", 9, grammar='root ::= "a"', logit_bias=biases))

"""The mixes of all presets, as data: which tensor gets which type.

After llama-quantize of ik_llama.cpp (2026-08); for presets that only llama.cpp (2026-10) has, after that. How to read it:

- A preset belongs to one chain (`chain_of`). A chain is a list of `Row`s; a tensor takes the first row whose part its name contains and
  whose `when` holds. A tensor without row gets the preset's base type. The output matrix (or the token embedding, if it also serves as
  that) and the embeddings have rows of their own, before any chain.
- Lines of a row are `PRESETS: choice, choice, ..`, `*` for all. A choice is conditions and then a type, or only a type. The first
  choice that holds counts, in any line for the preset; if none does, the base type does. `flag` names the user's type that goes first.
- `base` is the base type; `step` and `step70` are one step up from it, by `STEPS`, where there is one (if not, the base type).
- Conditions: `E>=4` experts, `G>=4` query heads per key head, `v<2` value projections seen before, `first/8` and `first/16` (layer in
  that part of the layers), `middle` (neither in the first nor the last eighth), `more` (in the first or last eighth, or every third
  layer between), `more_v` (so by value projections), `imatrix`, `falcon`, `dflash-draft` (architectures), `70B` (size class),
  `big_vocabulary`, `tied`, `ragged` (row not a multiple of 256), `experts` (a matrix for each expert); `!` negates.
- `count`: what the row counts layers by where the model has no experts (or always, with `by_count`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..formats.ftypes import FILE_TYPES
from ..formats.types import GGMLType, ggml_type

WORDS = frozenset("first/8 first/16 middle more more_v imatrix falcon dflash-draft 70B big_vocabulary tied ragged experts".split())
COMPARISON = re.compile(r"([EGv])(>=|<)(\d+)")
STEPS = {
    "step": """IQ3_S: Q2_K IQ3_XXS; IQ3_K_R4: Q2_K_R4 IQ3_XXS_R4; Q4_K: Q3_K IQ3_S; IQ4_K: IQ3_K; IQ4_KS: IQ3_KS IQ2_KL;
               Q4_K_R4: IQ3_S_R4 Q3_K_R4; Q5_K: Q4_K IQ4_XS IQ4_NL IQ4_NL_R4 IQ4_XS_R8; IQ5_K: IQ4_K IQ4_KS; Q6_K: Q5_K;
               IQ6_K: IQ5_K IQ5_KS""",
    "step70": "Q5_K: Q3_K Q4_K; IQ5_K: IQ3_K",
}


@dataclass(frozen=True)
class Choice:
    """`result` (a type, `base` or a name of STEPS) if all `conditions` hold."""

    conditions: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class Row:
    """What tensors get whose name contains `part`. `lines`: (presets, or None for all, and choices)."""

    part: str
    lines: tuple[tuple[frozenset[str] | None, tuple[Choice, ...]], ...]
    flag: str = ""
    when: tuple[str, ...] = ()
    count: str = ""
    by_count: bool = False

    def choices(self, preset: str) -> list[Choice]:
        """Those for a preset, in order."""
        return [choice for presets, choices in self.lines if presets is None or preset in presets for choice in choices]


def _row(part: str, text: str = "", *, flag: str = "", when: str = "", count: str = "", by_count: bool = False) -> Row:
    lines = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        presets, _, choices = line.partition(":")
        names = None if presets == "*" else frozenset(presets.split())
        if unknown := (names or frozenset()) - FILE_TYPES.keys():
            raise RuntimeError(f"no presets: {sorted(unknown)}")
        lines.append((names, tuple(_choice(choice) for choice in choices.split(","))))
    return Row(part, tuple(lines), flag, tuple(_condition(word) for word in when.split()), count, by_count)


def _choice(text: str) -> Choice:
    *conditions, result = text.split()
    if result != "base" and result not in STEPS:
        ggml_type(result)
    return Choice(tuple(_condition(word) for word in conditions), result)


def _condition(word: str) -> str:
    if word.removeprefix("!") not in WORDS and not COMPARISON.fullmatch(word):
        raise RuntimeError(f"unknown condition {word!r}")
    return word


def step_up(base: GGMLType, step: str) -> GGMLType:
    """The type that `step` puts in the place of `base`."""
    for entry in STEPS[step].split(";"):
        better, _, names = entry.partition(":")
        if base.name in names.split():
            return ggml_type(better.strip())
    return base


OUTPUT_ROW = _row("output", """
    MXFP4_MOE: Q8_0
    *: falcon Q8_0, ragged Q8_0
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ2_KS IQ2_K IQ2_KL IQ3_XXS IQ3_K IQ3_KS IQ2_K_R4 IQ3_K_R4 IQ3_XXS_R4 IQ2_M_R4: tied IQ4_K, Q5_K
    IQ1_S_R4 IQ1_M_R4 IQ1_KT IQ2_KT IQ3_KT: tied IQ4_K, Q5_K
    IQ2_XXS_R4 IQ2_XS_R4: tied IQ4_K_R4, Q5_K_R4
    IQ3_S IQ3_M IQ3_KL IQ4_XS IQ3_S_R4 IQ4_KS IQ4_KSS IQ4_KS_R4: tied IQ5_K, Q6_K
    Q8_0 Q8_0_R8 IQ6_K Q6_K_R4 Q8_K_R8 Q8_KV Q8_KV_R8: base
    *: Q6_K
""", flag="output_tensor")

EMBEDDING_LINES = """
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ1_S_R4 IQ1_M_R4 IQ2_XXS_R4 IQ2_XS_R4: Q2_K
    IQ2_S IQ2_M IQ2_M_R4 IQ3_XXS IQ3_KT: IQ3_S
    IQ3_XXS_R4: IQ3_K
    IQ1_BN IQ2_BN IQ2_BN_R4: IQ4_NL
    TQ1_0 TQ2_0 Q2_0: Q4_K
    MXFP4_MOE: Q8_0
"""
EMBEDDING_ROWS = {"token_embd.weight": _row("token_embd", EMBEDDING_LINES, flag="token_embedding"),
                  "per_layer_token_embd.weight": _row("per_layer_token_embd", EMBEDDING_LINES, flag="per_layer_token_embedding")}


def _lowest(value: str, value2: str, value1: str, key: str, first: str, qkv: str, down: str, output: str, output1: str) -> tuple[Row, ...]:
    """The chain of one-bit interleaved presets, and with other types of 2-bit trellises. Arguments in the order of the rows."""
    return (_row("attn_v.weight", f"*: E>=4 {value}, G>=4 {value}, G>=2 {value2}, {value1}"),
            _row("attn_k", f"*: {key}", when="E>=8"),
            *(_row(f"blk.0.ffn_{part}", f"*: {first}", when="E>=8") for part in ("down", "gate", "up")),
            _row("attn_q", f"*: {key}", when="E>=8"),
            _row("attn_qkv.weight", f"*: {qkv}"),
            _row("_shexp.weight", f"*: {value}"),
            _row("ffn_down", f"*: first/8 {down}", flag="ffn_down", count="down"),
            _row("attn_output.weight", f"*: E>=4 {output}, {output1}"))


_LOWEST_R4 = _lowest("IQ4_K_R4", "IQ3_K_R4", "Q2_K_R4", "Q4_K_R4", "IQ3_K_R4", "IQ2_K_R4", "Q2_K_R4", "Q5_K_R4", "IQ2_K_R4")
_TRELLIS_2 = _lowest("IQ4_K", "IQ3_K", "Q2_K", "Q4_K", "IQ3_K", "IQ3_K", "IQ3_K", "Q5_K", "IQ3_K")
_LOW = (
    _row("attn_v.weight", """
        *: G>=4 IQ4_K, E>=4 IQ4_K, G>=2 IQ3_K, E>=2 IQ3_K
        IQ2_S IQ2_M IQ2_M_R4: IQ3_S
        *: Q2_K
    """),
    _row("attn_k", "*: Q4_K", when="E>=8"),
    _row("attn_q", "*: Q4_K", when="E>=8"),
    _row("attn_qkv.weight", """
        IQ2_S IQ2_M IQ2_M_R4: IQ3_XXS
        *: IQ2_K
    """),
    _row("ffn_down", """
        IQ2_S IQ2_M IQ2_M_R4: first/8 IQ3_S
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_KS IQ2_XXS_R4 IQ2_XS_R4: first/8 Q2_K
    """, count="down", by_count=True),
    _row("attn_output.weight", """
        *: E>=4 Q5_K
        IQ1_S IQ1_M: IQ2_K
        IQ2_S IQ2_M IQ2_M_R4: IQ3_S
    """, flag="attn_output"),
)
_EDGE_LINES = """
    IQ3_XS: middle IQ3_XXS
    IQ3_KL: more IQ4_KS
"""
_GENERAL = (
    _row("attn_v.weight", """
        *: E>=4 Q8_0, 70B step70
        Q2_K: G>=4 Q4_K, Q3_K
        IQ2_K: G>=2 IQ4_K, IQ3_K
        IQ2_K_R4: G>=2 IQ4_K_R4, IQ3_K_R4
        Q2_K_S: G>=4 Q4_K
        Q2_K_R4: G>=4 Q4_K_R4
        IQ3_XXS: G>=4 Q4_K, G>=2 IQ3_K, !imatrix IQ3_S, IQ3_XXS
        IQ3_KT: G>=4 IQ4_K, IQ3_K
        IQ4_KT: G>=4 IQ5_K, IQ4_K
        IQ3_XXS_R4: G>=4 Q4_K_R4, G>=2 IQ3_K_R4, !imatrix IQ3_K_R4, IQ3_XXS_R4
        IQ3_XS IQ3_S IQ3_K: G>=2 IQ4_K
        IQ3_S_R4 IQ3_K_R4: G>=2 IQ4_K_R4
        IQ3_KS IQ2_KL: G>=2 IQ4_KS
        IQ3_KL IQ3_M: G>=2 IQ5_K, IQ4_K
        Q3_K_M: v<2 Q5_K, Q4_K
        Q3_K_L: Q5_K
        IQ4_NL IQ4_XS IQ4_NL_R4 IQ4_XS_R8 IQ4_KS IQ4_KSS IQ4_K IQ4_K_R4: G>=2 IQ5_K
        IQ4_KS_R4: G>=2 IQ5_K_R4
        Q4_K_M Q5_K_M: more_v Q6_K
        Q4_K_S Q4_K_R4: v<4 Q5_K
        Q5_K_S: big_vocabulary Q6_K, base
        IQ5_K IQ5_KS: big_vocabulary IQ6_K, base
        Q4_K_M Q5_K_M: dflash-draft base
        *: G>=4 step
    """, flag="attn_v"),
    _row("attn_k", """
        *: E>=4 Q8_0
        IQ3_XS: IQ3_XXS
        IQ3_XXS IQ3_XXS_R4: IQ2_S
    """, flag="attn_k"),
    _row("attn_q", """
        IQ3_XS: IQ3_XXS
        IQ3_XXS IQ3_XXS_R4: IQ2_S
        Q5_K_S: big_vocabulary Q4_K
        IQ5_K: big_vocabulary IQ4_K
        IQ5_KS: big_vocabulary IQ4_KS
    """, flag="attn_q"),
    _row("ffn_down", """
        Q2_K: Q3_K
        Q2_K_S: first/8 Q4_K
        Q2_K_R4: first/8 Q4_K_R4
        IQ3_XXS: imatrix base, first/8 Q4_K, Q3_K
        IQ3_KT: imatrix base, first/8 IQ4_K, IQ3_K
        IQ3_XXS_R4: imatrix base, first/8 Q4_K_R4, IQ3_K_R4
        Q3_K_M: first/16 Q5_K, !falcon Q4_K, more Q4_K, Q3_K
        IQ3_M: first/8 IQ4_K, E>=4 more IQ4_K
        Q3_K_L: falcon Q4_K, Q5_K
        IQ3_KL: more IQ4_KS, IQ3_K
        Q4_K_M: falcon first/16 Q6_K, falcon more Q5_K, falcon Q4_K, more Q6_K
        IQ4_NL IQ4_XS IQ4_KS IQ4_KSS IQ4_NL_R4 IQ4_XS_R8: !imatrix first/8 Q5_K
        IQ4_KS_R4: !imatrix first/8 Q5_K_R4
        Q5_K_M: more Q6_K
        Q4_K_S Q4_K_R4: !falcon first/8 Q5_K
        Q4_0: imatrix first/8 Q4_1
        Q5_0: imatrix first/8 Q5_1
        Q4_0_R8: imatrix first/8 IQ4_NL_R4
    """, flag="ffn_down", count="down"),
    _row("attn_output.weight", """
        Q3_K_L: falcon Q4_K
        *: falcon base
        Q2_K Q3_K_S Q3_K_M Q4_K_S Q4_K_M IQ3_XS IQ3_XXS IQ3_S IQ3_M IQ4_NL IQ4_XS IQ4_K IQ4_KSS IQ4_KS IQ4_KS_R4 IQ5_KS IQ5_KS_R4: E>=4 Q5_K
        IQ2_K IQ3_K IQ3_KL IQ3_KT IQ3_KS Q2_K_R4 Q3_K_R4 Q4_K_R4 IQ4_NL_R4 IQ4_XS_R8 IQ4_K_R4 IQ3_K_R4 IQ2_K_R4: E>=4 Q5_K
        IQ3_XXS_R4 IQ3_S_R4: E>=4 Q5_K
        IQ2_KL: E>=4 IQ4_KS
        *: E>=4 base
        Q2_K: Q3_K
        IQ3_XXS: IQ3_S
        IQ3_KT: G>=4 IQ3_K
        IQ3_XXS_R4: IQ3_K_R4
        Q3_K_M: Q4_K
        Q3_K_L: Q5_K
        IQ3_M: IQ4_K
        IQ2_K: IQ3_K
        IQ2_K_R4: IQ3_K_R4
        IQ3_KL: IQ4_KS
    """, flag="attn_output"),
    _row("ffn_gate", _EDGE_LINES, flag="ffn_gate", count="gate"),
    _row("ffn_up", _EDGE_LINES, flag="ffn_up", count="up"),
)
# Of llama.cpp, which tests for eight experts exactly.
_TERNARY = tuple(_row(part, "*: E>=8 E<9 Q8_0", flag=flag) for part, flag in (
    ("attn_v.weight", "attn_v"), ("attn_qkv.weight", "attn_q"), ("attn_kv_b.weight", "attn_k"), ("attn_k.weight", "attn_k"))) + tuple(
    _row(flag if flag != "attn_output" else "attn_output.weight", "", flag=flag) for flag in
    ("attn_q", "attn_k", "ffn_down", "attn_output", "ffn_gate", "ffn_up"))
_EXPERTS_ONLY = (_row("", "*: experts MXFP4, Q8_0"),)

_CHAINS = {"IQ1_S_R4 IQ1_M_R4": _LOWEST_R4, "IQ2_KT": _TRELLIS_2,
           "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ2_KS IQ2_XXS_R4 IQ2_XS_R4 IQ2_M_R4": _LOW,
           "TQ1_0 TQ2_0 Q1_0 Q2_0 NVFP4": _TERNARY, "MXFP4_MOE": _EXPERTS_ONLY}
_CHAIN_OF = {name: chain for names, chain in _CHAINS.items() for name in names.split()}
# Presets that are refused without an importance matrix; beside them, single types are (`GGMLType.needs_importance`).
NEED_IMATRIX = frozenset("IQ1_S IQ1_M IQ1_S_R4 IQ1_M_R4 IQ2_XXS IQ2_XXS_R4 IQ2_XS IQ2_XS_R4 IQ2_S Q2_K_S".split())
_SAME = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def preset_name(name: str) -> str:
    """The name that rules have for a preset: its own, or that of the preset it is short for."""
    return _SAME.get(name, name)


def chain_of(preset: str) -> tuple[Row, ...]:
    """The rows of a preset, which a tensor's name is tried against in order."""
    return _CHAIN_OF.get(preset, _GENERAL)

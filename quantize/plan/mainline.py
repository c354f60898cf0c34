"""The mixes of all presets of llama.cpp's llama-quantize (2026-10), as data in the language of
`mix_rules`.

llama-quantize classifies a name by the first of these parts that it contains: attn_qkv.weight,
attn_kv_b.weight, attn_v.weight, attn_k.weight, and so on. It treats the first three as value
projections, and models with eight experts as a separate case.
"""

from __future__ import annotations

from .mix_rules import VALUES, MixRule, RuleSet, by_preset, mix_rule
from .presets import GLM5_NEXT, IK

_PRESETS = """
    F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q2_K_S Q3_K Q3_K_S Q3_K_M Q3_K_L Q4_K Q4_K_S
    Q4_K_M Q5_K Q5_K_S Q5_K_M Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S
    IQ3_M IQ4_NL IQ4_XS TQ1_0 TQ2_0 Q1_0 Q2_0 NVFP4 MXFP4_MOE
"""

_OUTPUT = mix_rule(
    "output",
    """
    MXFP4_MOE: Q8_0
    *: falcon Q8_0, unfit Q8_0
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS: Q5_K
    Q8_0: base
    *: Q6_K
""",
    flag="output_tensor",
)

_EMBEDDING_LINES = """
    MXFP4_MOE: Q8_0
    IQ1_S IQ1_M IQ2_XXS IQ2_XS: Q2_K
    IQ2_S IQ2_M IQ3_XXS: IQ3_S
    TQ1_0 TQ2_0 Q2_0: Q4_K
"""

# Flags of roles are ik_llama.cpp's. They apply to the same parts of names here.
_VALUE_PARTS = {
    "attn_qkv.weight": "attn_q",
    "attn_kv_b.weight": "attn_k",
    "attn_v.weight": "attn_v",
}
_FLAGS_ONLY = (mix_rule("attn_q", flag="attn_q"), mix_rule("attn_k", flag="attn_k"))
_NEVER_BELOW_8 = tuple(
    mix_rule(part, "*: Q8_0", when="glm5-next")
    for part in ("attn_q_a", "attn_q_b", "nextn.eh_proj")
)


def _values(text: str) -> tuple[MixRule, ...]:
    return tuple(
        mix_rule(part, text, flag=flag, count=VALUES) for part, flag in _VALUE_PARTS.items()
    )


_LOW = (
    *_NEVER_BELOW_8,
    *_values("""
        *: G>=4 Q4_K, E>=4 Q4_K
        IQ2_S IQ2_M: IQ3_S
        *: Q2_K
    """),
    mix_rule("attn_k.weight", "*: E=8 Q4_K", flag="attn_k"),
    mix_rule(
        "attn_output.weight",
        """
        *: E=8 Q5_K
        IQ1_S IQ1_M: IQ2_XXS
        IQ2_S IQ2_M: IQ3_S
    """,
        flag="attn_output",
    ),
    mix_rule("ffn_up", flag="ffn_up"),
    mix_rule("ffn_gate", flag="ffn_gate"),
    mix_rule(
        "ffn_down",
        """
        IQ2_S IQ2_M: first/8 IQ3_S
        IQ1_S IQ1_M IQ2_XXS IQ2_XS: first/8 Q2_K
    """,
        flag="ffn_down",
        count="down",
        by_count=True,
    ),
    *_FLAGS_ONLY,
)
_GENERAL = (
    *_NEVER_BELOW_8,
    *_values("""
        *: E=8 Q8_0
        Q2_K Q3_K_S Q3_K_M IQ3_M Q4_K_S: 70B Q5_K
        Q2_K_S IQ3_XXS IQ3_XS IQ3_S: 70B G>=4 Q5_K
        Q4_K_M: 70B !more_v Q5_K
        Q2_K: G>=4 Q4_K, Q3_K
        Q2_K_S IQ3_XXS IQ3_XS IQ3_S: G>=4 Q4_K
        IQ3_XXS: !imatrix IQ3_S
        IQ3_M: Q4_K
        Q3_K_M: v<2 Q5_K, Q4_K
        Q3_K_L: Q5_K
        IQ4_NL IQ4_XS: G>=4 Q5_K
        Q4_K_M Q5_K_M: more_v Q6_K
        Q4_K_S: v<4 Q5_K
    """),
    mix_rule(
        "attn_k.weight",
        """
        *: E=8 Q8_0
        IQ3_XS: IQ3_XXS
        IQ3_XXS: IQ2_S
    """,
        flag="attn_k",
    ),
    mix_rule(
        "attn_q.weight",
        """
        IQ3_XS: IQ3_XXS
        IQ3_XXS: IQ2_S
    """,
        flag="attn_q",
    ),
    mix_rule(
        "attn_output.weight",
        """
        Q3_K_L: falcon Q4_K
        *: falcon base
        Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS: E=8 Q5_K
        *: E=8 base
        Q2_K: Q3_K
        IQ3_XXS: IQ3_S
        Q3_K_M IQ3_M: Q4_K
        Q3_K_L: Q5_K
    """,
        flag="attn_output",
    ),
    mix_rule("ffn_up", "IQ3_XS: middle IQ3_XXS", flag="ffn_up", count="up"),
    mix_rule("ffn_gate", "IQ3_XS: middle IQ3_XXS", flag="ffn_gate", count="gate"),
    mix_rule(
        "ffn_down",
        """
        Q2_K: Q3_K
        Q2_K_S: first/8 Q4_K
        IQ3_XXS: imatrix base, first/8 Q4_K, Q3_K
        Q3_K_M: first/16 Q5_K, !falcon Q4_K, more Q4_K, Q3_K
        IQ3_M: first/8 Q4_K, E=8 more Q4_K
        Q3_K_L: falcon Q4_K, Q5_K
        Q4_K_M: falcon first/16 Q6_K, falcon more Q5_K, falcon Q4_K, more Q6_K
        IQ4_NL IQ4_XS: !imatrix first/8 Q5_K
        Q5_K_M: more Q6_K
        Q4_K_S: !falcon first/8 Q5_K
        Q4_0: imatrix first/8 Q4_1
        Q5_0: imatrix first/8 Q5_1
    """,
        flag="ffn_down",
        count="down",
    ),
    *_FLAGS_ONLY,
)

_RECURRENT = [
    "first",
    "w0",
    "w1",
    "w2",
    "v0",
    "v1",
    "v2",
    "a0",
    "a1",
    "a2",
    "g1",
    "g2",
    "decay_w1",
    "decay_w2",
    "lerp_fused",
]
_PROTECTED = (
    "_norm.weight",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "attn_rel_b.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    *(f"time_mix_{part}.weight" for part in _RECURRENT),
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)
_PROTECTED_IN = {"glm5-next": GLM5_NEXT}

MAINLINE = RuleSet(
    name="mainline",
    output=_OUTPUT,
    general=_GENERAL,
    embeddings={
        f"{name}.weight": mix_rule(name, _EMBEDDING_LINES, flag=flag)
        for name, flag in (
            ("token_embd", "token_embedding"),
            ("per_layer_token_embd", "per_layer_token_embedding"),
        )
    },
    tied=("token_embd.weight", "per_layer_token_embd.weight"),
    presets=frozenset(_PRESETS.split()),
    chains=by_preset(
        {
            "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M": _LOW,
            "MXFP4_MOE": (mix_rule("", "*: experts MXFP4, Q8_0"),),
        }
    ),
    value_parts=tuple(_VALUE_PARTS),
    no_need=(*IK.no_need, "per_layer_token_embd.weight"),
    need_type=frozenset({"IQ3_XXS"}),
    short_rows={"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q5_K": "Q5_1"},
    protected=_PROTECTED,
    protected_in=_PROTECTED_IN,
    sorted_by_layer=True,
)
# Presets that ik_llama.cpp does not have.
ONLY_MAINLINE = frozenset(["TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "NVFP4", "MXFP4_MOE"])
RULE_SETS = {rules.name: rules for rules in (IK, MAINLINE)}

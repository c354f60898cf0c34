"""The mixes of all presets of ik_llama.cpp's llama-quantize (2026-08), as data in the language of
`mix_rules`.
"""

from __future__ import annotations

from .mix_rules import VALUES, MixRule, RuleSet, by_preset, mix_rule

OUTPUT_ROW = mix_rule(
    "output",
    """
    *: falcon Q8_0, ragged Q8_0
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ2_KS IQ2_K IQ2_KL IQ3_XXS IQ3_K IQ3_KS \
    IQ2_K_R4 IQ3_K_R4 IQ3_XXS_R4 IQ2_M_R4: tied IQ4_K, Q5_K
    IQ1_S_R4 IQ1_M_R4 IQ1_KT IQ2_KT IQ3_KT: tied IQ4_K, Q5_K
    IQ2_XXS_R4 IQ2_XS_R4: tied IQ4_K_R4, Q5_K_R4
    IQ3_S IQ3_M IQ3_KL IQ4_XS IQ3_S_R4 IQ4_KS IQ4_KSS IQ4_KS_R4: tied IQ5_K, Q6_K
    Q8_0 Q8_0_R8 IQ6_K Q6_K_R4 Q8_K_R8 Q8_KV Q8_KV_R8: base
    *: Q6_K
""",
    flag="output_tensor",
)

EMBEDDING_LINES = """
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ1_S_R4 IQ1_M_R4 IQ2_XXS_R4 IQ2_XS_R4: Q2_K
    IQ2_S IQ2_M IQ2_M_R4 IQ3_XXS IQ3_KT: IQ3_S
    IQ3_XXS_R4: IQ3_K
    IQ1_BN IQ2_BN IQ2_BN_R4: IQ4_NL
"""
EMBEDDING_ROWS = {
    "token_embd.weight": mix_rule("token_embd", EMBEDDING_LINES, flag="token_embedding"),
    "per_layer_token_embd.weight": mix_rule(
        "per_layer_token_embd", EMBEDDING_LINES, flag="per_layer_token_embedding"
    ),
}


def _lowest(
    value: str,
    value2: str,
    value1: str,
    key: str,
    first: str,
    qkv: str,
    down: str,
    output: str,
    output1: str,
) -> tuple[MixRule, ...]:
    """Return the chain of one-bit interleaved presets, and with other types of 2-bit trellises.
    Arguments in the order of the rows.
    """
    return (
        mix_rule(
            "attn_v.weight", f"*: E>=4 {value}, G>=4 {value}, G>=2 {value2}, {value1}", count=VALUES
        ),
        mix_rule("attn_k", f"*: {key}", when="E>=8"),
        *(
            mix_rule(f"blk.0.ffn_{part}", f"*: {first}", when="E>=8")
            for part in ("down", "gate", "up")
        ),
        mix_rule("attn_q", f"*: {key}", when="E>=8"),
        mix_rule("attn_qkv.weight", f"*: {qkv}"),
        mix_rule("_shexp.weight", f"*: {value}"),
        mix_rule("ffn_down", f"*: first/8 {down}", flag="ffn_down", count="down"),
        mix_rule("attn_output.weight", f"*: E>=4 {output}, {output1}"),
    )


_LOWEST_R4 = _lowest(
    "IQ4_K_R4",
    "IQ3_K_R4",
    "Q2_K_R4",
    "Q4_K_R4",
    "IQ3_K_R4",
    "IQ2_K_R4",
    "Q2_K_R4",
    "Q5_K_R4",
    "IQ2_K_R4",
)
_TRELLIS_2 = _lowest("IQ4_K", "IQ3_K", "Q2_K", "Q4_K", "IQ3_K", "IQ3_K", "IQ3_K", "Q5_K", "IQ3_K")
_LOW = (
    mix_rule(
        "attn_v.weight",
        """
        *: G>=4 IQ4_K, E>=4 IQ4_K, G>=2 IQ3_K, E>=2 IQ3_K
        IQ2_S IQ2_M IQ2_M_R4: IQ3_S
        *: Q2_K
    """,
        count=VALUES,
    ),
    mix_rule("attn_k", "*: Q4_K", when="E>=8"),
    mix_rule("attn_q", "*: Q4_K", when="E>=8"),
    mix_rule(
        "attn_qkv.weight",
        """
        IQ2_S IQ2_M IQ2_M_R4: IQ3_XXS
        *: IQ2_K
    """,
    ),
    mix_rule(
        "ffn_down",
        """
        IQ2_S IQ2_M IQ2_M_R4: first/8 IQ3_S
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_KS IQ2_XXS_R4 IQ2_XS_R4: first/8 Q2_K
    """,
        count="down",
        by_count=True,
    ),
    mix_rule(
        "attn_output.weight",
        """
        *: E>=4 Q5_K
        IQ1_S IQ1_M: IQ2_K
        IQ2_S IQ2_M IQ2_M_R4: IQ3_S
    """,
        flag="attn_output",
    ),
)
_EDGE_LINES = """
    IQ3_XS: middle IQ3_XXS
    IQ3_KL: more IQ4_KS
"""
_GENERAL = (
    mix_rule(
        "attn_v.weight",
        """
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
    """,
        flag="attn_v",
        count=VALUES,
    ),
    mix_rule(
        "attn_k",
        """
        *: E>=4 Q8_0
        IQ3_XS: IQ3_XXS
        IQ3_XXS IQ3_XXS_R4: IQ2_S
    """,
        flag="attn_k",
    ),
    mix_rule(
        "attn_q",
        """
        IQ3_XS: IQ3_XXS
        IQ3_XXS IQ3_XXS_R4: IQ2_S
        Q5_K_S: big_vocabulary Q4_K
        IQ5_K: big_vocabulary IQ4_K
        IQ5_KS: big_vocabulary IQ4_KS
    """,
        flag="attn_q",
    ),
    mix_rule(
        "ffn_down",
        """
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
    """,
        flag="ffn_down",
        count="down",
    ),
    mix_rule(
        "attn_output.weight",
        """
        Q3_K_L: falcon Q4_K
        *: falcon base
        Q2_K Q3_K_S Q3_K_M Q4_K_S Q4_K_M IQ3_XS IQ3_XXS IQ3_S IQ3_M IQ4_NL IQ4_XS \
        IQ4_K IQ4_KSS IQ4_KS IQ4_KS_R4 IQ5_KS IQ5_KS_R4: E>=4 Q5_K
        IQ2_K IQ3_K IQ3_KL IQ3_KT IQ3_KS Q2_K_R4 Q3_K_R4 Q4_K_R4 IQ4_NL_R4 IQ4_XS_R8 \
        IQ4_K_R4 IQ3_K_R4 IQ2_K_R4: E>=4 Q5_K
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
    """,
        flag="attn_output",
    ),
    mix_rule("ffn_gate", _EDGE_LINES, flag="ffn_gate", count="gate"),
    mix_rule("ffn_up", _EDGE_LINES, flag="ffn_up", count="up"),
)

GLM5_NEXT = (  # parts of names of tensors that llama.cpp keeps as they are
    "hc_",
    "indexer",
    *(f"ssm_{part}.weight" for part in ("f_a", "f_b", "g_a", "g_b", "beta")),
    "attn_kv_a_mqa",
    "attn_k_b",
    "attn_v_b",
)

IK = RuleSet(
    name="ik",
    output=OUTPUT_ROW,
    embeddings=EMBEDDING_ROWS,
    tied=("token_embd.weight",),
    general=_GENERAL,
    chains=by_preset(
        {
            "IQ1_S_R4 IQ1_M_R4": _LOWEST_R4,
            "IQ2_KT": _TRELLIS_2,
            "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ2_KS IQ2_XXS_R4 IQ2_XS_R4 IQ2_M_R4": _LOW,
        }
    ),
    value_parts=("attn_v.weight", "attn_qkv.weight"),
    no_need=("token_embd.weight", "output.weight"),
    need_preset=frozenset(
        [
            "IQ1_S",
            "IQ1_M",
            "IQ1_S_R4",
            "IQ1_M_R4",
            "IQ2_XXS",
            "IQ2_XXS_R4",
            "IQ2_XS",
            "IQ2_XS_R4",
            "IQ2_S",
            "Q2_K_S",
        ]
    ),
    protected=("_norm.weight", "ssm_conv1d", "ssm_x.weight", "ssm_dt.weight", "attn_rel_b.weight"),
    # As llama.cpp keeps them: ik_llama.cpp does not have these architectures.
    protected_in={
        **dict.fromkeys(("lfm2", "lfm2moe"), ("shortconv.conv.weight",)),
        "glm5-next": GLM5_NEXT,
        "gemma3n": ("altup", "laurel", "per_layer_model_proj"),
        # Which llama.cpp does not keep: small, and everything after them depends on them.
        "deepseek4": ("hc_", "compressor_ape.weight", "indexer.proj.weight"),
        "hy_v4": ("hc_", "indexer.proj.weight"),
        "qwen4exp": ("_inject.weight", "indexer.", "ple_conv1d"),
    },
)

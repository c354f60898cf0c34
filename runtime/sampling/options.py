"""Flags and keywords of the samplers. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import UsageError
from ...formats.options import Options, option
from .settings import (
    BREAKERS,
    DEFAULT_ORDER,
    RANGES,
    SAMPLERS,
    SamplerSettings,
    read_biases,
    sampler_order,
    sampler_sequence,
)


@dataclass(frozen=True)
class SamplerOptions(Options):
    """How tokens are drawn, with the names and defaults of llama-cli."""

    samplers: str | None = option(
        None,
        "--samplers",
        metavar="A;B;..",
        help="the samplers to use, in order (default: " + "; ".join(DEFAULT_ORDER) + ")",
    )
    sampling_seq: str | None = option(
        None,
        "--sampling-seq",
        aliases=("--sampler-seq",),
        metavar="LETTERS",
        help="the same in letters (default: " + "".join(SAMPLERS.values()) + ")",
    )
    seed: int = option(
        0, "-s", "--seed", metavar="N", help="the same seed gives the same text, -1: any"
    )
    temperature: float = option(
        0.8,
        "--temp",
        "--temperature",
        **RANGES["temperature"],
        metavar="T",
        help="0: always the most probable token",
    )
    dynatemp_range: float = option(
        0.0,
        "--dynatemp-range",
        **RANGES["dynatemp_range"],
        metavar="R",
        help="temperatures from T - R where the model is certain to T + R where it is not, 0: off",
    )
    dynatemp_exponent: float = option(
        1.0, "--dynatemp-exp", metavar="X", help="exponent of the entropy that chooses between them"
    )
    top_k: int = option(40, "--top-k", metavar="K", help="the K best tokens, 0: all")
    top_p: float = option(
        0.95,
        "--top-p",
        **RANGES["top_p"],
        metavar="P",
        help="the fewest tokens with probability P in all, 1: all",
    )
    min_p: float = option(
        0.05,
        "--min-p",
        **RANGES["min_p"],
        metavar="P",
        help="tokens at least P times as probable as the best, 0: all",
    )
    typical_p: float = option(
        1.0,
        "--typical",
        aliases=("--typical-p",),
        **RANGES["typical_p"],
        metavar="P",
        help="the most typical tokens with probability P in all, 1: all",
    )
    top_n_sigma: float = option(
        -1.0,
        "--top-nsigma",
        aliases=("--top-n-sigma",),
        metavar="N",
        help="tokens whose logits are at most N standard deviations below the best, -1: all",
    )
    xtc_probability: float = option(
        0.0,
        "--xtc-probability",
        **RANGES["xtc_probability"],
        metavar="P",
        help="how often the most probable tokens are excluded, 0: never",
    )
    xtc_threshold: float = option(
        0.1,
        "--xtc-threshold",
        **RANGES["xtc_threshold"],
        metavar="P",
        help="all but the last of the tokens of at least this probability are excluded",
    )
    repeat_last_n: int = option(
        64,
        "--repeat-last-n",
        **RANGES["repeat_last_n"],
        metavar="N",
        help="tokens that the penalties consider, 0: none, -1: the whole context",
    )
    repeat_penalty: float = option(
        1.0,
        "--repeat-penalty",
        **RANGES["repeat_penalty"],
        metavar="X",
        help="divides logits of tokens that occurred, 1: off",
    )
    presence_penalty: float = option(
        0.0,
        "--presence-penalty",
        metavar="X",
        help="subtracted from logits of tokens that occurred",
    )
    frequency_penalty: float = option(
        0.0, "--frequency-penalty", metavar="X", help="the same for every time that they occurred"
    )
    dry_multiplier: float = option(
        0.0,
        "--dry-multiplier",
        **RANGES["dry_multiplier"],
        metavar="X",
        help="penalty for continuing a repetition, 0: off",
    )
    dry_base: float = option(
        1.75, "--dry-base", metavar="X", help="its growth with every token that was repeated"
    )
    dry_allowed_length: int = option(
        2,
        "--dry-allowed-length",
        **RANGES["dry_allowed_length"],
        metavar="N",
        help="shorter repetitions have no penalty",
    )
    dry_penalty_last_n: int = option(
        -1,
        "--dry-penalty-last-n",
        **RANGES["dry_penalty_last_n"],
        metavar="N",
        help="tokens that are searched for repetitions, 0: none, -1: the whole context",
    )
    dry_sequence_breaker: tuple[str, ...] = option(
        (),
        "--dry-sequence-breaker",
        kind=str,
        many=True,
        metavar="TEXT",
        help="repetitions do not reach across this text (repeatable; default: line break, colon,"
        " quotation mark, asterisk; none: no text)",
    )
    mirostat: int = option(
        0,
        "--mirostat",
        choices=(0, 1, 2),
        metavar="V",
        help="Mirostat, version 1 or 2, instead of all samplers but the temperature; 0: off",
    )
    mirostat_lr: float = option(
        0.1, "--mirostat-lr", metavar="X", help="learning rate (eta) of Mirostat"
    )
    mirostat_ent: float = option(
        5.0,
        "--mirostat-ent",
        **RANGES["mirostat_ent"],
        metavar="X",
        help="target surprise (tau) of Mirostat, in bits",
    )
    logit_bias: tuple[str, ...] = option(
        (),
        "-l",
        "--logit-bias",
        kind=str,
        many=True,
        metavar="ID+X",
        help="add X to the logit of a token, such as 15043+1 or 15043-inf (repeatable)",
    )

    def settings(self) -> SamplerSettings:
        """Return the values of all samplers. UsageError for those outside of their range."""
        if self.samplers is not None and self.sampling_seq is not None:
            raise UsageError("samplers and sampling_seq both say which samplers to use")
        order = DEFAULT_ORDER
        if self.samplers is not None:
            order = sampler_order(self.samplers)
        elif self.sampling_seq is not None:
            order = sampler_sequence(self.sampling_seq)
        breakers = self.dry_sequence_breaker or BREAKERS
        # A shell passes "\n" as two characters.
        chosen = [text.replace("\\n", "\n").replace("\\t", "\t") for text in breakers]
        values = {
            one.name: getattr(self, one.name)
            for one in fields(SamplerSettings)
            if one.name in SamplerOptions.field_names() and one.name != "logit_bias"
        }
        return SamplerSettings(
            **values | {"top_k": max(self.top_k, 0)},  # below 0: all tokens, as in llama.cpp
            dry_breakers=() if "none" in chosen else tuple(chosen),
            logit_bias=read_biases(self.logit_bias),
            order=order,
        )

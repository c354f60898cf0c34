"""Options that say how layers are evaluated and cached. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..formats.flags import Constant
from ..formats.options import Options, option

if TYPE_CHECKING:
    from .state.cache import CacheSettings
    from .weights.switches import Switches


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `LoadOptions` has these
class LayerOptions(Options):
    """Tokens at a time, what is cached and how, and switches of attention and experts."""

    ubatch: int | None = option(
        None,
        "-ub",
        "--ubatch-size",
        kind=int,
        least=1,
        metavar="N",
        help="most tokens that go through the model at a time (default: 512)",
    )
    cache_size: int = option(
        512,
        "--cache-size",
        least=0,
        metavar="MIB",
        help="memory for decoded weights on the CPU",
    )
    cache_type_k: str | None = option(
        None,
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="type of cached keys: f32, f16, bf16, q8_0, q6_0, q5_1, q5_0, q4_1, q4_0, iq4_nl,"
        " q8_kv (keys only); default: f16; no cache for perplexity and imatrix",
    )
    cache_type_v: str | None = option(
        None, "-ctv", "--cache-type-v", metavar="TYPE", help="type of cached values (same choices)"
    )
    k_cache_hadamard: bool = option(
        False,
        "-khad",
        "--k-cache-hadamard",
        help="apply a Hadamard transform to quantized keys",
    )
    v_cache_hadamard: bool = option(
        False, "-vhad", "--v-cache-hadamard", help="apply a Hadamard transform to quantized values"
    )
    swa_full: bool = option(
        False,
        "--swa-full",
        help="keep all positions in layers with a sliding window, so that a sequence can be cut"
        " back to any length",
    )
    flash_attn: bool | str = option(
        True,
        "-fa",
        "--flash-attn",
        kind=str,
        optional=True,
        metavar="on|off",
        constants=(
            Constant(("-no-fa", "--no-fa", "--no-flash-attn"), False, "the same as -fa off"),
        ),
        help="flash attention (default: on)",
    )
    attention_max_batch: int = option(
        0,
        "-amb",
        "--attention-max-batch",
        metavar="MIB",
        help="most memory for scores with -fa off, and for keys and values of latent attention"
        " (default: no bound, and 512)",
    )
    expert_reduction: str | None = option(
        None,
        "-ser",
        "--smart-expert-reduction",
        metavar="K,t",
        help="use the K best experts, and others only if they are more than t times as probable as"
        " the best (changes the model)",
    )
    merge_gate_up: bool = option(
        False,
        "-muge",
        "--merge-up-gate-experts",
        help="multiply by gate and up of experts as one matrix",
    )
    mla: int = option(
        3,
        "-mla",
        "--mla-use",
        metavar="N",
        help="latent attention (DeepSeek): 1: the absorbed form, for few tokens; 0: the naive form,"
        " for many; 2, 3: naive where a sequence has 128 new tokens or more",
    )
    sparse_attention: bool | str = option(
        True,
        "-dsa",
        "--dsa",
        kind=str,
        optional=True,
        metavar="on|off",
        constants=(Constant(("--no-dsa",), False, "the same as --dsa off"),),
        help="sparse attention (GLM-5): tokens see only the positions that the model's indexer"
        " chooses (default: on)",
    )

    def _switches(self) -> Switches:
        from .weights.switches import Switches, parse_on_off, parse_ser

        ser = parse_ser(self.expert_reduction) if self.expert_reduction else None
        flash = parse_on_off("-fa", self.flash_attn)
        return Switches(
            flash,
            self.attention_max_batch,
            ser,
            self.merge_gate_up,
            mla=self.mla,
            sparse_attention=parse_on_off("-dsa", self.sparse_attention),
            swa_full=self.swa_full,
        )

    def _cache(self) -> CacheSettings | None:
        """Return None where no option is about the cache."""
        from .state.cache import CacheSettings
        from .weights.switches import parse_on_off

        if self.cache_type_k is None and self.cache_type_v is None:
            return None
        settings = CacheSettings(
            self.cache_type_k or "f16",
            self.cache_type_v or "f16",
            self.k_cache_hadamard,
            self.v_cache_hadamard,
        )
        if settings.v.is_quantized and not parse_on_off("-fa", self.flash_attn):
            raise UsageError(
                f"values of a cache cannot be quantized ({self.cache_type_v}) without flash"
                " attention: flash_attn (-fa) is off"
            )
        return settings

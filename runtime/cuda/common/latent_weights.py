"""What the executors of latent attention share: the matrices W_k and W_v of all heads in half."""

from __future__ import annotations

import torch

from ....cuda_kernels.packed.decode import decode_matrix
from ...layers.latent import Joined, PerHead
from ...layers.mla import MLA
from .context import Context
from .held import held
from .registry import Slow

_LARGEST_F16 = 60000.0


class HeadMatrices:
    """W_k and W_v of all heads, from `attn_k_b` and `attn_v_b`, or from `attn_kv_b`. `Slow` if they
    are on another device or in a type without a decoder there.
    """

    def __init__(self, m: MLA, context: Context):
        self.spec, self.up = m.spec, m.up
        if isinstance(m.up, PerHead):
            self.packed = [held(m.up.k_b, context), held(m.up.v_b, context)]
        elif isinstance(m.up, Joined):
            linear = m.up.kv_b
            if linear.bias is not None:
                raise Slow(f"{linear.role} has a bias")
            self.packed = [held(linear, context)]
        else:
            raise Slow("other matrices of keys and values")

    def decoded(
        self, dtype: torch.dtype, context: Context | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_k transposed, [heads, rank, nope], and W_v, [heads, value, rank]: in buffers of
        `context`, or in new memory. They need not be contiguous.
        """
        s = self.spec
        found = []
        for name, packed in zip(("head keys", "head values"), self.packed, strict=False):
            shape = (packed.total_rows, packed.cols)
            out = None if context is None else context.buffer(name, shape, dtype)
            found.append(decode_matrix(packed, dtype, out=out).view(s.heads, -1, packed.cols))
        if len(found) == 2:
            return found[0], found[1]
        [joined] = found
        return joined[:, : s.nope_length].mT, joined[:, s.nope_length :]

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `decoded` returns, contiguous and in new memory: in bfloat16 if the file has
        that or numbers too large for float16, otherwise in float16, which is more precise.
        """
        types = [packed.type for packed in self.packed]
        is_wide = any(type.name == "BF16" for type in types) or (
            any(type.is_float for type in types)
            and any(x.abs().amax() > _LARGEST_F16 for x in self.decoded(torch.float32))
        )
        dtype = torch.bfloat16 if is_wide else torch.float16
        keys, values = self.decoded(dtype)
        return keys.contiguous(), values.contiguous()

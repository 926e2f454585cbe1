"""What one call of the backward pass asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from .arrays import ITEM_BYTES, Operand
from .problem import AttentionProblem, Dtype, Task
from .request import Request, tma_refusal, widest_access


@dataclass(frozen=True)
class BackwardRequest:
    """One checked call of the backward pass.

    Attributes
    ----------
    forward : Request
        The call whose gradients are wanted, without its output.
    dout, out, lse : Operand
    dlse : Operand or None
    grads : tuple of Operand
        Of q, k and v; empty: new contiguous arrays in the call's layout.
    deterministic : bool
    """

    forward: Request
    dout: Operand
    out: Operand
    lse: Operand
    dlse: Operand | None
    grads: tuple[Operand, ...]
    deterministic: bool

    @property
    def device(self) -> int:
        return self.forward.device

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """All arrays that are read."""
        forward = self.forward
        optional = () if self.dlse is None else (self.dlse,)
        return (forward.q, forward.k, forward.v, self.dout, self.out, self.lse, *optional)

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """As `Request.strides`, for q, k, v, dout, out, dq, dk and dv."""
        forward = self.forward
        named = {"q": forward.q, "k": forward.k, "v": forward.v, "dout": self.dout, "out": self.out}
        strides = {name: forward.element_strides(x, x.shape) for name, x in named.items()}
        for i, name in enumerate("qkv"):
            given = self.grads[i] if self.grads else None
            strides[f"d{name}"] = forward.element_strides(given, named[name].shape)
        return strides

    @cached_property
    def row_strides(self) -> dict[str, tuple[int, ...]]:
        """Strides in elements of lse and dlse along (batch, heads, seq); zeros for a dlse that is not there."""
        item = ITEM_BYTES[self.lse.dtype]
        return {
            name: (0, 0, 0) if x is None else tuple(stride // item for stride in x.strides)
            for name, x in (("lse", self.lse), ("dlse", self.dlse))
        }

    @cached_property
    def access_bytes(self) -> int:
        """As `Request.access_bytes`, for all arrays of the inputs' dtype."""
        addresses = 0
        for x in (self.forward.q, self.forward.k, self.forward.v, self.dout, self.out, *self.grads):
            addresses |= x.address
        return widest_access(self.forward, addresses, self.strides, tiled=("q", "k", "v", "dout"))

    @cached_property
    def tma_refusal(self) -> str | None:
        """As `Request.tma_refusal`, for what the main kernel reads and writes."""
        forward = self.forward
        _, dk, dv = self.grads or (None, None, None)
        moved = {"q": forward.q, "k": forward.k, "v": forward.v, "dout": self.dout, "dk": dk, "dv": dv}
        return tma_refusal(forward, moved, self.strides, self.extents)

    def extents(self, name: str) -> tuple[int, int, int, int]:
        """As `Request.extents`, of dout and the gradients as well."""
        return self.forward.extents("out" if name == "dout" else name.removeprefix("d"))

    def problem(self, arch: str, task: Task) -> AttentionProblem:
        """One of the kernels that the call needs on a compile target."""
        forward = self.forward
        return AttentionProblem(
            head_dim=forward.head_dim,
            head_dim_v=forward.head_dim if task == "backward_dq" else forward.head_dim_v,
            dtype=cast(Dtype, forward.q.dtype),
            mask="causal" if forward.causal and task == "backward" else "full",
            access_bytes=self.access_bytes,
            scale_first=False,
            arch=arch,
            task=task,
        )

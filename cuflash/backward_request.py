"""What one call of the backward pass asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from .arrays import ITEM_BYTES, Operand
from .problem import AttentionProblem, Dtype, Task
from .request import Request, contiguous_strides, tma_refusal, widest_access


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

    @classmethod
    def of_call(cls, forward: Request, deterministic: bool) -> BackwardRequest:
        """The gradients of a call of which nothing else is known.

        What is not an argument of the call, its output too unless it was given, is taken for contiguous and new: as
        autograd has it.
        """
        q = forward.q

        def new(name: str, shape: tuple[int, ...], dtype: str) -> Operand:
            strides = contiguous_strides(shape, ITEM_BYTES[dtype])
            return Operand(name, None, q.kind, 0, shape, strides, dtype, q.device)

        dout, out = (new(name, forward.out_shape, q.dtype) for name in ("dout", "out"))
        lse = new("lse", forward.lse_shape, forward.lse_dtype)
        return cls(replace(forward, out=None), dout, forward.out or out, lse, None, (), deterministic)

    @property
    def device(self) -> int:
        return self.forward.device

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """All arrays that are read."""
        return tuple(x for x in self.operands[:7] if x is not None)

    @property
    def addresses(self) -> list[int]:
        """Of q, k, v, dout, out, lse, dlse (0 where there is none), and the gradients if they are given."""
        return [0 if x is None else x.address for x in self.operands]

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """All arrays, each at its place: q, k, v, dout, out, lse, dlse, and the gradients if they are given."""
        forward = self.forward
        return (forward.q, forward.k, forward.v, self.dout, self.out, self.lse, self.dlse, *self.grads)

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

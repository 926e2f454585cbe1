"""What torch results are held against: dense attention by torch's own operations, differentiated in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["assert_gradient", "dense_attention", "dense_gradients"]

Tensor = Any

UNITS = {"float16": 1, "bfloat16": 1, "float32": 8, "float64": 100}
"""How far a gradient may be from float64's, in the Frobenius norm and as a multiple of its dtype's epsilon: in 16 bits
only the result is rounded; in float64 the reference errs as well."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, causal: Any = False, scale: float | None = None) -> Any:
    """(output, LSE) in bshd, for autograd to differentiate. Rows that see no key: 0 and -inf."""
    import torch

    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * q @ k.mT
    if causal:
        offset = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        scores = scores.masked_fill(columns > rows[:, None] + offset, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    dead = lse.detach() == float("-inf")
    weights = (scores - lse.masked_fill(dead, 0)[..., None]).exp()
    return (weights @ v).transpose(1, 2), lse


def dense_gradients(inputs: Sequence[Tensor], arriving: Sequence[Tensor | None], **options: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, given those that arrive at the output and the LSE; in float64."""
    import torch

    exact = [x.detach().double().requires_grad_() for x in inputs]
    pairs = zip(dense_attention(*exact, **options), arriving, strict=True)
    ends, grads = zip(*((end, grad.double()) for end, grad in pairs if grad is not None), strict=True)
    return torch.autograd.grad(ends, exact, grads, materialize_grads=True)  # type: ignore[no-any-return]


def assert_gradient(grad: Tensor, reference: Tensor) -> None:
    import torch

    error = (grad.double() - reference).norm()
    bound = UNITS[str(grad.dtype).rpartition(".")[2]] * torch.finfo(grad.dtype).eps * reference.norm()
    assert error <= bound, f"error {float(error):.2e}, at most {float(bound):.2e}"

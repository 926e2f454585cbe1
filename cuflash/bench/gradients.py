"""Who is timed in the backward pass: cuflash, its other kernel family, torch's autograd of SDPA, FlashAttention-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import backward_plan, driver, jit
from ..backward_kernels import problems_beside
from ..backward_request import BackwardRequest
from ..checks import make_request
from . import flash3
from .inputs import Case, poison
from .peers import LEGACY_STREAM, OURS, OURS_FIXED, OURS_SM80, Contestant, Refusal, refusal, to_cupy, torch_backends

NAMES = ("dq", "dk", "dv")


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass, and the gradient that arrives, on the device."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


def saved(case: Case, arrays: list[Any]) -> Saved:
    """Of a case's arrays q, k, v and dout."""
    import cuflash

    q, k, v, dout = arrays
    return Saved(dout, q, k, v, *cuflash.attention(q, k, v, causal=case.causal, return_lse=True))


def ours(case: Case, of: Saved, *, deterministic: bool = False) -> Contestant:
    """``cuflash.attention_backward``, which allocates its results, as torch does."""
    import cuflash

    def call(**options: Any) -> Any:
        return cuflash.attention_backward(*of, causal=case.causal, deterministic=deterministic, **options)

    return Contestant(OURS_FIXED if deterministic else OURS, call, lambda: written(of, lambda grads: call(grads=grads)))


def ours_sm80(case: Case, of: Saved, target: str) -> Contestant:
    """The Ampere-style kernels, planned once, for the target that names the device."""
    import cupy

    forward = make_request(of[1:4], None, causal=case.causal, scale=None, layout="bshd", return_lse=False)
    request = BackwardRequest.of_call(forward, deterministic=False)
    problems = problems_beside(case.problem(target), target)
    loaded = (jit.kernel_for(problem, request.device) for problem in problems)
    plan = backward_plan.plan_with(request, driver.multiprocessors(request.device), *loaded)
    assert plan.workspace is not None
    workspace = cupy.empty(plan.workspace.floats, dtype="float32")
    inputs = (*(array.data.ptr for array in (of.q, of.k, of.v, of.dout, of.out, of.lse)), 0)

    def launch(grads: tuple[Any, ...]) -> None:
        plan.launch([*inputs, *(grad.data.ptr for grad in grads)], workspace.data.ptr, LEGACY_STREAM)

    grads = tuple(cupy.empty_like(array) for array in of[1:4])
    return Contestant(OURS_SM80, lambda: launch(grads), lambda: written(of, launch))


def written(of: Saved, write: Callable[[tuple[Any, ...]], object]) -> dict[str, Any]:
    """Gradients that a call writes into poisoned arrays."""
    import cupy

    grads = tuple(cupy.empty_like(array) for array in of[1:4])
    for grad in grads:
        poison(grad)
    write(grads)
    return dict(zip(NAMES, grads, strict=True))


def peer(name: str, case: Case, of: Saved) -> Contestant | Refusal:
    """A peer's backward pass by its name; a refusal if it does not take the case."""
    return flash3_peer(case, of) if name == flash3.NAME else torch_peer(name, case, of)


def flash3_peer(case: Case, of: Saved) -> Contestant | Refusal:
    """FlashAttention-3 on the same memory, its scratch and results allocated once."""
    import cupy

    reason = flash3.reason_against(case)
    if reason:
        return Refusal(flash3.NAME, reason)
    made: list[Any] = []

    def attempt() -> None:
        into = flash3.backward(case, (*of[1:4], of.dout))
        made[:] = [into, into([cupy.empty_like(array) for array in of[1:4]])]
        made[1]()

    def results() -> dict[str, Any]:
        return written(of, lambda grads: made[0](grads)())

    return refusal(flash3.NAME, attempt) or Contestant(flash3.NAME, made[1], results)


def torch_peer(name: str, case: Case, of: Saved) -> Contestant | Refusal:
    """Autograd of an SDPA backend on the same memory, the graph kept; a refusal if it does not take the case."""
    import torch
    from torch.nn.attention import sdpa_kernel

    sdpa = torch.nn.functional.scaled_dot_product_attention
    backend = torch_backends()[name]
    leaves = [torch.from_dlpack(array).transpose(1, 2).requires_grad_() for array in of[1:4]]
    dout = torch.from_dlpack(of.dout).transpose(1, 2)
    graph: list[Any] = []

    def call() -> Any:
        return torch.autograd.grad(graph, leaves, [dout], retain_graph=True)

    def attempt() -> None:
        with sdpa_kernel(backend):
            graph[:] = [sdpa(*leaves, is_causal=case.causal, enable_gqa=case.heads_k != case.heads)]
        call()

    def results() -> dict[str, Any]:
        return dict(zip(NAMES, map(to_cupy, call()), strict=True))

    return refusal(name, attempt) or Contestant(name, call, results)

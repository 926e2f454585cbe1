"""Who is timed: cuflash, its other kernel family, the backends of torch's SDPA, and FlashAttention-3 where installed.

Those of the forward pass; `gradients` has those of the backward pass.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .. import forward_plan, kernels
from ..checks import make_request
from . import flash3
from .inputs import Case, poison
from .measure import Call

OURS = "cuflash"
OURS_SM80 = "cuflash sm80"
"""The Ampere-style kernels, on a device whose calls take others."""
OURS_FIXED = "cuflash deterministic"
"""Gradients that repeat bit for bit."""

TORCH_PEERS = ("flash", "cudnn", "efficient")
"""Backends of torch's scaled_dot_product_attention."""
LEGACY_STREAM = 0
"""Where CuPy and torch both start."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One implementation, ready to run on fixed inputs.

    Attributes
    ----------
    call : callable
        Queues the work on the current stream.
    results : callable
        Runs once and returns the results by name, as CuPy arrays of shape (batch, seq, heads, dim).
    """

    name: str
    call: Call
    results: Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A peer that does not take a case, and what it said."""

    name: str
    reason: str


def torch_available() -> bool:
    """Whether torch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def ours(case: Case, arrays: list[Any]) -> Contestant:
    """``cuflash.attention`` writing into the given output."""
    import cuflash

    q, k, v, out = arrays
    return writing_contestant(OURS, lambda: cuflash.attention(q, k, v, causal=case.causal, out=out), out)


def ours_sm80(case: Case, arrays: list[Any]) -> Contestant:
    """The Ampere-style kernel that serves the case under `cuflash.kernels.use_family`.

    Planned once: that forgets all plans, so inside of it every call would be a first one.
    """
    *inputs, out = arrays
    request = make_request(inputs, out, causal=case.causal, scale=None, layout="bshd", return_lse=False)
    with kernels.use_family("forward_sm80"):
        plan = forward_plan.make_plan(request)
    return writing_contestant(OURS_SM80, planned_call(plan, arrays), out)


def planned_call(plan: forward_plan.CallPlan, arrays: list[Any]) -> Call:
    """A launch of q, k, v and out on the legacy stream."""
    q, k, v, out = (array.data.ptr for array in arrays)
    return lambda: plan.launch(q, k, v, out, 0, LEGACY_STREAM)


def writing_contestant(name: str, call: Call, out: Any) -> Contestant:
    """A call that writes into ``out``, which others use as well."""

    def results() -> dict[str, Any]:
        poison(out)
        call()
        return {"out": out.copy()}

    return Contestant(name, call, results)


def known_peers() -> tuple[str, ...]:
    """Who can be timed beside cuflash here."""
    if not torch_available():
        return ()
    return (*TORCH_PEERS, flash3.NAME) if flash3.available() else TORCH_PEERS


def peer(name: str, case: Case, arrays: list[Any]) -> Contestant | Refusal:
    """A peer's forward pass by its name; a refusal if it does not take the case."""
    return flash3_peer(case, arrays) if name == flash3.NAME else torch_peer(name, case, arrays)


def flash3_peer(case: Case, arrays: list[Any]) -> Contestant | Refusal:
    """FlashAttention-3 on the same memory."""
    reason = flash3.reason_against(case)
    if reason:
        return Refusal(flash3.NAME, reason)
    call = flash3.forward(case, arrays)
    return refusal(flash3.NAME, call) or writing_contestant(flash3.NAME, call, arrays[-1])


def torch_backends() -> dict[str, Any]:
    """The backends of SDPA by the names used in the tables."""
    from torch.nn.attention import SDPBackend

    return {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }


def torch_peer(name: str, case: Case, arrays: list[Any]) -> Contestant | Refusal:
    """An SDPA backend on the same memory; a refusal if the backend does not take the case.

    Fewer heads of K and V go in as they are, with ``enable_gqa``.
    """
    import torch
    from torch.nn.attention import sdpa_kernel

    sdpa = torch.nn.functional.scaled_dot_product_attention
    backend = torch_backends()[name]
    q, k, v = (torch.from_dlpack(a).transpose(1, 2) for a in arrays[:3])

    def call() -> Any:
        with sdpa_kernel(backend), torch.no_grad():
            return sdpa(q, k, v, is_causal=case.causal, enable_gqa=case.heads_k != case.heads)

    def results() -> dict[str, Any]:
        return {"out": to_cupy(call())}

    return refusal(name, call) or Contestant(name, call, results)


def to_cupy(tensor: Any) -> Any:
    """A tensor in torch's own layout as a CuPy array of shape (batch, seq, heads, dim)."""
    import cupy

    return cupy.from_dlpack(tensor.transpose(1, 2))


def refusal(name: str, attempt: Call) -> Refusal | None:
    """What a peer says to an attempt; None if it takes the case."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns of the reasons, then raises without them
        warnings.simplefilter("always")
        try:
            attempt()
            torch.cuda.synchronize()
        except RuntimeError as error:
            reasons = [str(warning.message) for warning in caught] or [str(error)]
            return Refusal(name, " ".join(reason.strip().splitlines()[0] for reason in reasons))
    return None


def sort_out(everybody: Iterable[Contestant | Refusal]) -> tuple[list[Contestant], list[Refusal]]:
    """Who takes the case, and who does not."""
    listed = list(everybody)
    taking = [one for one in listed if isinstance(one, Contestant)]
    return taking, [one for one in listed if isinstance(one, Refusal)]

"""Backward calls of the GPU tests: drawn, run into poisoned memory, and judged against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash import kernels
from cuflash.backward_config import MainConfig
from cuflash.problem import AttentionProblem
from cuflash.reference import oracle
from tests.gpu.support import Array, host_normal, poison_pool, poisoned, swap_layout, target, to_device, to_host
from tests.gradients import Backward, assert_gradients

NAMES = ("dout", "q", "k", "v", "out", "lse")


class Call(NamedTuple):
    """A backward call on the device, in the layout bshd.

    ``arguments`` has dout, q, k, v, out and lse, perhaps dlse; ``options`` what else the call takes.
    """

    arguments: dict[str, Array]
    options: dict[str, Any]

    def run(self, **options: Any) -> tuple[Array, Array, Array]:
        return cuflash.attention_backward(**self.arguments, **self.options, **options)

    def on_host(self) -> Backward:
        """As the oracle takes it, (batch, heads, seq, dim)."""
        host = {name: to_host(x) for name, x in self.arguments.items()}
        swapped = (host[name].swapaxes(1, 2) for name in NAMES[:-1])
        causal = {True: "bottom_right"}.get(self.options["causal"], self.options["causal"])
        return Backward(*swapped, host["lse"], host.get("dlse"), causal, self.options["scale"])


def draw(
    lengths: tuple[int, int],
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: str = "bfloat16",
    *,
    batch: int = 1,
    causal: bool | str = False,
    scale: float | None = None,
    dlse: bool = False,
    seed: int = 0,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> Call:
    """A call on normal random numbers: lengths are (Nq, Nk), heads (Hq, Hk), dims (D, Dv).

    Output and LSE are exact ones, of the host, so that nothing but the backward pass is judged; ``change`` may alter q,
    k, v and dout before they are computed.
    """
    (nq, nk), (hq, hk), (d, dv) = lengths, heads, dims
    shapes = {"q": (nq, hq, d), "k": (nk, hk, d), "v": (nk, hk, dv), "dout": (nq, hq, dv)}
    host = {name: host_normal((batch, *shape), dtype, 4 * seed + i) for i, (name, shape) in enumerate(shapes.items())}
    if change is not None:
        change(host)
    return finish(host, causal=causal, scale=scale, dlse=dlse, seed=seed)


def finish(
    host: dict[str, np.ndarray], *, causal: bool | str, scale: float | None, dlse: bool = False, seed: int = 0
) -> Call:
    """A call for given q, k, v and dout."""
    q, k, v = (host[name].swapaxes(1, 2) for name in "qkv")
    corner = "bottom_right" if causal is True else causal
    with np.errstate(all="ignore"):
        out, lse = oracle(q, k, v, causal=corner, scale=scale)  # type: ignore[arg-type]
    host = host | {"out": np.ascontiguousarray(out.swapaxes(1, 2)).astype(q.dtype), "lse": lse.astype(np.float32)}
    if dlse:
        host["dlse"] = np.random.default_rng(seed + 77).standard_normal(lse.shape).astype(np.float32)
    return Call({name: to_device(x) for name, x in host.items()}, {"causal": causal, "scale": scale})


def check(call: Call, **options: Any) -> tuple[Array, Array, Array]:
    """Run into poisoned gradients and a poisoned pool, and judge."""
    grads = tuple(poisoned(call.arguments[name].shape, call.arguments[name].dtype) for name in "qkv")
    q = call.arguments["q"]
    poison_pool(8 * q.size + 64 * q.shape[1] * q.shape[0] * q.shape[2] + (1 << 16))
    result = call.run(grads=grads, **options)
    assert all(given is grad for given, grad in zip(result, grads, strict=True))
    judge_gradients(grads, call)
    return grads


def judge_gradients(grads: tuple[Array, ...], call: Call) -> None:
    host = tuple(np.ascontiguousarray(to_host(swap_layout(grad))) for grad in grads)
    with np.errstate(all="ignore"):
        assert_gradients(host, call.on_host())


def config_for(d: int, dv: int, dtype: str, causal: object) -> MainConfig:
    """The config that such a call on contiguous arrays takes on this device."""
    mask = "causal" if causal else "full"
    problem = AttentionProblem(d, dv, dtype, mask, 16, False, target(), "backward")  # type: ignore[arg-type]
    if problem.arch in kernels.TMA_TARGETS and d % 8 == dv % 8 == 0 and kernels.family_in_use() != "backward_sm80":
        problem = replace(problem, arch=kernels.TMA_TARGETS[problem.arch])
    config = kernels.select_config(problem)
    assert isinstance(config, MainConfig)
    return config

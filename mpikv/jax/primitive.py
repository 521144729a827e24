"""The exchange as a primitive of JAX, with a rule for each way in which JAX may meet it.

Outside of `jit` its arrays are exchanged at once, those on the store's GPU without a copy to the host, but for a
broadcast. In a compiled program it is a callback with JAX's effect for ordered
callbacks. The callback takes NumPy arrays as XLA has them: `jax.experimental.io_callback` would make JAX arrays of them
first, which waits for a thread of XLA's, and where a process has one core (mpirun binds ranks to cores) that is the
very thread that calls back.

The exchange is linear, so its derivative is an exchange of tangents, and the transpose of that one of cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpikv.errors import UnsupportedError
from mpikv.jax.calls import ALIGNED, Call, divisor_of
from mpikv.spaces.callers import gpu_of

exchange_p = Primitive("mpikv_exchange")
exchange_p.multiple_results = True
# What orders callbacks among each other; JAX names it nowhere in public.
(_ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


def exchange(leaves: Sequence[Any], call: Call) -> list[Any]:
    """Exchange the leaves, and return the results, one for each leaf."""
    results: list[Any] = exchange_p.bind(*leaves, call=call)
    return results


def _at_once(*leaves: Any, call: Call) -> list[Any]:
    jax.effects_barrier()  # programs that are still running make their calls first
    leaves = tuple(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves)
    for leaf, line in zip(leaves, call.lines[1:], strict=True):
        if not leaf.is_fully_addressable:
            raise UnsupportedError(f"{call.lines[0]}: {line} lies partly on devices of another process")
    store = call.calls.store
    on_gpu = store.device is not None and all(len(one.devices()) == 1 and gpu_of(one) == store.device for one in leaves)
    if leaves and call.op != "broadcast" and on_gpu:
        divisor = divisor_of(call.op, store)
        # Before adding, as on the host, and in the leaf's dtype.
        scaled = [leaf if divisor == 1 else leaf / jnp.asarray(divisor, leaf.dtype) for leaf in leaves]
        sums = call.calls.sums_on_gpu(call, scaled)
        if sums is not None:
            weak = [leaf.weak_type and not leaf.ndim for leaf in leaves]
            return [_like(np.asarray(one), leaf) if w else one for one, leaf, w in zip(sums, leaves, weak, strict=True)]
    results = call.calls.exchange(call, [np.asarray(leaf) for leaf in leaves])
    return [_like(result, leaf) for result, leaf in zip(results, leaves, strict=True)]


def _like(result: np.ndarray[Any, Any], leaf: Any) -> Any:
    """Make a JAX array that owns its memory, of the leaf's kind and where the leaf is."""
    if leaf.weak_type and not leaf.ndim:
        return jnp.asarray(result.item())
    raw = np.empty(result.nbytes + ALIGNED, np.uint8)
    begin = -raw.ctypes.data % ALIGNED
    own = raw[begin : begin + result.nbytes].view(result.dtype).reshape(result.shape)
    np.copyto(own, result)
    return jax.device_put(own, leaf.sharding if leaf.committed else None)  # takes the memory itself, on the CPU


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    where = ctx.module_context.axis_context
    if isinstance(where, mlir.SPMDAxisContext):
        raise UnsupportedError(
            f"{call.lines[0]} inside of pmap or shard_map: every device would call with its own part. Combine the "
            "devices there (lax.psum), and make this call on the result"
        )
    if (getattr(where, "num_devices", 1) or 1) > 1:
        raise UnsupportedError(
            f"{call.lines[0]} inside of a jit over {where.num_devices} devices: XLA ends the process when one of them "
            "is late. Make this call outside of jit, on what the jitted function returns"
        )

    def callback(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call.calls.exchange(call, [np.asarray(array) for array in arrays]))

    token = ctx.tokens_in.get(_ORDERED)
    results, token, _ = mlir.emit_python_callback(
        ctx, callback, token, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDERED: token})))
    return results


def _batch(_leaves: Any, _dims: Any, *, call: Call) -> Any:
    raise UnsupportedError(
        f"{call.lines[0]} inside of vmap: whether that is one exchange or one for each element is not said. Make this "
        "call outside of vmap, on all elements at once"
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    results = exchange(primals, call)
    known = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    changes = iter(exchange([tangents[i] for i in known], _part(call, "tangents of ", known)))
    return results, [next(changes) if i in known else tangent for i, tangent in enumerate(tangents)]


def _transpose(cotangents: Sequence[Any], *_leaves: Any, call: Call) -> list[Any]:
    known = [i for i, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    back = _part(call, "cotangents of ", known)
    is_broadcast = call.op == "broadcast"
    totals = exchange([cotangents[i] for i in known], replace(back, op="sum") if is_broadcast else back)
    if is_broadcast and call.calls.store.rank != call.root:
        totals = [jnp.zeros_like(total) for total in totals]
    found = dict(zip(known, totals, strict=True))
    return [found.get(i, cotangent) for i, cotangent in enumerate(cotangents)]


def _part(call: Call, prefix: str, known: Sequence[int]) -> Call:
    return replace(call, lines=(prefix + call.lines[0], *(call.lines[1 + i] for i in known)))


exchange_p.def_impl(_at_once)
exchange_p.def_effectful_abstract_eval(lambda *leaves, call: (list(leaves), {_ORDERED}))
mlir.register_lowering(exchange_p, _lower)
batching.primitive_batchers[exchange_p] = _batch
ad.primitive_jvps[exchange_p] = _jvp
ad.primitive_transposes[exchange_p] = _transpose

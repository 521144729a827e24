"""JAX: collective calls on pytrees, and gradients that optax averages over the workers.

    import mpikv.jax as mj
    params = mj.broadcast(params, store)                                    # all begin with worker 0's
    optimizer = optax.chain(mj.allreduce_gradients(store), optax.adam(1e-3))

The calls work outside of `jax.jit` and inside of it, also in `lax.scan` and `lax.cond`: a compiled program calls back
into Python, in the order of the program. Every worker makes the same calls with pytrees of the same structure, shapes
and dtypes; that is compared at every call, and a difference is a ShapeMismatch on every worker. The store is a
`dist_sync` or a `local` one without an optimizer, which would give weights and not sums; other keys in it are strings.

Refused, with an UnsupportedError while JAX traces: `vmap` (one exchange for all elements, or one for each?), `pmap`,
`shard_map` and `jit` over several devices, where each device has a part and XLA ends the process when one of its
threads is late. Outside of `jit`, arrays may lie on several devices of this process.

Outside of `jit`, sums and means of arrays on the GPU that the store uses (`store.device`) stay there; inside, and for a
broadcast, XLA brings the values to the host.

Derivatives: those of the sum over the workers of what each computes. So a cotangent is allreduced as the value was, and
that of a broadcast is summed at `root` and zero elsewhere; the workers must differentiate alike. To average gradients,
average what `jax.grad` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import jax
except ModuleNotFoundError as error:
    error.msg += "; mpikv.jax needs JAX: pip install jax"
    raise
import jax.numpy as jnp

from mpikv.arrays.as_numpy import dtype_named
from mpikv.calls.keyless import check_root
from mpikv.errors import UnsupportedError
from mpikv.jax.calls import Call, Calls
from mpikv.jax.primitive import exchange
from mpikv.kvstore import KVStore

__all__ = ["allreduce", "allreduce_gradients", "broadcast"]

OPS = ("mean", "sum")


class _GradientTransformation(NamedTuple):
    """optax's pair of functions; `optax.chain` and everything else in optax takes any object that has the two."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]


def allreduce(tree: Any, store: KVStore, op: str = "mean") -> Any:
    """Return the mean or the sum over the workers of each leaf, as new JAX arrays of the same shapes and dtypes.

    tree: a pytree of JAX or NumPy arrays or numbers, float16, bfloat16, float32 or float64; with op="sum" also int8,
    uint8, int32 and int64. float16 and bfloat16 are added in float32. Results have the same bits on every worker, and
    lie on the devices on which the leaves are. Collective; blocks (inside `jit` it is the compiled program that
    blocks). Raises ShapeMismatch where workers bring different trees, UnsupportedError for what cannot be exchanged.

    >>> mj.allreduce({'w': jnp.ones(2)}, kv.create('local'), op='sum')
    {'w': Array([1., 1.], dtype=float32)}
    """
    _check("allreduce", store, op)
    return _exchange(tree, store, f"allreduce({op})", op, 0)


def broadcast(tree: Any, store: KVStore, root: int = 0) -> Any:
    """Return worker `root`'s value of each leaf, as new JAX arrays. Collective; blocks as `allreduce` does.

    tree: a pytree of arrays or numbers of any dtype; on other workers only structure, shapes and dtypes count. Raises
    ShapeMismatch where these differ.

    >>> mj.broadcast({'w': jnp.ones(2)}, kv.create('local'))
    {'w': Array([1., 1.], dtype=float32)}
    """
    _check("broadcast", store)
    check_root(root, store.num_workers)
    return _exchange(tree, store, f"broadcast(root {root})", "broadcast", int(root))


def allreduce_gradients(store: KVStore, op: str = "mean") -> _GradientTransformation:
    """Make a link for `optax.chain`: its `update` replaces gradients by their mean (or sum) over the workers.

    It stands before whatever uses gradients, also before clipping by the global norm. Keeps no state. Its `update` is
    collective and raises what `allreduce` raises. optax itself is not needed.

    >>> link = mj.allreduce_gradients(kv.create('local'))
    >>> gradients, state = link.update({'w': jnp.ones(2)}, link.init(None))
    >>> gradients
    {'w': Array([1., 1.], dtype=float32)}
    """
    _check("allreduce_gradients", store, op)

    def update(updates: Any, state: Any, _params: Any = None) -> tuple[Any, Any]:
        return allreduce(updates, store, op), state

    return _GradientTransformation(lambda _params: (), update)


def _check(call: str, store: Any, op: str = "sum") -> None:
    if not isinstance(store, KVStore):
        raise TypeError(f"{call}: store is a KVStore, such as kv.create('dist_sync') gives, not {type(store).__name__}")
    if op not in OPS:
        raise ValueError(f"{call}: op is one of {', '.join(OPS)}; got {op!r}")


def _calls_of(store: KVStore) -> Calls:
    """Return the calls of a store, which keeps them, so that they end with it."""
    kept: dict[str, Any] = vars(store)
    if "_jax_calls" not in kept:
        kept["_jax_calls"] = Calls(store)
        store.session.before_close.append(jax.effects_barrier)  # a compiled program may still be running
    found: Calls = kept["_jax_calls"]
    return found


def _exchange(tree: Any, store: KVStore, title: str, op: str, root: int) -> Any:
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, lines = [], [title]
    for path, leaf in found:
        name = jax.tree_util.keystr(path) or "the array"
        array = _array(leaf, f"{title}: {name}")
        if op == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
            raise UnsupportedError(f"{title}: {name} is {array.dtype}, whose mean is no whole number; use op='sum'")
        leaves.append(array)
        lines.append(f"{title} of {name}: {array.dtype}{list(array.shape)}")
    call = Call(_calls_of(store), op, root, tuple(lines))
    for leaf in leaves if op != "broadcast" else ():
        dtype_named(leaf.dtype)  # an UnsupportedError for one that no store adds
    return jax.tree_util.tree_unflatten(structure, exchange(leaves, call))


def _array(leaf: Any, what: str) -> Any:
    """Return a leaf as JAX sees it: an array of its own or one under tracing; numbers keep their weak type."""
    try:
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} is no array and no number but {type(leaf).__name__}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise UnsupportedError(f"{what} is {array.dtype}: exchange its numbers, as jax.random.key_data gives them")
    return array

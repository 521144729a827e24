"""The kernels' text does what the programs do: compiled for this processor and run, and compiled by NVRTC for a GPU.

The first needs a C++ compiler, the second the library of NVRTC (the package nvidia-cuda-nvrtc-cu12 has it); neither
needs a GPU.
"""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from on_device_cases import runs as codec_runs
from program_cases import DTYPES, Run, hard_values, same_bits, update_program, update_runs
from programs import need

from mpikv.errors import UnsupportedError
from mpikv.reductions import REDUCTIONS
from mpikv.spaces import arithmetic, source
from mpikv.spaces.program import OPERATIONS, Program
from mpikv.spaces.routine import Routine, put
from mpikv.spaces.selection import LARGEST, largest_positions
from mpikv.spaces.tracing import trace, trace_stages, where_positive

FLOAT16, FLOAT32, FLOAT64, INT64 = (np.dtype(one) for one in (np.float16, np.float32, np.float64, np.int64))
BFLOAT16 = DTYPES[1]
N = 251  # no multiple of any number of elements that a thread takes
THREADS = 3

# What CUDA has and C++ has not: one block at a time, whose threads run one after another; those of a routine are
# threads of the system, which wait for each other.
SHIM = """
#include <pthread.h>
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct Index { unsigned int x, y, z; };
#define __shared__ static
static pthread_barrier_t barrier;
static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
static inline unsigned int atomicAdd(unsigned int* to, unsigned int n) { return __sync_fetch_and_add(to, n); }
static thread_local Index threadIdx;
static unsigned int next_thread;
static Index blockIdx, blockDim = {THREADS, 1, 1}, gridDim = {1, 1, 1};
static inline unsigned int __float_as_uint(float f) { unsigned int u; memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned int u) { float f; memcpy(&f, &u, 4); return f; }
""".replace("THREADS", str(THREADS))

RUN = """
extern "C" void run_NAME(const NAME_table* table, unsigned int entries) {
    for (blockIdx.y = 0; blockIdx.y < entries; ++blockIdx.y)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
            NAME(*table);
}
"""
RUN_TOGETHER = """
static void* thread_NAME(void* argument) {
    const NAME_table* const table = static_cast<const NAME_table*>(argument);
    threadIdx.x = __sync_fetch_and_add(&next_thread, 1u);
    NAME(*table);
    return 0;
}
extern "C" void run_NAME(const NAME_table* table, unsigned int entries) {
    for (blockIdx.y = 0; blockIdx.y < entries; ++blockIdx.y) {
        pthread_t threads[THREADS];
        next_thread = 0;
        pthread_barrier_init(&barrier, 0, THREADS);
        for (int i = 0; i < THREADS; ++i) pthread_create(&threads[i], 0, thread_NAME, (void*)table);
        for (int i = 0; i < THREADS; ++i) pthread_join(threads[i], 0);
        pthread_barrier_destroy(&barrier);
    }
}
""".replace("THREADS", str(THREADS))
ROOM = 3


def run_of(made: Program, dtypes: Sequence[np.dtype[Any]], numbers: Sequence[Any] = (), *, seed: int = 0) -> Run:
    """A run by NumPy, from hard values."""
    arrays = [hard_values(N, dtype, seed + i) for i, dtype in enumerate(dtypes)]
    before = [array.copy() for array in arrays]
    made.run(arrays, numbers)
    return Run(made, tuple(numbers), before, arrays)


def operations() -> Iterator[Run]:
    """Each operation in each dtype."""
    for dtype in DTYPES:
        for name, ufunc in OPERATIONS.items():

            def function(first: Any, second: Any, out: Any, ufunc: Any = ufunc) -> None:
                inputs = (first, second)[: ufunc.nin]
                out[...] = ufunc(*inputs)

            result = ufunc(*[np.ones(1, dtype)] * ufunc.nin).dtype
            made, _ = trace(function, [dtype, dtype, result])
            assert made.operations[-1].name == name
            yield run_of(made, [dtype, dtype, result])


def casts() -> Iterator[Run]:
    """Each dtype from each, of numbers that the other can hold."""
    for dtype in DTYPES:
        for to in DTYPES:
            made = arithmetic.copy_program(dtype, to)
            run = run_of(made, [dtype, to])
            if to.kind in "iu" and dtype.kind not in "iu":
                inside = np.isfinite(run.before[0]) & (run.before[0] >= 0) & (run.before[0] < 127)
                run.before[0][~inside] = 0
                run.after[0][~inside] = run.after[1][~inside] = 0
            yield run


def rounds() -> Iterator[Run]:
    """What an update writes into a weight of whole numbers: of values within, at the ends of and beyond the range."""
    for dtype in DTYPES:
        if dtype.kind not in "iu":
            continue
        work = FLOAT32 if dtype.itemsize == 1 else FLOAT64
        made, _ = update_program(
            lambda w, g, arrays, tmp: np.copyto(w, g), dtype, [work], {}, master=False, dtype=work, temporaries=0
        )
        run = run_of(made, [dtype, work])
        limits = np.iinfo(dtype)
        ends = np.array([limits.min, limits.max, 0.5, 1.5, 2.5, -0.5, 2.0**63, -(2.0**63), 2.0**62 + 512], work)
        near = np.concatenate([ends, ends + work.type(0.5), ends - work.type(0.5), np.nextafter(ends, work.type(0))])
        run.before[1][: near.size] = near
        arrays = [array.copy() for array in run.before]
        made.run(arrays, ())
        yield run._replace(after=arrays)


def own_arithmetic() -> Iterator[Run]:
    """The store's."""
    for dtype in DTYPES:
        yield run_of(arithmetic.fill(dtype), [dtype], [7])
        for op in REDUCTIONS.values():
            yield run_of(arithmetic.combine(op.combine, dtype), [dtype] * 3)
            if dtype.kind in "iu":
                continue
            for to in {dtype, FLOAT32}:
                made = arithmetic.sum_in_order(3, dtype, to, scaled=(1,), how=op.combine, mean=op.is_mean)
                yield run_of(made, [dtype] * 3 + [to], [0.3, 3] if op.is_mean else [0.3])
        if dtype.kind not in "iu":
            yield run_of(arithmetic.scale(dtype), [dtype] * 2, [1 / 3])
            yield run_of(arithmetic.divide(dtype), [dtype] * 2, [3])


def sums() -> Iterator[Run]:
    """Those of squares, and what follows a norm: single arguments, and choices between two."""
    for dtype in (FLOAT32, FLOAT64):
        for n in (1, 3, 16):
            yield run_of(arithmetic.squares_in_order(n, dtype), [dtype] * n + [FLOAT64])

        def function(w: Any, tmp: Any) -> None:
            found = np.sqrt(w.sum_of_squares())
            np.multiply(w, where_positive(found, found / 3.0, 1.0).astype(w.dtype), out=w)

        last = trace_stages(function, [dtype], [dtype])[-1]
        for total in (0.0, 2.5, np.inf, np.nan):
            before = [hard_values(N, dtype, 0), hard_values(N, dtype, 1), np.array([total])]
            arrays = [array.copy() for array in before]
            last.program.run(arrays, last.numbers)
            yield Run(last.program, last.numbers, before, arrays)


KINDS: dict[str, Callable[[], Iterator[Run]]] = {
    "operations": operations,
    "casts": casts,
    "rounds": rounds,
    "own arithmetic": own_arithmetic,
    "sums": sums,
    "codecs": lambda: iter(codec_runs(N)),
}


def all_runs() -> dict[str, list[Run]]:
    """Runs by what they are of; programs come several times."""
    found = {f"updates of {dtype}": update_runs(dtype) for dtype in DTYPES}
    return found | {name: list(make()) for name, make in KINDS.items()}


ALL = [*(f"updates of {dtype}" for dtype in DTYPES), *KINDS]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Run]]:
    with np.errstate(all="ignore"):
        return all_runs()


Call = Callable[..., None]
ITEMSIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def call(runs: dict[str, list[Run]], tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Runs a kernel on this processor, with a table: that of a program of `runs`, or of strided copies."""
    compiler = os.environ.get("CXX") or need("g++", "clang++")
    folder = tmp_path_factory.mktemp("kernels")
    names: dict[Program, str] = {}
    for several in runs.values():
        for run in several:
            names.setdefault(run.program, f"kernel_{len(names)}")
    parts = [SHIM, source.PREAMBLE]
    for itemsize in ITEMSIZES:
        name = f"strided_{itemsize}"
        parts.append(source.strided_source(itemsize, name) + RUN.replace("NAME", name))
    for one, name in names.items():
        run_it = RUN_TOGETHER if isinstance(one, Routine) else RUN
        parts += [source.kernel(one, ROOM, name), run_it.replace("NAME", name)]
    (folder / "kernels.cpp").write_text("\n".join(parts))
    library = folder / f"kernels{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    flags = ["-std=c++11", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, "-o", library, folder / "kernels.cpp", "-lm"], check=True, timeout=200)
    loaded = ctypes.CDLL(str(library))

    def run(made: Program | int, table: np.ndarray, rows: int = 1) -> None:
        name = f"strided_{made}" if isinstance(made, int) else names[made]
        loaded[f"run_{name}"](ctypes.c_void_p(table.ctypes.data), ctypes.c_uint(rows))

    return run


def placed(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins so many elements behind an address that every group of elements may begin at."""
    memory = np.zeros(array.nbytes + offset * array.itemsize + 64, np.uint8)
    begin = -memory.ctypes.data % 64 + offset * array.itemsize
    made = memory[begin : begin + array.nbytes].view(array.dtype)
    made[...] = array
    return made


def addresses(arrays: Sequence[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def one_entry(made: Program, n: int, arrays: Sequence[np.ndarray], numbers: Sequence[Any] = ()) -> np.ndarray:
    return source.table(made, [(n, addresses(arrays), numbers)], ROOM)


@pytest.mark.parametrize("kind", ALL)
def test_a_kernel_has_the_bits_of_the_program(kind: str, runs: dict[str, list[Run]], call: Call) -> None:
    assert runs[kind]
    for run in runs[kind]:
        for offset in (0, 1):
            arrays = [placed(array, offset) for array in run.before]
            call(run.program, one_entry(run.program, arrays[0].size, arrays, run.numbers))
            assert all(map(same_bits, arrays, run.after)), source.kernel(run.program)


@pytest.mark.parametrize("k", [1, 2, 5, 100, 699, 700])
@pytest.mark.parametrize("kind", ["hard", "equal", "few", "ordinary"])
def test_the_largest_by_a_block_of_threads(kind: str, k: int, runs: dict[str, list[Run]], call: Call) -> None:
    """Of equal ones the first, NaN before infinity, several arrays at once; compared with a sort."""
    n, generator = 700, np.random.default_rng(k)
    values = {
        "hard": hard_values(n, FLOAT32, k),
        "equal": np.full(n, -2.5, np.float32),
        "few": generator.integers(-2, 3, n).astype(np.float32),
        "ordinary": generator.standard_normal(n).astype(np.float32),
    }[kind]
    order = np.argsort(-(values.view(np.int32) & 0x7FFFFFFF).astype(np.int64), kind="stable")
    expected = np.sort(order[:k])
    assert largest_positions(values, k, np.arange(n)).tolist() == expected.tolist()
    found = [(np.full(k + 1, 77, np.int32), np.full(k + 1, 77, np.float32)) for _ in range(2)]
    call(LARGEST, source.table(LARGEST, [(n, addresses([values, *one]), [k]) for one in found], ROOM), 2)
    for positions, sent in found:
        assert positions.tolist() == [*expected, 77]
        assert same_bits(sent[:k], values[expected])
        assert sent[k] == 77


def test_positions_beyond_the_array_are_left_out(runs: dict[str, list[Run]], call: Call) -> None:
    """Of damaged data: nothing is written elsewhere."""
    made = put(FLOAT32, FLOAT32)
    positions, values = np.array([1, -1, 3, 1 << 30], np.int32), np.arange(1, 5, dtype=np.float32)
    for run_it in (
        lambda out: made.run([out[:3], positions, values], [4]),
        lambda out: call(made, source.table(made, [(3, addresses([out, positions, values]), [4])], ROOM)),
    ):
        out = np.zeros(5, np.float32)
        run_it(out)
        assert out.tolist() == [0, 1, 0, 0, 0]


def test_a_table_of_keys(runs: dict[str, list[Run]], call: Call) -> None:
    """Different lengths, also none, addresses and numbers; nothing is written elsewhere."""
    run = runs["updates of float16"][0]
    lengths = (N, 0, 5)
    entries, all_arrays = [], []
    for i, n in enumerate(lengths):
        arrays = [placed(array, i) for array in run.before]
        expected = [array.copy() for array in arrays]
        numbers = [number * (i + 1) for number in run.numbers]
        run.program.run([array[:n] for array in expected], numbers)
        entries.append((n, addresses(arrays), numbers))
        all_arrays.append((arrays, expected))
    call(run.program, source.table(run.program, entries, ROOM), len(entries))
    for arrays, expected in all_arrays:
        assert all(map(same_bits, arrays, expected))
    assert not same_bits(all_arrays[0][0][0], run.before[0])


def test_an_array_that_is_there_twice(runs: dict[str, list[Run]], call: Call) -> None:
    made = arithmetic.combine(np.add, FLOAT32)
    first, second = (hard_values(N, FLOAT32, i) for i in range(2))
    with np.errstate(all="ignore"):
        expected = first + second
    call(made, one_entry(made, N, [first, second, first]))
    assert same_bits(first, expected)


@pytest.mark.parametrize("to", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64, INT64], ids=str)
def test_narrow_floats_are_rounded_as_numpy_does_it(
    dtype: np.dtype[Any], to: np.dtype[Any], runs: dict[str, list[Run]], call: Call
) -> None:
    """All numbers of the narrow dtype, those halfway between two, and their neighbours."""
    every = np.arange(1 << 16, dtype=np.uint16).view(to)
    with np.errstate(invalid="ignore"):
        every = every[np.isfinite(every)].astype(np.float64)
    ordered = np.unique(every)
    halves = (ordered[1:] + ordered[:-1]) / 2
    values = np.concatenate([every, halves, np.nextafter(halves, 0), np.nextafter(halves, np.inf), [np.inf, np.nan]])
    with np.errstate(all="ignore"):
        narrow = values.astype(dtype) if dtype != INT64 else values[np.abs(values) < 1e18].astype(dtype)
        near = [narrow, np.nextafter(narrow, dtype.type(0))] if dtype in (FLOAT32, FLOAT64) else [narrow]
        narrow = np.concatenate([*near, *(-one for one in near)])
        expected = narrow.astype(to)
    found = np.zeros_like(expected)
    made = arithmetic.copy_program(dtype, to)
    call(made, one_entry(made, narrow.size, [narrow, found]))
    assert same_bits(found, expected)


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda array: array,
    "transposed": lambda array: array.T,
    "every second": lambda array: array[::2, 1:, ::3],
    "backwards": lambda array: array[::-1, :, ::-2],
    "one row": lambda array: array[1],
    "one element": lambda array: array[1, 2, 3, ...],
    "longer by ones": lambda array: array[:, None, :, None, None, 2:],
    "the same row again": lambda array: np.broadcast_to(array[0], array.shape),
}


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_strided_copies(view: str, itemsize: int, call: Call) -> None:
    whole = np.arange(6 * 5 * 7).reshape(6, 5, 7).astype(f"u{itemsize}")
    seen = VIEWS[view](whole)
    packed = np.zeros(seen.shape, whole.dtype)
    to, from_ = ((array.ctypes.data, array.strides) for array in (packed, seen))
    call(itemsize, source.strided_table(to, from_, seen.shape))
    assert np.array_equal(packed, seen)
    if view != "the same row again":
        expected = whole.copy()
        VIEWS[view](expected)[...] = 77
        packed[...] = 77
        call(itemsize, source.strided_table(from_, to, seen.shape))
        assert np.array_equal(whole, expected)


def test_dimensions_without_gaps_are_one() -> None:
    shape = (2,) * 20
    strides = [8 << i for i in reversed(range(20))]
    table = source.strided_table((0, strides), (0, strides), shape)
    assert (table["dims"][0], table["lengths"][0, 0], table["n"][0]) == (1, 1 << 20, 1 << 20)
    table = source.strided_table((0, strides), (0, [*strides[:10], *(2 * one for one in strides[10:])]), shape)
    assert (table["dims"][0], table["lengths"][0, :2].tolist()) == (2, [1 << 10, 1 << 10])
    with pytest.raises(UnsupportedError, match=r"20 dimensions with gaps.*contiguous copy"):
        source.strided_table((0, strides), (0, strides[::-1]), shape)


# --- what a kernel is given


def test_a_table_is_one_value_within_the_limit_of_all_gpus(runs: dict[str, list[Run]]) -> None:
    for one in {run.program for several in runs.values() for run in several}:
        room = source.most_entries(one)
        assert room > 15
        made = source.table(one, [], room)
        assert made.size == 1
        assert made.nbytes <= 4096


def test_an_entry_is_laid_out_as_in_c() -> None:
    made, _ = trace(lambda a, b: np.copyto(b, (a + np.float16(1)).astype(np.float64) * 2.0), [FLOAT16, FLOAT64])
    table = source.table(made, [(5, [1, 2], [1.0, 2.0])], 2)
    assert table.tobytes() == np.array([1, 2, 5], np.int64).tobytes() + np.float16(1).tobytes() + bytes(6) + np.float64(
        2
    ).tobytes() + bytes(40)


def test_bfloat16_numbers_go_as_their_bits() -> None:
    table = source.table(arithmetic.fill(BFLOAT16), [(5, [1], [1.5])], 1)
    assert table.tobytes()[16:18] == BFLOAT16.type(1.5).tobytes()


@pytest.mark.parametrize(
    ("dtypes", "elements"),
    [((np.int8, np.int8), 16), ((np.float16, np.float16), 8), ((np.float16, np.float32), 4), ((np.int8, np.int64), 2)],
)
def test_a_thread_takes_sixteen_bytes_of_the_widest_array(dtypes: Any, elements: int) -> None:
    made = arithmetic.copy_program(*(np.dtype(one) for one in dtypes))
    assert source.elements_per_thread(made) == elements
    assert f", {elements}> p0;" in source.source(made)


def test_arguments_that_are_only_read_are_not_written() -> None:
    text = source.kernel(arithmetic.copy_program(FLOAT32, FLOAT16))
    assert "const float* a0; unsigned short* a1;" in text
    assert "(a1)[i] = p1;" in text
    assert "(a0)[i] = p0;" not in text
    assert "p1 = " not in text.replace("(a1)[i] = p1", "")


# --- NVRTC


def nvrtc() -> Any:
    """The library, from its package or the system; skips the test where there is none."""
    found = sorted(glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/**/libnvrtc.so*", recursive=True))
    for name in [*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return pytest.skip(
        "NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12), so that nothing is compiled for GPUs"
    )


def compiled(text: str, options: Sequence[str]) -> str:
    """The PTX of a text. AssertionError with NVRTC's own words where it refuses it."""
    library, handle, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(handle), text.encode(), b"x.cu", 0, None, None) == 0
    array = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
    status = library.nvrtcCompileProgram(handle, len(options), array)
    library.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(handle, log)
    assert status == 0, log.value.decode()
    library.nvrtcGetPTXSize(handle, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(handle, ptx)
    library.nvrtcDestroyProgram(ctypes.byref(handle))
    return ptx.value.decode()


def test_nvrtc_compiles_strided_copies() -> None:
    text = "\n".join(source.strided_source(itemsize, f"strided_{itemsize}") for itemsize in ITEMSIZES)
    ptx = compiled(text, [*source.OPTIONS, "--gpu-architecture=compute_75"])
    assert all(f".entry strided_{itemsize}(" in ptx for itemsize in ITEMSIZES)
    assert ".local" not in ptx


# The updates of one dtype of each kind: those of the others consist of the same parts.
@pytest.mark.parametrize("kind", [*(f"updates of {name}" for name in ("float16", "float64", "int64")), *KINDS])
def test_nvrtc_compiles_a_kernel(kind: str, runs: dict[str, list[Run]]) -> None:
    """Without contracting, flushing denormals, approximations, or a copy of the table in slow memory."""
    programs = list(dict.fromkeys(run.program for run in runs[kind]))
    kernels = [source.kernel(one, source.most_entries(one), f"kernel_{i}") for i, one in enumerate(programs)]
    ptx = compiled("\n".join([source.PREAMBLE, *kernels]), [*source.OPTIONS, "--gpu-architecture=compute_75"])
    assert all(f".entry kernel_{i}(" in ptx for i in range(len(programs)))
    for word in ("fma.", ".ftz", ".approx", "div.full", ".local"):
        assert word not in ptx
    assert "ld.global.v" in ptx
    assert "st.global.v" in ptx


def test_there_is_a_text_for_every_operation() -> None:
    assert set(OPERATIONS) == {*source._OPERATORS, *source._FUNCTIONS, "negative"}


def test_no_file_is_needed() -> None:
    """NVRTC has no folder of CUDA's headers where only its package is installed."""
    assert "#include" not in source.PREAMBLE

"""A program as a kernel in CUDA C++, and what the kernel is given.

The kernel takes a table of entries, which is passed by value: the addresses of the arrays, how many elements they have,
and the numbers. So one launch does the same to one large key or to many small ones, whose blocks have different
`blockIdx.y`, and needs no memory for that. Kernels differ in how many entries their table has room for.

Each thread takes elements that are together 16 bytes of the widest array at a time, or those of one item where several
make one, if all arrays begin where such a group may; else, and at the end, one by one or item by item. Reads come
before writes, so an array may be there twice.

What it calculates has the bits of `Program.run`, which are NumPy's, if it is compiled with `OPTIONS`. Exceptions: a NaN
stays a NaN, but its sign and payload are the processor's. Which of two zeros is the smaller one follows NumPy on
x86-64: the first for float16, the second for all others; and the sign of -0.0 is 0.0, but for bfloat16. What is
undefined in NumPy, too, is a cast (CAST, not ROUND) of a float that is beyond the range of whole numbers: GPUs take its
end.

float16 and bfloat16 are calculated in float32 and rounded after each operation, as NumPy and ml_dtypes do it; whole
numbers wrap around. float64 becomes bfloat16 by way of float32, as in ml_dtypes, and float16 directly, as in NumPy.

Cost: one pass over memory. The conversions of float16 are instructions of the GPU; those of bfloat16 are five simple
ones, since GPUs before compute capability 8.0 have none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import BFLOAT16, HostArray
from mpikv.errors import UnsupportedError
from mpikv.spaces.arithmetic import KEPT
from mpikv.spaces.program import CAST, ROUND, SELECT, Argument, Entry, Operation, Program
from mpikv.spaces.routine import Routine

NAME = "mpikv_program"
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
"""Of NVRTC: nothing contracted, everything rounded correctly, denormals kept."""

THREADS = 256
"""Of a block."""

PACK_BYTES = 16  # the widest load of one thread
TABLE_BYTES = 4096  # what all GPUs take as arguments of a kernel (CUDA C++ Programming Guide, function parameters)

_HALF, _FLOAT, _DOUBLE = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)


class _Type(NamedTuple):
    stored: str  # in memory
    value: str  # in a register
    wrapping: str = ""  # of whole numbers: what they are calculated in, so that they wrap around


_TYPES: dict[np.dtype[Any], _Type] = {
    _HALF: _Type("unsigned short", "float"),
    BFLOAT16: _Type("unsigned short", "float"),
    _FLOAT: _Type("float", "float"),
    _DOUBLE: _Type("double", "double"),
    np.dtype(np.int8): _Type("signed char", "signed char", "unsigned int"),
    np.dtype(np.uint8): _Type("unsigned char", "unsigned char", "unsigned int"),
    np.dtype(np.int32): _Type("int", "int", "unsigned int"),
    np.dtype(np.int64): _Type("long long", "long long", "unsigned long long"),
}
_LOADS = {_HALF: "half_to_float", BFLOAT16: "bfloat16_to_float"}
_STORES = {_HALF: "float_to_half", BFLOAT16: "float_to_bfloat16"}
_ROUNDS = {_HALF: "round_half", BFLOAT16: "round_bfloat16"}

PREAMBLE = """\
#define INLINE static __device__ __forceinline__

template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T of[N]; };

INLINE float half_to_float(unsigned short half) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    const unsigned int sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return __uint_as_float(sign | magnitude << 13) * 5.192296858534828e33f;  // 2^112: the difference of the exponents
#endif
}

INLINE unsigned short float_to_half(float value) {
#ifdef __CUDA_ARCH__
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    const unsigned int bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // 65520 and more
    if (magnitude >= 0x38800000u)  // 2^-14, the least that is no denormal
        return (unsigned short)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
    // The last digit of a float from 0.5 to 1 stands for 2^-24, as that of a denormal half.
    return (unsigned short)(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u));
#endif
}

INLINE unsigned short double_to_half(double value) {
#ifdef __CUDA_ARCH__
    unsigned short half;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(half) : "d"(value));
    return half;
#else
    // To a float whose last digit is odd where digits are lost, so that it lies on the same side of every half.
    const float near = (float)value;
    unsigned int bits = __float_as_uint(near);
    if (value == value && (double)near != value) {
        if (fabs((double)near) > fabs(value)) bits -= 1;
        bits |= 1u;
    }
    return float_to_half(__uint_as_float(bits));
#endif
}

INLINE float bfloat16_to_float(unsigned short value) { return __uint_as_float((unsigned int)value << 16); }

INLINE unsigned short float_to_bfloat16(float value) {
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return (unsigned short)((bits >> 16 & 0x8000u) | 0x7fc0u);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

INLINE float round_half(float value) { return half_to_float(float_to_half(value)); }
INLINE float round_bfloat16(float value) { return bfloat16_to_float(float_to_bfloat16(value)); }

INLINE float root(float value) { return sqrtf(value); }
INLINE double root(double value) { return sqrt(value); }
INLINE float whole(float value) { return rintf(value); }
INLINE double whole(double value) { return rint(value); }

template <typename T> INLINE T sign(T value) {
    return value > 0 ? T(1) : value < 0 ? T(-1) : value == 0 ? T(0) : value;
}
INLINE float sign_bfloat16(float value) { return value == 0 ? value : sign(value); }  // ml_dtypes keeps a zero's sign

template <typename T> INLINE T magnitude(T value) { return value < 0 ? -value : value == 0 ? T(0) : value; }

// The first where it is NaN, the second where that is.
template <typename T> INLINE T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <typename T> INLINE T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <typename T> INLINE T minimum_half(T a, T b) { return a <= b || a != a ? a : b; }
template <typename T> INLINE T maximum_half(T a, T b) { return a >= b || a != a ? a : b; }

template <typename T, typename V> INLINE T limited(V value, V low, V high) {
    const V near = whole(value);
    return value != value ? T(0) : near < low ? (T)low : near > high ? (T)high : (T)near;
}
"""


def source(program: Program | Routine, entries: int = 1, name: str = NAME) -> str:
    """The text of a kernel `name` for a table of so many entries, `most_entries` at most."""
    return f"{PREAMBLE}\n{kernel(program, entries, name)}"


def kernel(program: Program | Routine, entries: int = 1, name: str = NAME) -> str:
    """`source` without what is the same for all programs."""
    if isinstance(program, Routine):
        body = program.text.replace("THREADS", str(THREADS)).rstrip("\n").split("\n")
        return "\n".join([*_table_struct(program, entries, name), *_begin(program, name), *body, "}", ""])
    return _of_elements(program, entries, name)


def _of_elements(program: Program, entries: int, name: str) -> str:
    """The kernel of a program."""
    arguments = program.arguments
    used = _used(program)
    n_numbers = len(program.numbers)
    pack = elements_per_thread(program)
    stored = [_TYPES[one.dtype].stored for one in arguments]
    numbers = [f"{_TYPES[dtype].stored} n{i}" for i, dtype in enumerate(program.numbers)]

    parameters = [f"{stored[i]}{'&' if arguments[i].last is not None else ''} a{i}" for i in used] + numbers
    passed = [f"n{i}" for i in range(n_numbers)]
    packs = {
        i: _pack(arguments[i].dtype, pack // arguments[i].layout.share) for i in used if _lies_densely(arguments[i])
    }
    misaligned = [f"((unsigned long long)a{i} & (sizeof({one}) - 1))" for i, one in packs.items()] or ["0"]
    shared = [i for i in used if arguments[i].layout.share > 1]
    share = _elements_of_an_item(program)
    # What several elements make together is one of its own while each of them is worked on.
    of_pack = [
        f"e{i}" if i in shared else f"p{i}.of[j]" if i in packs else _at(arguments[i], f"a{i}", f"(i * {pack} + j)")
        for i in used
    ]
    alone = [f"e{i}" if i in shared else _at(arguments[i], f"a{i}", "i") for i in used]
    lines = [
        *_table_struct(program, entries, name),
        f"INLINE void {name}_element({', '.join(parameters)}) {{",
        *(f"    {line}" for line in _body(program)),
        "}",
        "",
        *_begin(program, name),
        "    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;",
        "    const long long step = (long long)gridDim.x * blockDim.x;",
        "    long long done = 0;",
        f"    if (({' | '.join(misaligned)}) == 0) {{",
        f"        for (long long i = first; i < n / {pack}; i += step) {{",
        *(f"            {one} p{i};" for i, one in packs.items()),
        *(
            f"            p{i} = reinterpret_cast<const {one}*>(a{i})[i];"
            for i, one in packs.items()
            if arguments[i].first is not None
        ),
        "            #pragma unroll",
        f"            for (int j = 0; j < {pack}; ++j) {{",
        *(f"                {_taken(arguments[i], f'e{i}', f'p{i}.of[j / {share}]', f'j % {share}')}" for i in shared),
        f"                {name}_element({', '.join([*of_pack, *passed])});",
        *(f"                {_put(arguments[i], f'e{i}', f'p{i}.of[j / {share}]', f'j % {share}')}" for i in shared),
        "            }",
        *(
            f"            reinterpret_cast<{one}*>(a{i})[i] = p{i};"
            for i, one in packs.items()
            if arguments[i].last is not None
        ),
        "        }",
        f"        done = n / {pack} * {pack};",
        "    }",
        # No two threads write one item.
        f"    for (long long item = done / {share} + first; item * {share} < n; item += step)",
        f"        for (int j = 0; j < {share} && item * {share} + j < n; ++j) {{",
        f"            const long long i = item * {share} + j;",
        *(f"            {_taken(arguments[i], f'e{i}', f'a{i}[item]', 'j')}" for i in shared),
        f"            {name}_element({', '.join([*alone, *passed])});",
        *(f"            {_put(arguments[i], f'e{i}', f'a{i}[item]', 'j')}" for i in shared),
        "        }",
        "}",
        "",
    ]
    return "\n".join(lines)


def _used(program: Program | Routine) -> list[int]:
    """Which arguments are read or written."""
    return [i for i, one in enumerate(program.arguments) if one.first is not None or one.last is not None]


def _pointers(program: Program | Routine) -> list[str]:
    """The types of the arrays."""
    return [f"{'' if one.last is not None else 'const '}{_TYPES[one.dtype].stored}*" for one in program.arguments]


def _table_struct(program: Program | Routine, entries: int, name: str) -> list[str]:
    """The argument of the kernel."""
    fields = [f"{pointer} a{i};" for i, pointer in enumerate(_pointers(program))]
    fields += ["long long n;", *(f"{_TYPES[dtype].stored} n{i};" for i, dtype in enumerate(program.numbers))]
    return [
        f"struct {name}_entry {{ {' '.join(fields)} }};",
        f"struct {name}_table {{ {name}_entry entries[{entries}]; }};",
        "",
    ]


def _begin(program: Program | Routine, name: str) -> list[str]:
    """The kernel takes one entry of the table."""
    pointers, entry = _pointers(program), "table.entries[blockIdx.y]"
    return [
        f'extern "C" __global__ void __launch_bounds__({THREADS}) {name}(const {name}_table table) {{',
        *(f"    {pointers[i]} const a{i} = {entry}.a{i};" for i in _used(program)),
        *(f"    const {_TYPES[dtype].stored} n{i} = {entry}.n{i};" for i, dtype in enumerate(program.numbers)),
        f"    const long long n = {entry}.n;",
    ]


def _elements_of_an_item(program: Program) -> int:
    """Where items of an argument are made of several elements; else 1."""
    return max((one.layout.share for one in program.arguments), default=1)


def _lies_densely(argument: Argument) -> bool:
    """Whether groups of elements can be read and written at once."""
    return not (argument.layout.all or argument.layout.row)


def _at(argument: Argument, array: str, i: str) -> str:
    """Element i of an array of which no item is made of several."""
    layout = argument.layout
    if layout.row:
        within = "" if layout.one else f" + {i} % {layout.row}"
        return f"{array}[{i} / {layout.row} * {layout.step}{within}]"
    return f"{array}[{0 if layout.all else i}]"


def _pack(dtype: np.dtype[Any], n: int) -> str:
    return f"Pack<{_TYPES[dtype].stored}, {n}>"


def _taken(argument: Argument, element: str, item: str, place: str) -> str:
    """An element that makes an item with others; read where it is read."""
    bits = argument.layout.bits
    value = f" = {item} >> (8 - {bits} * ({place} + 1)) & {2**bits - 1}" if argument.first is not None else ""
    return f"{_TYPES[argument.dtype].stored} {element}{value};"


def _put(argument: Argument, element: str, item: str, place: str) -> str:
    """Write such an element, where it is written. The first one of an item begins it."""
    bits = argument.layout.bits
    if argument.last is None:
        return ""
    if not bits:
        return f"{item} = {place} ? maximum({item}, {element}) : {element};"
    return f"{item} = ({place} ? {item} : 0) | ({element} & {2**bits - 1}) << (8 - {bits} * ({place} + 1));"


def _body(program: Program) -> list[str]:
    """What is done to one element: loads, numbers, operations, stores."""
    loads = [(one.first, f"a{i}") for i, one in enumerate(program.arguments) if one.first is not None]
    loads.sort()
    names = [name for _, name in loads] + [f"n{i}" for i in range(len(program.numbers))]
    dtypes = program.dtypes()
    lines = []
    for i, dtype in enumerate(dtypes):
        if i < len(names):
            text = f"{_LOADS[dtype]}({names[i]})" if dtype in _LOADS else names[i]
        else:
            operation = program.operations[i - len(names)]
            text = _expression(operation, [f"v{one}" for one in operation.inputs], dtypes[operation.inputs[0]])
        lines.append(f"const {_TYPES[dtype].value} v{i} = {text};")
    for i, one in enumerate(program.arguments):
        if one.last is not None:
            text = f"{_STORES[one.dtype]}(v{one.last})" if one.dtype in _STORES else f"v{one.last}"
            lines.append(f"a{i} = {text};")
    return lines


_OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_FUNCTIONS = {"minimum": "minimum", "maximum": "maximum", "sqrt": "root", "absolute": "magnitude", "sign": "sign"}
_OF_ONE_DTYPE = {
    ("minimum", _HALF): "minimum_half",
    ("maximum", _HALF): "maximum_half",
    ("sign", BFLOAT16): "sign_bfloat16",
}


def _expression(operation: Operation, inputs: Sequence[str], source_dtype: np.dtype[Any]) -> str:
    dtype, name = operation.dtype, operation.name
    if name == CAST:
        return _cast(inputs[0], source_dtype, dtype)
    if name == ROUND:
        return _round(inputs[0], source_dtype, dtype)
    if name == SELECT:
        return f"{inputs[0]} > 0 ? {inputs[1]} : {inputs[2]}"
    value, wrapping = _TYPES[dtype].value, _TYPES[dtype].wrapping
    if wrapping and name in _OPERATORS:
        return f"({value})(({wrapping}){inputs[0]} {_OPERATORS[name]} ({wrapping}){inputs[1]})"
    if name == "negative":
        return f"({value})(0u - ({wrapping}){inputs[0]})" if wrapping else f"-{inputs[0]}"
    if wrapping and name == "absolute":
        return f"{inputs[0]} < 0 ? ({value})(0u - ({wrapping}){inputs[0]}) : {inputs[0]}"
    if name in _OPERATORS:
        text = f"{inputs[0]} {_OPERATORS[name]} {inputs[1]}"
    else:
        text = f"{_OF_ONE_DTYPE.get((name, dtype), _FUNCTIONS[name])}({', '.join(inputs)})"
    return f"{_ROUNDS[dtype]}({text})" if dtype in _ROUNDS and (name in _OPERATORS or name == "sqrt") else text


def _cast(value: str, source_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    if dtype == _HALF and source_dtype == _DOUBLE:
        return f"half_to_float(double_to_half({value}))"
    if dtype in _ROUNDS:
        return f"{_ROUNDS[dtype]}((float){value})"
    return f"({_TYPES[dtype].value}){value}"


def _round(value: str, source_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    """To the nearest whole number within the limits, as `host.round_into` does it."""
    limits, real = np.iinfo(dtype), source_dtype.type
    high = np.nextafter(real(2.0**63), real(0.0)) if dtype == np.int64 else real(limits.max)
    kind = _TYPES[source_dtype].value
    low_text, high_text = (f"({kind}){float(one)!r}" for one in (real(limits.min), high))
    return f"limited<{_TYPES[dtype].value}, {kind}>({value}, {low_text}, {high_text})"


# --- copies between arrays with strides

STRIDED_NAME = "mpikv_strided"
STRIDED_DIMS = 8

_STRIDED = """\
struct STRIDED_table {
    char* to;
    const char* source;
    long long n;
    int dims;
    long long lengths[8], to_strides[8], source_strides[8];
};

// Elements are counted in C order; the last dimension is the fastest.
extern "C" __global__ void __launch_bounds__(THREADS) STRIDED(const STRIDED_table table) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < table.n; i += step) {
        long long rest = i, to = 0, from = 0;
        #pragma unroll
        for (int dim = 7; dim >= 0; --dim)
            if (dim < table.dims) {
                const long long at = rest % table.lengths[dim];
                rest /= table.lengths[dim];
                to += at * table.to_strides[dim];
                from += at * table.source_strides[dim];
            }
        *reinterpret_cast<ELEMENT*>(table.to + to) = *reinterpret_cast<const ELEMENT*>(table.source + from);
    }
}
"""
_ELEMENTS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


def strided_source(itemsize: int, name: str = STRIDED_NAME) -> str:
    """The text of a kernel `name` that copies elements of so many bytes between two arrays with strides."""
    text = _STRIDED.replace("THREADS", str(THREADS)).replace("ELEMENT", _ELEMENTS[itemsize])
    return text.replace("STRIDED", name)


def strided_table(to: tuple[int, Sequence[int]], source: tuple[int, Sequence[int]], shape: Sequence[int]) -> HostArray:
    """The argument of that kernel. to, source: each an address and its strides in bytes.

    Raises UnsupportedError where the arrays have more than `STRIDED_DIMS` dimensions that cannot be seen as fewer.
    """
    dims: list[tuple[int, int, int]] = []  # length, strides; those that both arrays have without a gap become one
    for length, to_stride, source_stride in zip(shape, to[1], source[1], strict=True):
        if length == 1:
            continue
        if dims and dims[-1][1:] == (length * to_stride, length * source_stride):
            length *= dims.pop()[0]  # noqa: PLW2901
        dims.append((length, to_stride, source_stride))
    if len(dims) > STRIDED_DIMS:
        raise UnsupportedError(
            f"an array on a GPU has {len(dims)} dimensions with gaps between their elements; up to {STRIDED_DIMS} can "
            "be copied: hand over a contiguous copy"
        )
    each = (np.int64, (STRIDED_DIMS,))
    fields: list[Any] = [("to", np.uint64), ("source", np.uint64), ("n", np.int64), ("dims", np.int32)]
    fields += [(name, *each) for name in ("lengths", "to_strides", "source_strides")]
    made = np.zeros(1, np.dtype(fields, align=True))
    made["to"], made["source"], made["n"], made["dims"] = to[0], source[0], math.prod(shape), len(dims)
    for name, values in zip(("lengths", "to_strides", "source_strides"), zip(*dims, strict=True), strict=False):
        made[name][0, : len(dims)] = values
    return made


# --- what a program's kernel is given


@functools.lru_cache(KEPT)
def elements_per_thread(program: Program) -> int:
    """How many elements a thread takes at a time."""
    used = [one for one in program.arguments if one.first is not None or one.last is not None]
    sizes = [one.dtype.itemsize for one in used if _lies_densely(one) and one.layout.share == 1]
    return max(PACK_BYTES // max(sizes, default=PACK_BYTES), _elements_of_an_item(program))


def threads(program: Program | Routine, n_elems: int) -> int:
    """How many have something to do for so many elements; those of a routine are one block."""
    return THREADS if isinstance(program, Routine) else -(-n_elems // elements_per_thread(program))


@functools.lru_cache(KEPT)
def entry_dtype(program: Program | Routine) -> np.dtype[Any]:
    """An entry of the table: the addresses, the number of elements, the numbers, as C++ lays them out."""
    fields: list[tuple[str, Any]] = [(f"a{i}", np.uint64) for i in range(len(program.arguments))]
    fields.append(("n", np.int64))
    # bfloat16 goes as its bits: NumPy aligns no dtypes of others.
    fields += [(f"n{i}", np.uint16 if dtype == BFLOAT16 else dtype) for i, dtype in enumerate(program.numbers)]
    return np.dtype(fields, align=True)


@functools.lru_cache(KEPT)
def _table_dtype(program: Program | Routine, room: int) -> np.dtype[Any]:
    return np.dtype([("entries", entry_dtype(program), (room,))], align=True)


def most_entries(program: Program | Routine) -> int:
    """How many entries a table can have room for."""
    return TABLE_BYTES // entry_dtype(program).itemsize


def table(program: Program | Routine, entries: Sequence[Entry], room: int) -> HostArray:
    """The argument of a kernel with room for so many entries: an array of one element, the table."""
    made = np.zeros(1, _table_dtype(program, room))
    rows = made["entries"][0]
    for i, (n_elems, addresses, numbers) in enumerate(entries):
        values = [
            np.array(number, dtype).view(np.uint16)[()] if dtype == BFLOAT16 else number
            for dtype, number in zip(program.numbers, numbers, strict=True)
        ]
        rows[i] = (*addresses, n_elems, *values)
    return made

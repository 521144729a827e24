"""CuPy compiles a kernel here, with its own headers and options, for each compute capability from the oldest on.

mpikv makes no kernels of its own; CuPy's are made the same way as the one here.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from installed import cupy
from jobs import ROOT

compiler: Any = pytest.importorskip("cupy.cuda.compiler")
MAKERS = re.compile(r"\b(ElementwiseKernel|ReductionKernel|RawKernel|RawModule|compile_with_cache)\b")
CAPABILITIES = (70, 75, 80, 86, 89, 90, 100, 120)
SOURCE = """
#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void add(CArray<float, 1, true, true> a, const __nv_bfloat16* b, const __half* c) {
    ptrdiff_t i = blockIdx.x * blockDim.x + threadIdx.x;
    a[i] += __bfloat162float(b[i]) + __half2float(c[i]);
}
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What compiles a source for a compute capability, and gives the bytes that would be loaded into a GPU."""
    loaded: list[bytes] = []
    module = SimpleNamespace(load=loaded.append, _set_mapping=lambda mapping: None)
    monkeypatch.setattr(compiler, "function", SimpleNamespace(Module=lambda: module))
    options_of = compiler._get_arch_for_options_for_nvrtc.__wrapped__  # the other one remembers by GPU
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", options_of)

    def compile_for(source: str, capability: int) -> bytes:
        options = cupy._core.core.assemble_cupy_compiler_options(())
        compiler._compile_with_cache_cuda(source, options, str(capability), cache_in_memory=True)
        return loaded.pop()

    return compile_for


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel(capability: int, compiled: Any) -> None:
    oldest = 70 if compiler._get_nvrtc_version()[0] < 13 else 75
    if capability < oldest:
        with pytest.raises(compiler.CompileException, match="gpu-architecture"):
            compiled(SOURCE, capability)
        return
    assert compiled(SOURCE, capability).startswith(b"\x7fELF")


def test_a_wrong_kernel(compiled: Any) -> None:
    with pytest.raises(compiler.CompileException, match="no_such_function"):
        compiled(SOURCE.replace("__half2float(c[i])", "no_such_function(c[i])"), 80)


def test_mpikv_makes_no_kernels() -> None:
    """Were there some, they would have to be compiled here."""
    assert not [str(path) for path in (ROOT / "mpikv").rglob("*.py") if MAKERS.search(path.read_text())]

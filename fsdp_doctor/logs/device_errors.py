"""Failures to get device or pinned memory outside PyTorch's allocator.

Wordings: c10/cuda/CUDAException.cpp, aten/src/ATen/cuda/Exceptions.h, ATen/cudnn/Exceptions.h,
ATen/native/cuda/CuFFTUtils.h, c10/cuda/driver_api.h, torch/csrc/distributed/c10d/NCCLUtils.hpp
(torch 1.8 to 2.14); NCCL's include/alloc.h and checks.h (2.8 to 2.27); hipErrorOutOfMemory of
ROCm; Unified Runtime of XPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_doctor.logs.records import Message
from fsdp_doctor.logs.sizes import SIZE, sane, size_bytes

_BACKENDS = {"CUDA": "CUDA", "CU": "CUDA", "cuda": "CUDA", "HIP": "HIP", "hip": "HIP"}

_NCCL = re.compile(
    r"NCCL WARN Cuda failure \d*\s?'out of memory'"
    r"|Failed to (?:CUDA|Cuda) (?:\w+ ){1,2}\d+ bytes"
    r"|NCCL error.{0,600}?(?:Cuda|HIP) failure \d*\s?'out of memory'"
    r"|ncclUnhandledCudaError.{0,300}?(?:Cuda|HIP) failure \d*\s?'out of memory'"
    r"|(?:Cuda|HIP) failure \d*\s?'out of memory'"
    r"|ncclSystemError.{0,400}?(?:allocat|out of memory)",
    re.DOTALL,
)
_NCCL_CALLOC = re.compile(r"Failed to (?:CUDA|Cuda) (?:\w+ ){1,2}(\d+)(?: bytes)?")
_LIBRARY = re.compile(
    r"\b((?:CU|HIP|ROC|MI)[A-Z]+_(?:STATUS_|STATUS)?_?ALLOC_FAILED"
    r"|(?:CU|HIP|ROC)BLAS_STATUS_NOT_INITIALIZED|rocblas_status_memory_error"
    r"|CU(?:DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_(?:INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOC\w*)"
    r"|cusolver error: \w*ALLOC_FAILED|miopenStatusAllocFailed"
    r"|(?:cu|hip|roc)(?:BLAS|DNN|SOLVER)(?:Lt)? Error: the resource allocation failed)"
    r"|Unable to find a valid cuDNN algorithm"
)
_INTERNAL = re.compile(
    r"cuFFT error: CUFFT_INTERNAL_ERROR"
    r"|\bCU(?:BLAS|SOLVER|SPARSE|DNN)_STATUS_INTERNAL_ERROR\b[^\n]{0,80}\w+Create\w*\("
)
"""A library says no more than that its handle or plan could not be made: so it does without memory,
but not only then."""
_HIDDEN = re.compile(
    r"(?:NVML_SUCCESS == r|!handles_\.at\(\w+\)|driver_api.{0,80}|out_of_memory.{0,40})"
    r" ?INTERNAL ASSERT FAILED at [^\n]{0,200}CUDACachingAllocator"
)
_DRIVER = re.compile(
    r"\b(?P<api>CUDA|HIP|cuda|hip)(?: driver)? [Ee]rror: (?:out of memory|hipErrorOutOfMemory"
    r"|memory allocation|device not ready)"
    r"|^Error out of memory at line \d{1,6} in file"
    r"|(?<!`)\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|hipErrorMemoryAllocation)\b"
    r"|\b(?P<xpu>(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_(?:RESOURCES|DEVICE_MEMORY|HOST_MEMORY))"
)
_PIN = re.compile(
    r"(?:cudaHostAlloc|cudaHostRegister|hipHostMalloc|cuMemHostRegister"
    r"|cudaMallocHost)\b[^\n]{0,120}"
    r"(?:fail|out of memory|error|invalid argument)"
    r"|(?:fail\w*|unable|could not|cannot)[^\n]{0,60}(?:pin(?:ned"
    r"|ning)? (?:host )?memory|page-lock)",
    re.IGNORECASE,
)
_PIN_FRAME = re.compile(
    r"pin_memory\(|\.pin_memory\b|_pin_memory|CachingHostAllocator|cudaHost(?:Alloc|Register)"
    r"|pin_tensor|PinMemory",
)
_INVALID = re.compile(r"(CUDA|HIP) error: invalid argument")
_KERNEL = re.compile(
    r"out of resources?: (shared memory|threads|registers|tensor memory)"
    r"|too many resources requested for launch"
    r"|uses too much shared data|OutOfResources\b"
)


def parse(text: str) -> Message | None:
    """Return the failure that ``text`` tells of, or None.

    ``text`` may go on over the following lines of the log.
    """
    for reader in _READERS:
        message = reader(text)
        if message is not None:
            return message
    return None


def pinned(text: str, frames: str) -> Message | None:
    """Return a failure to pin host memory, which reads like a device error but for its frames."""
    if _PIN_FRAME.search(frames) is None:
        return None
    if (invalid := _INVALID.search(text)) is not None:
        return Message(kind="pinned_alloc", form="invalid-argument", backend=invalid[1])
    if (driver := _DRIVER.search(text)) is not None and "device not ready" not in text:
        return Message(kind="pinned_alloc", form="runtime", backend=_backend(driver))
    return None


def _kernel(text: str) -> Message | None:
    if _KERNEL.search(text) is None:
        return None
    return Message(kind="kernel_resource", form="out-of-resources")


def _nccl(text: str) -> Message | None:
    found = _NCCL.search(text)
    if found is None:
        return None
    form = "nccl-warn" if "NCCL WARN" in text else "nccl-error"
    backend = "HIP" if "HIP failure" in text else "CUDA"
    message = Message(kind="nccl_alloc", form=form, backend=backend)
    calloc = _NCCL_CALLOC.search(text)
    if calloc is not None:
        message.requested_bytes = sane(int(calloc[1][:30]))
    return message


def _library(text: str) -> Message | None:
    found = _LIBRARY.search(text)
    if found is None and _INTERNAL.search(text) is not None:
        return Message(kind="library_alloc", form="internal-error", backend="CUDA")
    if found is None:
        return None
    name = (found[1] or "").lower()
    form = "not-initialized" if "not_init" in name else "alloc-failed" if name else "no-algorithm"
    return Message(
        kind="library_alloc",
        form=form,
        backend="HIP" if name.startswith(("hip", "roc", "mi")) else "CUDA",
    )


def _hidden(text: str) -> Message | None:
    """An assertion in the caching allocator that an out of memory trips (torch 2.0 to 2.14)."""
    if _HIDDEN.search(text) is None:
        return None
    return Message(kind="device_oom", form="hidden-assert", backend="CUDA")


def _pinned(text: str) -> Message | None:
    found = _PIN.search(text)
    if found is None:
        return None
    message = Message(kind="pinned_alloc", form="host-register")
    size = re.search(SIZE, text[: found.end() + 200])
    message.requested_bytes = sane(size_bytes(size[1], size[2])) if size else None
    return message


def _driver(text: str) -> Message | None:
    found = _DRIVER.search(text)
    if found is None:
        return None
    form = "runtime" if " error" in found[0].lower() or "at line" in found[0] else "error-code"
    if " driver error" in found[0]:
        form = "driver"
    return Message(kind="driver_oom", form=form, backend=_backend(found))


def _backend(found: re.Match[str]) -> str:
    if found["xpu"]:
        return "XPU"
    name = found["api"] or ("HIP" if found[0].startswith("hip") else "CUDA")
    return _BACKENDS.get(name, "CUDA")


_XLA = re.compile(
    r"RESOURCE_EXHAUSTED: [^\n]{0,200}?out of memory[^\n]{0,80}?allocat\w+ (?:of )?"
    r"(\d{1,30}) bytes",
    re.IGNORECASE,
)


def _xla(text: str) -> Message | None:
    """XLA's allocator (JAX, PyTorch/XLA)."""
    found = _XLA.search(text)
    if found is None:
        return None
    return Message(
        kind="device_oom", form="xla", backend="XLA", requested_bytes=sane(int(found[1]))
    )


_READERS: tuple[Callable[[str], Message | None], ...] = (
    _kernel,
    _nccl,
    _library,
    _hidden,
    _xla,
    _pinned,
    _driver,
)

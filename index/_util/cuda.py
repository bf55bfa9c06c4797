"""The GPUs of this machine, as NVIDIA's driver reports them, without a package that needs one."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

DRIVER_LIBRARY = "libcuda.so.1"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class Gpu(NamedTuple):
    """A GPU that this process may use, with its memory in bytes."""

    name: str
    total: int
    free: int


class Gpus(NamedTuple):
    """The GPUs in CUDA's order, which CUDA_VISIBLE_DEVICES limits; without any, the problem that explains it."""

    found: tuple[Gpu, ...]
    cuda: str = ""
    """The newest version of CUDA that the driver supports."""
    driver: str = ""
    problem: str = ""


class _CudaError(Exception):
    """A call of the driver failed."""


def find_gpus(library: str = DRIVER_LIBRARY) -> Gpus:
    """Asks the driver; never raises."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return Gpus((), problem=f"no NVIDIA driver ({error})")
    version = ctypes.c_int()
    try:
        _call(driver.cuInit, 0)
        _call(driver.cuDriverGetVersion, ctypes.byref(version))
        count = ctypes.c_int()
        _call(driver.cuDeviceGetCount, ctypes.byref(count))
        found = tuple(_describe(driver, number) for number in range(count.value))
    except (_CudaError, AttributeError) as error:
        return Gpus((), driver=_driver_version(), problem=f"the NVIDIA driver does not work ({error})")
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    problem = "" if found else "the NVIDIA driver finds no GPU that this process may use"
    return Gpus(found, cuda, _driver_version(), problem)


def _describe(driver: ctypes.CDLL, number: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    _call(driver.cuDeviceGet, ctypes.byref(device), number)
    _call(driver.cuDeviceGetName, name, len(name), device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with _context(driver, device):
        _call(driver.cuMemGetInfo_v2, ctypes.byref(free), ctypes.byref(total))
    return Gpu(name.value.decode(errors="replace"), total.value, free.value)


@contextmanager
def _context(driver: ctypes.CDLL, device: ctypes.c_int) -> Iterator[None]:
    """Makes the context that all libraries of the process share current for this thread."""
    context = ctypes.c_void_p()
    _call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
    try:
        _call(driver.cuCtxPushCurrent_v2, context)
        try:
            yield
        finally:
            _call(driver.cuCtxPopCurrent_v2, ctypes.byref(context))
    finally:
        _call(driver.cuDevicePrimaryCtxRelease_v2, device)


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    if code := function(*arguments):
        raise _CudaError(f"{function.__name__} failed with error {code}")


def _driver_version() -> str:
    """Returns the version of the kernel module: the word after "Kernel Module" and an optional name."""
    try:
        first = _DRIVER_FILE.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""
    return next((word for word in first.split() if word[0].isdigit()), "")

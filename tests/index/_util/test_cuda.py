"""What NVIDIA's driver reports, asked of a stand-in for its library that is compiled from C."""

import shutil
import subprocess
from pathlib import Path

import pytest

from index._util.cuda import Gpu, find_gpus

COMPILER = shutil.which("cc") or shutil.which("gcc")
DRIVER = """
#include <stdio.h>
#include <stddef.h>
static char context; static int depth, current = -1;
int cuInit(unsigned flags) { return %(init)s; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = %(count)s; return 0; }
int cuDeviceGet(int *device, int number) { *device = 40 + number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "GPU %%d", device); return 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) { current = device; *found = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device != current || depth; }
int cuCtxPushCurrent_v2(void *pushed) { depth++; return pushed != &context; }
int cuCtxPopCurrent_v2(void **popped) { depth--; *popped = &context; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = (size_t) current << 30; *total = (size_t) 80 << 30; return depth != 1;
}
"""


@pytest.fixture
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if not COMPILER:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so"
    source.write_text(DRIVER % {"init": 0, "count": 2, **request.param})
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


@pytest.mark.parametrize("driver", [{}], indirect=True)
def test_gpus_are_listed_with_their_memory(driver: str) -> None:
    gpus = find_gpus(driver)
    assert gpus.found == (Gpu("GPU 40", 80 << 30, 40 << 30), Gpu("GPU 41", 80 << 30, 41 << 30))
    assert (gpus.cuda, gpus.problem) == ("13.2", "")


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        ({"init": 100}, "the NVIDIA driver does not work (cuInit failed with error 100)"),
        ({"count": 0}, "the NVIDIA driver finds no GPU that this process may use"),
    ],
    indirect=["driver"],
)
def test_a_driver_without_gpus_is_a_problem(driver: str, problem: str) -> None:
    assert find_gpus(driver).problem == problem
    assert find_gpus(driver).found == ()


def test_a_machine_without_a_driver_is_a_problem() -> None:
    gpus = find_gpus("libcuda-that-does-not-exist.so.1")
    assert gpus.found == () and gpus.problem.startswith("no NVIDIA driver (libcuda-that-does-not-exist.so.1: cannot")

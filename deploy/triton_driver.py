"""Compile Triton's driver ahead of time, so that an image with a GPU needs no C compiler.

At its first start Triton compiles one C file, finds the result in its cache ever after, and names it by the text of
that file and the platform. The file is linked with the CUDA driver, which a build machine does not have: a library with
empty functions of the same names stands in for it. The real one is found when the result is loaded.

Usage: python deploy/triton_driver.py CACHE_FOLDER
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "libcuda.so.1"


def driver_source() -> str:
    """Triton's C file, found without importing Triton, which reads the environment when it is imported."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        sys.exit("triton: is not installed")
    return (Path(spec.origin).parent / "backends" / "nvidia" / "driver.c").read_text(encoding="utf-8")


def build_stand_in(folder: Path, source: str) -> None:
    # The linker drops a library of which nothing is used, so every function that is called has to be there.
    functions = sorted(set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", source)))
    text = "".join(f"void {function}(void) {{}}\n" for function in functions)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY)]
    subprocess.run(command, input=text, text=True, check=True)


def main() -> None:
    cache = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        build_stand_in(Path(folder), driver_source())
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        os.environ["TRITON_CACHE_DIR"] = str(cache)
        driver = importlib.import_module("triton.backends.nvidia.driver")

        try:
            driver.CudaUtils()
        except (ImportError, RuntimeError) as error:
            # Without a CUDA driver it cannot be loaded, but it is in the cache by now.
            print(f"triton: compiled, not loaded: {error}")
    built = list(cache.glob("*/cuda_utils*.so"))
    if len(built) != 1 or LIBRARY.encode() not in built[0].read_bytes():
        sys.exit(f"triton: expected one cuda_utils*.so that needs {LIBRARY} below {cache}, found {built}")


if __name__ == "__main__":
    main()

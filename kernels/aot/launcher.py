"""Triton's own launcher, a C extension that it compiles before its first launch on a card."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from triton import knobs
from triton.backends.nvidia.driver import CudaUtils


def write_launcher(compiler: str) -> None:
    """Compile the launcher into Triton's cache, where a server without a compiler finds it.

    It names the driver's library as one that it needs; an empty one stands in for it here. Raises
    CalledProcessError where the C `compiler` fails. Sets CC of this process.
    """
    with tempfile.TemporaryDirectory(prefix="wh-aot-") as folder:
        library, wrapper = Path(folder, "libcuda.so.1"), Path(folder, "cc")
        options = ["-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{library.name}"]
        subprocess.run([compiler, *options, "-o", str(library)], check=True)
        # Nothing is taken from an empty library, and a linker may leave such ones out.
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} -Wl,--no-as-needed "$@"\n')
        wrapper.chmod(0o700)
        os.environ["CC"] = str(wrapper)
        knobs.nvidia.libcuda_path = folder
        # It is in the cache by the time that Triton cannot load it without a driver.
        with contextlib.suppress(ImportError):
            CudaUtils()

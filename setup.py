"""Builds the one C extension, `magneto._C`; everything else about the distribution stands in pyproject.toml.

The extension needs CPython's headers and a C compiler only (no torch headers), so it builds in seconds.
"""

from __future__ import annotations

import glob
import os
import sys

from setuptools import Extension, setup

COMPILE_FLAGS = [] if sys.platform == "win32" else ["-O2", "-Wall", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "magneto._C",
            sources=sorted(glob.glob("csrc/*.c")),
            depends=sorted(glob.glob("csrc/*.h")),
            include_dirs=["csrc"],
            extra_compile_args=COMPILE_FLAGS + os.environ.get("MAGNETO_CFLAGS", "").split(),
            extra_link_args=os.environ.get("MAGNETO_LDFLAGS", "").split(),
        )
    ]
)

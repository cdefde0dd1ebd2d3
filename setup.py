# SPDX-License-Identifier: Apache-2.0
"""Drives CMake for the extension and the benchmark binaries; metadata is in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Configures, builds and installs into the package directory."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # In the folder of a preset, with its flags, which the C++ tests use too; or in its own.
        preset = os.environ.get("USBYTE_PRESET")
        name = preset or f"cp{sys.version_info.major}{sys.version_info.minor}"
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DUSBYTE_BENCH=OFF"]
        if preset:
            flags = [f"--preset={preset}", "-DUSBYTE_TESTS=OFF"]
        build = ROOT / "build" / name
        # What it holds of Python, compiler and tools may be of another environment.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run(
            ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *flags,
             "-DUSBYTE_PYTHON=ON",
             f"-DPython_EXECUTABLE={sys.executable}",
             f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
             f"-DUSBYTE_CUDA={os.environ.get('USBYTE_CUDA', 'AUTO')}",
             f"-DUSBYTE_WERROR={os.environ.get('USBYTE_WERROR', 'OFF')}"],
            check=True,
        )  # fmt: skip
        subprocess.run(["cmake", "--build", str(build), "--target", "usbyte_package"], check=True)
        subprocess.run(
            ["cmake", "--install", str(build), "--component", "python", "--strip",
             "--prefix", str(package.parent)],
            check=True,
        )  # fmt: skip


setup(ext_modules=[Extension("usbyte._core", sources=[])], cmdclass={"build_ext": CMakeBuild})

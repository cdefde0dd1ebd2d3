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

        build = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DUSBYTE_CUDA={os.environ.get('USBYTE_CUDA', 'AUTO')}",
        ]  # fmt: skip
        # A build folder of another environment points to tools that may be gone.
        fresh = ["--fresh"] if (build / "CMakeCache.txt").exists() else []
        subprocess.run([*configure, *fresh], check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        subprocess.run(
            ["cmake", "--install", str(build), "--component", "python", "--strip",
             "--prefix", str(package.parent)],
            check=True,
        )  # fmt: skip


setup(ext_modules=[Extension("usbyte._core", sources=[])], cmdclass={"build_ext": CMakeBuild})

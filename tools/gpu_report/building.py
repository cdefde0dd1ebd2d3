# SPDX-License-Identifier: Apache-2.0
"""Builds usbyte with CUDA into one folder; installs nothing outside of it.

    PYTHONPATH=tools python3 -m gpu_report.building build/gpu [WHEELS]

The folder has three subfolders. `package` has the Python package with its C++ core and `bin`.
`site` has the packages that this Python lacked. `cmake` is CMake's build folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Used as programs: one on PATH is as good as the Python package of that name.
_PROGRAMS = ("cmake", "ninja")
# Not installed here: they must come with the chosen Python, whose torch sees the GPU.
_GIVEN = ("torch", "numpy", "setuptools")


@dataclass(frozen=True)
class Place:
    """The paths of a build.

    Attributes:
        folder: The build's folder, an absolute path.
    """

    folder: Path

    @property
    def package(self) -> Path:
        """The folder that PYTHONPATH needs for `import usbyte`."""
        return self.folder / "package"

    @property
    def site(self) -> Path:
        """The folder of the packages that this Python lacked."""
        return self.folder / "site"

    @property
    def logs(self) -> Path:
        """The folder of the parts' outputs."""
        return self.folder / "logs"

    def binary(self, name: str) -> str:
        """Returns the path of a C++ benchmark."""
        return str(self.package / "usbyte" / "bin" / name)

    def environ(self) -> dict[str, str]:
        """Returns the environment of this process, changed so that it finds this build."""
        known = [self.package, self.site, ROOT / "tools", os.environ.get("PYTHONPATH", "")]
        tools = [str(self.site / "bin"), os.environ.get("PATH", os.defpath)]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, known))),
            "PATH": os.pathsep.join(tools),
            "PYTHONUNBUFFERED": "1",
        }


def missing(requirements: Iterable[str], site: Path) -> list[str]:
    """Returns the requirements that neither this Python nor `site` meets.

    A program on PATH meets the requirement for cmake or ninja.
    """
    packaging = "packaging" if importlib.util.find_spec("packaging") else "pip._vendor.packaging"
    parse = importlib.import_module(f"{packaging}.requirements").Requirement
    found = []
    for text in requirements:
        wanted = parse(text)
        if wanted.name in _GIVEN or (wanted.name in _PROGRAMS and shutil.which(wanted.name)):
            continue
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        # The first distribution on the path is the one that an import finds.
        there = metadata.distributions(name=wanted.name, path=[str(site), *sys.path])
        version = next((distribution.version for distribution in there), None)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            found.append(text)
    return found


def provide(requirements: Iterable[str], site: Path, wheels: str) -> None:
    """Installs missing requirements into `site`.

    Args:
        requirements: Requirements in the form of pyproject.toml.
        site: Target folder, which may exist.
        wheels: Folder of wheels, which are all installed without dependencies; "" for pip's index.

    Raises:
        SystemExit: A requirement is still missing.
    """
    lacking = missing(requirements, site)
    if not lacking:
        return
    print("missing:", *lacking, flush=True)
    target = ["--no-compile", "--disable-pip-version-check", "--upgrade", "--target", str(site)]
    what = lacking
    if wheels:
        what = [str(path) for path in sorted(Path(wheels).glob("*.whl"))]
        if not what:
            raise SystemExit(
                f"there are no wheels in '{wheels}'; put wheels of {', '.join(lacking)} there"
            )
        target += ["--no-index", "--no-deps"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *target, *what])
    lacking = missing(requirements, site)
    if done.returncode != 0 or lacking:
        source = f"the wheels in '{wheels}' do not hold" if wheels else "pip could not install"
        raise SystemExit(
            f"{source} {', '.join(lacking) or 'all requirements'}; without a package index, "
            "download their wheels elsewhere and name the folder: make gpu-test WHEELS=FOLDER"
        )


def build(place: Place, wheels: str = "", options: Iterable[str] = ("-DUSBYTE_CUDA=ON",)) -> None:
    """Builds usbyte and checks that it can be imported.

    Args:
        place: The folder. An existing CMake build folder in it is reused.
        wheels: Folder of wheels for missing packages; "" for pip's index.
        options: Additional options for CMake.

    Raises:
        SystemExit: A package is missing, or a command failed.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    provide(_requirements(), place.site, wheels)
    env = place.environ()
    # The package of an earlier build could have modules that were removed since.
    shutil.rmtree(place.package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "bin")
    shutil.copytree(ROOT / "python" / "usbyte", place.package / "usbyte", ignore=ignored)
    cmake = place.folder / "cmake"
    _run(
        env, "cmake", "-S", str(ROOT), "-B", str(cmake), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DUSBYTE_PYTHON=ON", "-DUSBYTE_BENCH=ON",
        "-DUSBYTE_TESTS=OFF", f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={_pybind11(env)}", *options,
    )  # fmt: skip
    _run(env, "cmake", "--build", str(cmake))
    for component in ("python", "bench"):
        install = ["--component", component, "--prefix", str(place.package)]
        _run(env, "cmake", "--install", str(cmake), *install)
    answer = "from usbyte import _core; print(_core.build_info(), _core.cuda_info())"
    if "-DUSBYTE_CUDA=ON" in options:  # Fails, for example, if CUDA is too new for the driver.
        answer += "; devices = _core.cuda_info(); assert devices.devices, devices.reason"
    _run(env, sys.executable, "-c", answer)


def _requirements() -> list[str]:
    reader = "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"
    project = importlib.import_module(reader).loads((ROOT / "pyproject.toml").read_text())
    tests = project["project"]["optional-dependencies"]["test"]
    found = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    return [*found, *(text for text in tests if text.startswith("pytest"))]


def _pybind11(env: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "pybind11", "--cmakedir"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _run(env: Mapping[str, str], *command: str) -> None:
    print("$", *command, flush=True)
    if subprocess.run(command, env=env).returncode != 0:
        raise SystemExit(f"`{command[0]}` failed; its output is above")


if __name__ == "__main__":
    build(Place(Path(sys.argv[1]).resolve()), *sys.argv[2:])

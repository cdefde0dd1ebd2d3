"""Builds usbyte with its CUDA part into one folder, beside which nothing is installed.

    PYTHONPATH=tools python3 -m gpu_report.building build/gpu [WHEELS]

The folder's `package` is the Python package with its extension and `bin`, its `site` holds what
this Python lacked, and `cmake` is CMake's.
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
# Asked for as programs: an installed one does as well as the Python package of that name.
_PROGRAMS = ("cmake", "ninja")
# torch and what belongs to it come with the Python that was chosen.
_GIVEN = ("torch", "numpy", "setuptools")


@dataclass(frozen=True)
class Place:
    """Where things are.

    Attributes:
        folder: Absolute.
    """

    folder: Path

    @property
    def package(self) -> Path:
        """What PYTHONPATH needs for `import usbyte`."""
        return self.folder / "package"

    @property
    def site(self) -> Path:
        """What this Python lacked."""
        return self.folder / "site"

    @property
    def logs(self) -> Path:
        """Outputs of the parts."""
        return self.folder / "logs"

    def binary(self, name: str) -> str:
        """Path of a benchmark."""
        return str(self.package / "usbyte" / "bin" / name)

    def environ(self) -> dict[str, str]:
        """This process's environment, in which `usbyte` is the one built here."""
        known = [self.package, self.site, ROOT / "tools", os.environ.get("PYTHONPATH", "")]
        tools = [str(self.site / "bin"), os.environ.get("PATH", os.defpath)]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, known))),
            "PATH": os.pathsep.join(tools),
            "PYTHONUNBUFFERED": "1",
        }


def missing(requirements: Iterable[str], site: Path) -> list[str]:
    """Those that neither this Python nor `site` meets, whatever of them is a program on PATH."""
    packaging = "packaging" if importlib.util.find_spec("packaging") else "pip._vendor.packaging"
    parse = importlib.import_module(f"{packaging}.requirements").Requirement
    found = []
    for text in requirements:
        wanted = parse(text)
        if wanted.name in _GIVEN or (wanted.name in _PROGRAMS and shutil.which(wanted.name)):
            continue
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        # The first one counts, as in an import.
        there = metadata.distributions(name=wanted.name, path=[str(site), *sys.path])
        version = next((distribution.version for distribution in there), None)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            found.append(text)
    return found


def provide(requirements: Iterable[str], site: Path, wheels: str) -> None:
    """Installs what is missing into `site`.

    Args:
        requirements: As in pyproject.toml.
        site: May exist.
        wheels: A folder of wheels, all of which are then installed as they are; "" for pip's index.

    Raises:
        SystemExit: Something is still missing.
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
            raise SystemExit(f"there are no wheels in '{wheels}', of which {lacking} are needed")
        target += ["--no-index", "--no-deps"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *target, *what])
    lacking = missing(requirements, site)
    if done.returncode != 0 or lacking:
        source = f"the wheels in '{wheels}' do not hold" if wheels else "pip could not install"
        raise SystemExit(
            f"{source} {', '.join(lacking) or 'all that is needed'}; without a package index, "
            "download wheels of these elsewhere and name their folder: make gpu-test WHEELS=FOLDER"
        )


def build(place: Place, wheels: str = "", options: Iterable[str] = ("-DUSBYTE_CUDA=ON",)) -> None:
    """Makes the folder.

    Args:
        place: Its CMake part may exist.
        wheels: See `provide`.
        options: For CMake.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    provide(_requirements(), place.site, wheels)
    env = place.environ()
    # A package of an earlier build could hold modules that are gone.
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
    install = ["--component", "python", "--prefix", str(place.package)]
    _run(env, "cmake", "--install", str(cmake), *install)
    answer = "from usbyte import _core; print(_core.build_info(), _core.cuda_info())"
    if "-DUSBYTE_CUDA=ON" in options:  # a CUDA newer than the driver's, say
        answer += "; devices = _core.cuda_info(); assert devices.devices, devices.reason"
    _run(env, sys.executable, "-c", answer)


def _requirements() -> list[str]:
    reader = "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"
    told = importlib.import_module(reader).loads((ROOT / "pyproject.toml").read_text())
    tests = told["project"]["optional-dependencies"]["test"]
    found = [*told["build-system"]["requires"], *told["project"]["dependencies"]]
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

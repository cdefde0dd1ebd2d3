# SPDX-License-Identifier: Apache-2.0
"""What is published: a source distribution with all sources, and a wheel that needs no compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def run(*command, timeout=120, **options):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked():
    """Files that git knows, without which this file cannot say what belongs into the sdist."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = run("git", "-C", ROOT, "ls-files", "-z").split("\0")
    return sorted(name for name in names if name and (ROOT / name).exists())


@pytest.fixture(scope="module")
def sdist(tracked, tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        copy = folder / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy)
    run(sys.executable, "-c", BUILD_SDIST, folder, cwd=folder / "tree")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def fresh(sdist, tmp_path_factory):
    """Environment of the wheel that the sdist builds, which borrows torch from this one."""
    # As in a clone, the environment is in the source folder: so ccache finds what is compiled
    # already, whose relative paths are the same.
    (sdist / ".venv").symlink_to(sys.prefix)
    dist = tmp_path_factory.mktemp("dist")
    options = ("-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", dist)
    env = {**os.environ, "USBYTE_PRESET": "release", "USBYTE_WERROR": os.getenv("WERROR", "OFF")}
    python = sdist / ".venv/bin/python"
    run(python, "-m", "pip", "wheel", *options, ".", cwd=sdist, env=env, timeout=1800)
    (wheel,) = dist.glob("*.whl")
    home = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "-q")
    run(*pip, "--no-deps", "--no-index", wheel)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "zz_torch.pth").write_text(sysconfig.get_path("purelib"))
    return home


def alone(fresh, *command):
    """Runs a command where nothing but the environment can be found, no compiler either."""
    return run(*command, cwd=fresh, env={"PATH": str(fresh / "bin"), "HOME": str(fresh)})


def test_sdist_holds_all_sources(sdist, tracked):
    assert [name for name in tracked if not (sdist / name).is_file()] == []


def test_sdist_holds_no_outputs(sdist):
    unwanted = {".so", ".pyc", ".log", ".o"}
    assert [path for path in sdist.rglob("*") if path.suffix in unwanted and path.is_file()] == []


# One test, as parallel tests would build one wheel each.
def test_wheel_trains_without_compiler(fresh):
    (package,) = fresh.glob("lib/python*/site-packages/usbyte")
    assert not (package / "bin").exists()
    assert sum(path.stat().st_size for path in package.rglob("*.so")) < 12e6
    where = alone(fresh, fresh / "bin/python", "-c", "import usbyte; print(usbyte.__file__)")
    assert Path(where.strip()).is_relative_to(fresh)
    assert "everything works" in alone(fresh, fresh / "bin/usbyte", "doctor")
    digits = (fresh / "bin/python", ROOT / "examples/digits.py", "--epochs", "1")
    assert "2 workers" in alone(fresh, fresh / "bin/usbyterun", "-np", "2", *digits)

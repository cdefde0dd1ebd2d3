# SPDX-License-Identifier: Apache-2.0
"""The installed package: an extension free of torch, hidden symbols, one version; benchmarks."""

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

import usbyte
from usbyte import _core

# `make cpp` builds them; they are no part of the package.
BENCH = Path(__file__).parents[2] / "build/release/csrc/bench"
BINARIES = sorted(path for path in BENCH.glob("usbyte_bench_*") if os.access(path, os.X_OK))
# Namespaces c10, at, torch, caffe2 in mangled names, and the C names of torch's Python part.
TORCH_SYMBOL = re.compile(r"_Z\w*?(3c10|2at|5torch|6caffe2)\d|_?(THP|THC|aoti_torch_|torch_)\w*")
# Names that belong to us or to a library we carry. libstdc++ declares namespace std with default
# visibility, which -fvisibility=hidden does not change: what is instantiated of it stays exported.
CARRIED = re.compile(r"_Z(T[ISVT]|GV|GR)?Z*[PRKF]*N?[KVRO]*(6usbyte|8pybind11|8nlohmann)")


@pytest.fixture(scope="module")
def extension():
    with Path(_core.__file__).open("rb") as file:
        yield ELFFile(file)


def symbols(extension, *, defined):
    table = extension.get_section_by_name(".dynsym")
    return {
        symbol.name
        for symbol in table.iter_symbols()
        if symbol.name
        and (symbol["st_shndx"] != "SHN_UNDEF") == defined
        and symbol["st_other"]["visibility"] == "STV_DEFAULT"
    }


def test_extension_needs_no_torch_library(extension):
    tags = extension.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
    needed = [tag.needed for tag in tags]
    assert needed
    foreign = ("libtorch", "libc10", "libnccl", "libcudart", "libcuda.", "libpython")
    assert [name for name in needed if name.startswith(foreign)] == []


def test_extension_imports_no_torch_symbol(extension):
    undefined = symbols(extension, defined=False)
    assert any(name.startswith("Py") for name in undefined)
    assert [name for name in undefined if TORCH_SYMBOL.match(name)] == []


@pytest.mark.parametrize(
    "name",
    ["_ZN3c105ErrorC1Ev", "_ZNK2at6Tensor3dimEv", "_ZTIN5torch8autograd4NodeE", "THPVariable"],
)
def test_torch_symbols_are_recognised(name):
    assert TORCH_SYMBOL.match(name)


def test_extension_exports_only_its_init_function(extension):
    exported = symbols(extension, defined=True)
    assert [name for name in exported if not name.startswith("_Z")] == ["PyInit__core"]
    assert [name for name in exported if CARRIED.match(name)] == []


@pytest.mark.parametrize("binary", BINARIES, ids=lambda binary: binary.name)
def test_benchmarks_answer_help(binary):
    run = subprocess.run(
        [binary, "--help"], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "--" in run.stdout


def test_one_version():
    assert importlib.metadata.version("usbyte") == usbyte.__version__
    assert _core.build_info()["version"] == usbyte.__version__
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] == usbyte.__version__


def test_building_needs_no_torch():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "torch" not in re.search(r"^requires = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]

# SPDX-License-Identifier: Apache-2.0
"""Checks that every call of a torch factory function states `device=` and `dtype=`.

Without `device=`, a tensor is made on the default device of the user's program, as set by
`torch.set_default_device` or `torch.set_default_tensor_type`. Without `dtype=`, it has the default
dtype, as set by `torch.set_default_dtype`. The C++ core reads tensors by address, so their device
and dtype must not depend on such settings.

Usage: python tools/check_factory_calls.py FILE_OR_DIRECTORY...
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: Functions of `torch` that use the default device without `device=`. A test compares the list with
#: torch's own.
FACTORIES = frozenset(
    {
        *("arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty"),
        *("empty_permuted", "empty_quantized", "empty_strided", "eye", "full", "hamming_window"),
        *("hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "rand"),
        *("randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices"),
        *("triu_indices", "zeros"),
        *(f"sparse_{layout}_tensor" for layout in ("coo", "csr", "csc", "bsr", "bsc")),
        "sparse_compressed_tensor",
    }
)
# Their dtype is an integer one, or that of the given values.
_KNOWN_DTYPE = frozenset(["randint", "randperm", "tril_indices", "triu_indices"]) | {
    name for name in FACTORIES if name.startswith("sparse_")
}
# Layers of `torch.nn` whose parameters follow the defaults.
_LAYERS = frozenset(
    {
        *("Bilinear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "EmbeddingBag", "GRU", "LSTM"),
        *("LayerNorm", "Linear", "MultiheadAttention", "RNN", "Transformer"),
    }
)
_FORBIDDEN = {
    "get_default_dtype": "state the dtype that is meant",
    "get_default_device": "state the device that is meant",
    "Tensor": "use torch.tensor or torch.empty",
    **{
        f"{kind}Tensor": "use torch.tensor or torch.empty"
        for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Int", "Long", "Bool")
    },
}


def problems(source: str, name: str) -> Iterator[str]:
    """Yields a line "FILE:LINE: message" for each call that depends on a default.

    Args:
        source: Text of a Python file.
        name: Name of the file, for messages.
    """
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.Call):
            found = _in_call(node)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found = _in_import(node)
        else:
            continue
        if found:
            yield f"{name}:{node.lineno}: {found}"


def _in_call(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(value=ast.Name("torch"), attr=function):
            what = f"torch.{function}"
        case ast.Attribute(value=ast.Name("nn") | ast.Attribute(attr="nn"), attr=function) if (
            function in _LAYERS
        ):
            what = f"nn.{function}"
        case _:
            return ""
    if what.startswith("torch.") and function in _FORBIDDEN:
        return f"{what}() follows the program's defaults: {_FORBIDDEN[function]}"
    if what.startswith("torch.") and function not in FACTORIES:
        return ""
    stated = {word.arg for word in call.keywords if ast.unparse(word.value) != "None"}
    wanted = ["device"] if function in _KNOWN_DTYPE else ["device", "dtype"]
    missing = " and ".join(f"{word}=" for word in wanted if word not in stated)
    return f"{what}() does not state {missing}" if missing else ""


def _in_import(node: ast.Import | ast.ImportFrom) -> str:
    for alias in node.names:
        if isinstance(node, ast.Import) and alias.name == "torch" and alias.asname:
            return "torch is imported under another name, which this check does not follow"
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and alias.name in FACTORIES:
            return f"import torch, and call torch.{alias.name}, so that this check sees the call"
    return ""


def main(paths: list[str]) -> int:
    """Prints the problems; returns the exit code, 1 if there are any."""
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    found = [line for file in files for line in problems(file.read_text(), str(file))]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Prints what pyproject.toml requires, for pip: to `build` the package, or with these extras."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

told = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
if sys.argv[1:] == ["build"]:
    requirements = told["build-system"]["requires"]
else:
    requirements = told["project"]["dependencies"]
    for extra in sys.argv[1:]:
        requirements += told["project"]["optional-dependencies"][extra]
print(*requirements)

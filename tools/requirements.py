"""Prints what pyproject.toml requires, with the extras named on the command line, for pip."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
requirements = project["dependencies"]
for extra in sys.argv[1:]:
    requirements += project["optional-dependencies"][extra]
print(*requirements)

# SPDX-License-Identifier: Apache-2.0
"""Prints requirements of pyproject.toml for pip.

Usage: `requirements.py build` for those of the build, or `requirements.py EXTRA...` for those of
the package with these extras.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
if sys.argv[1:] == ["build"]:
    requirements = project["build-system"]["requires"]
else:
    requirements = project["project"]["dependencies"]
    for extra in sys.argv[1:]:
        requirements += project["project"]["optional-dependencies"][extra]
print(*requirements)

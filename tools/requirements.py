# SPDX-License-Identifier: Apache-2.0
"""Prints requirements of pyproject.toml for pip.

Usage: `requirements.py build [EXTRA...]` for those of the build and of these extras alone, or
`requirements.py EXTRA...` for those of the package with these extras.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
extras = sys.argv[1:]
if extras[:1] == ["build"]:
    requirements = project["build-system"]["requires"]
    extras = extras[1:]
else:
    requirements = project["project"]["dependencies"]
for extra in extras:
    requirements += project["project"]["optional-dependencies"][extra]
print(*requirements)

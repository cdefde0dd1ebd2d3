# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: the world, subgroups, process sets, and checks that ranks are consistent."""

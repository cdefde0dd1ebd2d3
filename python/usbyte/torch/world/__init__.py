# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run, process sets, and checks that ranks agree."""

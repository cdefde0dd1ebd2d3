# SPDX-License-Identifier: Apache-2.0
"""Helpers that need neither torch nor the C++ core."""

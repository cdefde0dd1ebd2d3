# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way: hooks, the flat buffer, and the engine that runs the plan."""

# SPDX-License-Identifier: Apache-2.0
"""DASO: averages gradients inside a node in each step, parameters between nodes every B steps."""

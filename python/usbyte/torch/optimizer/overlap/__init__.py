# SPDX-License-Identifier: Apache-2.0
"""Deferred updates: each layer of the next forward pass waits for its own parameters only."""

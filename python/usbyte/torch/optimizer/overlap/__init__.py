# SPDX-License-Identifier: Apache-2.0
"""Updates that wait for the next forward pass, each layer for its own parameters."""

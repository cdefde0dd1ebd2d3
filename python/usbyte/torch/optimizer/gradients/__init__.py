# SPDX-License-Identifier: Apache-2.0
"""Path of gradients: autograd hooks, the flat buffer, and the engine that runs the plan."""

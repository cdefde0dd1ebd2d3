# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: reduces gradients by a plan and can defer updates to the next forward."""

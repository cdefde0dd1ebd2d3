# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: reduces gradients by plan, and may update during the next forward."""

"""DistributedOptimizer: reduces gradients by plan, and may update during the next forward."""

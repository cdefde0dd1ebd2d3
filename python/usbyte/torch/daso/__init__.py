"""DASO: ranks of a node average gradients each step, nodes their parameters now and then."""

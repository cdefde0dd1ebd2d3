"""usbyte: gradient communication for PyTorch, planned as a whole.

`import usbyte.torch as ub` is what training scripts use.
"""

__version__ = "0.1.0"

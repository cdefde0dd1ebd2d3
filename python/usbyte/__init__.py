# SPDX-License-Identifier: Apache-2.0
"""usbyte: planned gradient communication for PyTorch.

Training scripts use `import usbyte.torch as ub`.
"""

__version__ = "0.1.0"

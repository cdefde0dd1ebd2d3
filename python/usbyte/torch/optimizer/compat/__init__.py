# SPDX-License-Identifier: Apache-2.0
"""What other libraries' optimizers, wrappers and scalers do that usbyte has to know."""

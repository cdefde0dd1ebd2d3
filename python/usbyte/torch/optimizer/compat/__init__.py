# SPDX-License-Identifier: Apache-2.0
"""What usbyte has to know of other libraries' optimizers, module wrappers and scalers."""

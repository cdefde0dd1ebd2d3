# SPDX-License-Identifier: Apache-2.0
"""The public functions of usbyte.torch."""

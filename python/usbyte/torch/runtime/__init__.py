# SPDX-License-Identifier: Apache-2.0
"""Foundations of usbyte.torch: stores, threads, process groups, devices and message checks."""

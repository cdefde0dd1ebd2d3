"""Foundations of usbyte.torch: stores, threads, process groups, devices and message checks."""

"""The public functions of usbyte.torch."""

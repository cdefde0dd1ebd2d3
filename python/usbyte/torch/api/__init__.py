"""What users import from usbyte.torch."""

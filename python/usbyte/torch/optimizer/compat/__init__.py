"""What other libraries' optimizers, wrappers and scalers do that usbyte has to know."""

"""An emulated cluster on one machine, recorded jobs to replay on it, and what usbyte costs."""

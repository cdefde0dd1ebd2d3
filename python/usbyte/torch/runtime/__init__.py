"""What every other package of usbyte.torch stands on: stores, threads, process groups, devices."""

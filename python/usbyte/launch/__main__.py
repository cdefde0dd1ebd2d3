"""`python -m usbyte.launch` is `usbyterun`."""

from usbyte.launch import main

main()

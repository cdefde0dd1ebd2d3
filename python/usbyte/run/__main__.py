"""`python -m usbyte.run` is `usbyterun`."""

from usbyte.run import main

main()

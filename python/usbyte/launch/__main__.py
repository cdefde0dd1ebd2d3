"""Makes `python -m usbyte.launch` run `usbyterun`."""

from usbyte.launch import main

main()

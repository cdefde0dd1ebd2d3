# SPDX-License-Identifier: Apache-2.0
"""`python -m usbyte` is the command `usbyte`."""

from usbyte.cli import main

if __name__ == "__main__":
    main(prog_name="usbyte")

# SPDX-License-Identifier: Apache-2.0
"""Makes `python -m usbyte.launch` run `usbyterun`."""

from usbyte.launch import main

main()

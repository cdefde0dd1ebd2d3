# SPDX-License-Identifier: Apache-2.0
"""An emulated cluster on one machine, recorded jobs to replay on it, and what usbyte costs."""

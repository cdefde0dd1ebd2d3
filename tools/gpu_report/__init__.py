# SPDX-License-Identifier: Apache-2.0
"""`make gpu-test`: builds from source, tests and measures on a GPU, and writes a report."""

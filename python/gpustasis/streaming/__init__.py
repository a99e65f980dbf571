# SPDX-License-Identifier: Apache-2.0
"""A whole checkpoint as one stream, through a pipe, a socket or a file (docs/format.md)."""

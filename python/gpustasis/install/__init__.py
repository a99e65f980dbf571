# SPDX-License-Identifier: Apache-2.0
"""Setting a host up so that its container runtimes use gpustasis, and undoing that to the byte."""

# SPDX-License-Identifier: Apache-2.0
"""The long fault campaigns: `make soak`."""

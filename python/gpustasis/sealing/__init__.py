# SPDX-License-Identifier: Apache-2.0
"""Sealed checkpoints: all files but the inventory in one encrypted file, and its key in an envelope
for those who may open it. docs/format.md has both files, docs/security.md what they protect.
"""

# SPDX-License-Identifier: Apache-2.0
"""Checkpoint archives of Podman, CRI-O and containerd, read where they lie and trusted in
nothing."""

"""Checkpoint archives of Podman, CRI-O and containerd, read where they lie and trusted in nothing."""

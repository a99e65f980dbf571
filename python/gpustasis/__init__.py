"""Checkpoint and restore GPU workloads, transparently, with CRIU."""

__version__ = "0.1.0"

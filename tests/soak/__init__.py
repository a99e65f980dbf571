"""The long fault campaigns: `make soak`."""

"""GPU images of a checkpoint: what is in them, and whether it is whole."""

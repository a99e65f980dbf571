"""What this machine has and lacks for checkpoint and restore; `cudackpt doctor` prints it."""

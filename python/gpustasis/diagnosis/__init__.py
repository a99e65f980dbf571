"""What this machine has and lacks for checkpoint and restore; `gpustasis doctor` prints it."""

"""A store: a directory whose subdirectories are the checkpoints of a job, and what to keep of it."""

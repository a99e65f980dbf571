# SPDX-License-Identifier: Apache-2.0
"""A job and its supervisor: checkpointed just in time when it is told to end, restored when it is
started again. docs/just-in-time.md.

records      what is kept of a checkpoint, and which job it is of
store        the directory of a job's checkpoints, held by one supervisor
estimate     how long a checkpoint will take
tree         the processes of a job
streams      what a job writes to, which outlives it
dumping      one dump, which ends in time or is broken off
making       the checkpoints of a job, just in time and in between
supervisor   the job's life, from start to end
asking       have a supervisor checkpoint its job
"""

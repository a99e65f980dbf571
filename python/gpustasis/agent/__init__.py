# SPDX-License-Identifier: Apache-2.0
"""`gpustasis agent`: one daemon per node that makes checkpoints on request and at intervals."""

# SPDX-License-Identifier: Apache-2.0
"""Container engines and the kubelet: each asked for a checkpoint in its own way."""

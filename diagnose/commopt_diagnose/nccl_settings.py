"""NCCL's settings that ranks of a job need not have in common."""

import re

OF_ONE_RANK = re.compile(r"NCCL_(HOSTID|\w+_FILE)$")
"""Names of settings that name a host or a file on it."""

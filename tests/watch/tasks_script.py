"""Starts a program as the tasks of a job step on one host, as srun does, and waits for all of them.

Usage: tasks_script.py NUM_TASKS PORT ARGUMENTS_OF_PYTHON...
"""

import os
import subprocess
import sys


def main() -> int:
    """Returns the largest status of a task."""
    num_tasks, port, *arguments = sys.argv[1:]
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": num_tasks,
        "SLURM_NTASKS_PER_NODE": num_tasks,
        "SLURM_STEP_NUM_TASKS": num_tasks,
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **step, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)},
        )
        for number in range(int(num_tasks))
    ]
    return max(abs(task.wait()) for task in reversed(tasks))


if __name__ == "__main__":
    sys.exit(main())

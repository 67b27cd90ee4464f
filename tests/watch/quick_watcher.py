"""A HangMonitor's watcher that looks more often than it would; `healthy_fits` has it started in place of the other."""

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import watcher


def main() -> None:
    """Is the watcher of a rank."""
    for name, seconds in {"HANG_LOOK_S": 0.05, "CONFIRM_S": 0.1, "ASK_AGAIN_S": 0.2}.items():
        assert hasattr(times, name)
        setattr(times, name, seconds)
    watcher.main()


if __name__ == "__main__":
    main()

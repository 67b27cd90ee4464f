"""Finds the Hydra configuration of this package."""

from pathlib import Path


def conf_dir() -> Path:
    """Returns the folder of YAML groups: inside an installed wheel, or at the top of a checkout.

    Raises:
        FileNotFoundError: neither is there, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "conf", package.parent / "conf")
    for folder in candidates:
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"the configuration of {package.name} is neither in {candidates[0]} nor in {candidates[1]}:"
        " reinstall the package"
    )

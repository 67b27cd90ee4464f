"""``python -m lightning_commopt.train`` is ``commopt-train``."""

from lightning_commopt.train.start import main

if __name__ == "__main__":
    main()

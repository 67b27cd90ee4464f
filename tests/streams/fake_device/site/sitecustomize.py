"""Python runs this first in each process of a program that `python -m fake_device` has started."""

from fake_device.everywhere import install

install()

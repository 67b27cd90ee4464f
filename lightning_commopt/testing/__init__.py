"""The laws that every compressor obeys, for the tests of whoever writes one.

::

    from lightning_commopt.testing import LAWS, check_compressor

    def test_mine():
        check_compressor(MyCompressor())
"""

from lightning_commopt.testing.conformance import check_compressor
from lightning_commopt.testing.law import Law
from lightning_commopt.testing.laws import LAWS
from lightning_commopt.testing.sharded_laws import SHARDED_LAWS

__all__ = ["LAWS", "SHARDED_LAWS", "Law", "check_compressor"]

"""Ways to average a gradient bucket over ranks, one algorithm per file.

The imports below are the compressors of this package. Importing their files registers their names.
"""

from lightning_commopt.compressors.all_reduce import AllReduce as AllReduce
from lightning_commopt.compressors.alternating import AlternatingLowRank as AlternatingLowRank
from lightning_commopt.compressors.alternating import AlternatingPowerSGD as AlternatingPowerSGD
from lightning_commopt.compressors.base import Claims as Claims
from lightning_commopt.compressors.base import Compressor as Compressor
from lightning_commopt.compressors.base import Layout as Layout
from lightning_commopt.compressors.base import Rounds as Rounds
from lightning_commopt.compressors.base import State as State
from lightning_commopt.compressors.blockwise import BlockInt4 as BlockInt4
from lightning_commopt.compressors.blockwise import BlockInt8 as BlockInt8
from lightning_commopt.compressors.blockwise import Int4 as Int4
from lightning_commopt.compressors.blockwise import Int8 as Int8
from lightning_commopt.compressors.by_size import BySize as BySize
from lightning_commopt.compressors.cast import Cast as Cast
from lightning_commopt.compressors.configs import compressor_from_config as compressor_from_config
from lightning_commopt.compressors.configs import compressor_to_config as compressor_to_config
from lightning_commopt.compressors.hierarchical import Hierarchical as Hierarchical
from lightning_commopt.compressors.powersgd import LowRank as LowRank
from lightning_commopt.compressors.powersgd import PowerSGD as PowerSGD
from lightning_commopt.compressors.registry import compressor_names as compressor_names
from lightning_commopt.compressors.registry import register_compressor as register_compressor
from lightning_commopt.compressors.sharded import ShardedBf16 as ShardedBf16
from lightning_commopt.compressors.sharded import ShardedInt4 as ShardedInt4
from lightning_commopt.compressors.sharded import ShardedInt8 as ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical as ShardedHierarchical
from lightning_commopt.compressors.shards import ShardedCompressor as ShardedCompressor
from lightning_commopt.compressors.wrappers import AfterSteps as AfterSteps
from lightning_commopt.compressors.wrappers import ErrorFeedback as ErrorFeedback

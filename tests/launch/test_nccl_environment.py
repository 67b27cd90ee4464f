"""Mistakes in NCCL's variables are found, and what is right is left alone."""

import re
from collections.abc import Callable
from pathlib import Path

from lightning_commopt.launch.nccl_variables import find_mistakes, nccl_variables, other_variables

# Misspelt, obsolete and invented names; values that NCCL does not take, or does not strip or expand.
_MISTAKES = """\
NCCL_DEBGU=INFO ; NCCL_DEBUG_SUBSYSTEM=NET ; NCCL_DEBUG_SUBSYSTEMS=NET ; NCCL_ALGORITHM=Ring ; NCCL_ALGOS=Ring ;
NCCL_PROTOCOL=LL ; NCCL_SOCKET_IF_NAME=eth0 ; NCCL_SOCKET_IFNAMES=eth0 ; NCCL_SOCKETIFNAME=eth0 ;
NCCL_SOCK_IFNAME=eth0 ; NCCL_IB_HAC=mlx5_0 ; NCCL_IB_DISABLED=1 ; NCCL_DISABLE_IB=1 ; NCCL_P2P_DISABLED=1 ;
NCCL_DISABLE_P2P=1 ; NCCL_SHM_DISABLED=1 ; NCCL_MIN_CHANNELS=8 ; NCCL_MAX_CHANNELS=8 ; NCCL_NCHANNELS_MIN=8 ;
NCCL_BUFFERSIZE=8388608 ; NCCL_BUFF_SIZE=8388608 ; NCCL_NTHREAD=256 ; NCCL_CROSSNIC=1 ; NCCL_COLLNET_ENABLED=1 ;
NCCL_NVLS_ENABLED=1 ; NCCL_NET_GDR_LEVELS=PHB ; NCCL_TOPOFILE=topo.xml ; NCLL_DEBUG=INFO ; NCC_DEBUG=INFO ;
nccl_debug=INFO ; NCCLDEBUG=INFO ; NCCL_TREE_THRESHOLD=0 ; NCCL_LL_THRESHOLD=0 ; NCCL_SINGLE_RING_THRESHOLD=0 ;
NCCL_IB_CUDA_SUPPORT=1 ; NCCL_IB_GDR_LEVEL=PHB ; NCCL_TIMEOUT=1800 ; NCCL_COMM_TIMEOUT=1800 ; NCCL_LOG_LEVEL=INFO ;
NCCL_IFNAME=eth0 ; NCCL_DEBUG=ALL ; NCCL_ALGO=RNG ; NCCL_PROTO=LL12 ; NCCL_P2P_DISABLE=true ; NCCL_P2P_LEVEL=NVLINK ;
NCCL_NTHREADS=300 ; NCCL_BUFFSIZE=8M ; NCCL_SOCKET_NTHREADS=32 ; NCCL_NVLS_DISABLE=1 ; NCCL_DISABLE_NVLS=0 ;
NCCL_IB_ENABLE=0 ; NCCL_P2P_LEVEL=sys ; NCCL_NET_GDR_LEVEL=sys ; NCCL_NET_MERGE_LEVEL=sys ; NCCL_SOCKET_FAMILY=af_inet ;
NCCL_IB_ADDR_FAMILY=af_inet ; NCCL_P2P_LEVEL=NODE ; NCCL_DEBUG_FILE=~/nccl.txt ; NCCL_TOPO_FILE=~/nccl.txt ;
NCCL_TOPO_DUMP_FILE=~/nccl.txt ; NCCL_SOCKET_IFNAME=eth0, eth1 ; NCCL_SOCKET_IFNAME=eth* ;
NCCL_SOCKET_IFNAME=^lo,^docker ; NCCL_SOCKET_IFNAME==^lo ; NCCL_SOCKET_IFNAME=~lo ; NCCL_IB_HCA==mlx5_0,=mlx5_1 ;
NCCL_IB_HCA=mlx5_[0-3] ; NCCL_ALGO=Ring, Tree ; NCCL_ALGO=allreduces:ring ; NCCL_ALGO=Ring,^Tree ; NCCL_ALGO=ring;tree ;
NCCL_DEBUG_SUBSYS=INIT, NET ; NCCL_DEBUG_SUBSYS=ALL,^CALL ; NCCL_DEBUG_SUBSYS=TUNE ; NCCL_IB_TIMEOUT=22s ;
NCCL_MIN_NRINGS=true
"""
# What NCCL's guide itself gives as examples, and what containers, builds and plugins set.
_RIGHT = """\
NCCL_SOCKET_IFNAME=eth ; NCCL_SOCKET_IFNAME==eth0 ; NCCL_SOCKET_IFNAME==eth0,eth1 ; NCCL_SOCKET_IFNAME=^docker ;
NCCL_SOCKET_IFNAME=^=docker0 ; NCCL_IB_HCA=mlx5 ; NCCL_IB_HCA==mlx5_0:1,mlx5_1:1 ; NCCL_IB_HCA=^=mlx5_3,mlx5_4 ;
NCCL_IB_HCA==mlx5_0:1:0:1 ; NCCL_ALGO=Ring ; NCCL_ALGO=ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring ;
NCCL_ALGO=allreduce:^tree ; NCCL_ALGO=^Tree ; NCCL_ALGO=TREE ; NCCL_ALGO=NVLSTree,PAT ; NCCL_PROTO=LL,LL128,Simple ;
NCCL_PROTO=^LL128 ; NCCL_PROTO=simple ; NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV ; NCCL_DEBUG_SUBSYS=^COLL,NET ;
NCCL_DEBUG_SUBSYS=all ; NCCL_DEBUG_SUBSYS=INIT,GRAPH, ; NCCL_DEBUG_TIMESTAMP_LEVELS=WARN,INFO,TRACE ;
NCCL_DEBUG_TIMESTAMP_LEVELS=^TRACE ; NCCL_DEBUG=VERSION ; NCCL_DEBUG=WARN ; NCCL_DEBUG=info ;
NCCL_DEBUG_FILE=nccl.%h.%p ; NCCL_DEBUG_FILE=stderr ; NCCL_RAS_ADDR=localhost:28028 ; NCCL_RAS_ADDR=[::1]:28028 ;
NCCL_SOCKET_MAGIC=0x1f ; NCCL_IB_GID_INDEX=-1 ; NCCL_IB_TIMEOUT=22 ; NCCL_NET=Socket ; NCCL_CROSS_NIC=2 ;
NCCL_NETDEVS_POLICY=MAX:2 ; NCCL_CTA_POLICY=EFFICIENCY|ZERO ; NCCL_VERSION=2.30.7 ; NCCL_HOME=/usr ;
NCCL_ROOT_DIR=/usr ; NCCL_INCLUDE_DIR=/usr ; NCCL_OFI_TUNER_TYPE=1 ; NCCL_FASTRAK_NUM_FLOWS=2 ; NCCL_TESTS_DEVICE=0 ;
NCCL_P2P_LEVEL=5 ; NCCL_P2P_LEVEL=4 ; NCCL_P2P_LEVEL=NVB ; NCCL_P2P_LEVEL=C2C ; NCCL_P2P_LEVEL= ; NCCL_DEBUG= ;
NCCL_SOCKET_IFNAME= ; NCCL_IB_DISABLE= ; NCCL_NET_GDR_LEVEL= ; NCCL_ALGO= ; NCCL_NVB_DISABLE=1 ;
NCCL_GRAPH_DUMP_FILE=/g.xml ; NCCL_MIN_NRINGS=4 ; NCCL_IB_SL=010 ; NCCL_BLOCKING_WAIT=1 ; NCCL_ASYNC_ERROR_HANDLING=1 ;
NCCL_SET_THREAD_NAME=TRUE ; NCCL_GPUDIRECTTCPX_FORCE_ACK=0 ; NCCL_TUNER_CONFIG_PATH=/t ;
NCCL_DYNAMIC_CHUNK_SIZE=524288 ; NCCL_SHARP_DISABLE=1 ; NCCL_IBEXT_DISABLE=1 ; NCCL_IB_RETRY_CNT=14 ;
NCCL_MY_LAUNCHER=x ; NCCL_ALGO=MSCCL,RING,TREE ; RCCL_DEBUG=INFO ; HCCL_SOCKET_IFNAME=eth0 ; NCCL_INIT_SCRIPT=/s ;
TORCH_NCCL_BLOCKING_WAIT=1 ; PATH=/bin ; NCURSES_NO_UTF8_ACS=1 ; LC_ALL=C
"""


def _settings(table: str) -> list[dict[str, str]]:
    return [dict([case.split("=", 1)]) for case in re.split(r"\s;\s", table.rstrip("\n"))]


def test_a_mistake_is_found_with_what_is_right(golden: Callable[[str, str], None]) -> None:
    """If it fails, a variable without effect stays in a user's scripts."""
    found = []
    for setting in _settings(_MISTAKES):
        (name,) = setting
        (mistake,) = find_mistakes({**setting, "HOME": "/"})
        assert mistake.advice == f"correct or unset {name}"
        found.append(mistake.what)
    golden("nccl_mistakes", "\n".join(found))


def test_what_is_right_is_left_alone() -> None:
    """If it fails, users learn to ignore our warnings."""
    for setting in _settings(_RIGHT):
        assert find_mistakes(setting) == [], setting


def test_the_table() -> None:
    """If it fails, a variable is NCCL's and a plugin's at once, or words that NCCL has are refused."""
    variables = nccl_variables()
    assert len(variables) > 260
    assert not variables.keys() & other_variables()
    for variable in variables.values():
        assert all(map(variable.accepts, variable.choices)), variable
        assert variable.accepts(str(variable.high or 1)) or variable.choices, variable


def test_versions() -> None:
    """If it fails, a variable that this NCCL does not have yet, or does not have any more, passes."""
    assert "before NCCL 2.17" in find_mistakes({"NCCL_NVLS_ENABLE": "1"}, version=(2, 16, 5))[0].what
    assert find_mistakes({"NCCL_TREE_THRESHOLD": "0"}, version=(2, 4, 8)) == []
    settings = {"NCCL_DEBGU": "INFO", "NCCL_TREE_THRESHOLD": "0", "NCCL_NVLS_ENABLE": "1", "NCCL_ALGO": "Rnig"}
    severities = {found.what.split()[0]: found.severity for found in find_mistakes(settings, version=(2, 16, 5))}
    warnings, errors = ("NCCL_NVLS_ENABLE", "NCCL_TREE_THRESHOLD"), ("NCCL_ALGO", "NCCL_DEBGU")
    assert severities == dict.fromkeys(warnings, "warning") | dict.fromkeys(errors, "error")
    spaced = {"NCCL_DEBUG_SUBSYS": "INIT, NET"}
    assert (len(find_mistakes(spaced, version=(2, 27, 3))), find_mistakes(spaced, version=(2, 30, 3))) == (1, [])


def test_what_public_scripts_set() -> None:
    """If it fails, names that clouds and projects set are called misspelt, or their mistakes pass."""
    lines = (Path(__file__).parent / "nccl_environments.tsv").read_text().splitlines()
    assert len(lines) > 150
    for line in lines:
        source, mistaken, names = line.split("\t")
        found = {mistake.what.split()[0] for mistake in find_mistakes(dict.fromkeys(names.split(), ""))}
        assert found == set(mistaken.split()), source


def test_another_word_is_no_misspelling() -> None:
    """If it fails, a variable of a fork is taken for an unlike one of NCCL."""
    assert find_mistakes({"NCCL_NET_DISABLE": "0"}) == []
    assert "did you mean NCCL_NVTX_DISABLE" in find_mistakes({"NCCL_NVXT_DISABLE": "1"})[0].what

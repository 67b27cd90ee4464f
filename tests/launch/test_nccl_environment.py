"""Mistakes in NCCL's variables are found, and what is right is left alone."""

from pathlib import Path

import pytest

from lightning_commopt.launch.nccl_variables import find_mistakes, nccl_variables, other_variables

# What was set, and a word that the message must have.
_MISTAKES = [
    # misspelt names
    ("NCCL_DEBGU", "INFO", "NCCL_DEBUG"),
    ("NCCL_DEBUG_SUBSYSTEM", "NET", "NCCL_DEBUG_SUBSYS"),
    ("NCCL_DEBUG_SUBSYSTEMS", "NET", "NCCL_DEBUG_SUBSYS"),
    ("NCCL_ALGORITHM", "Ring", "mean NCCL_ALGO?"),
    ("NCCL_ALGOS", "Ring", "NCCL_ALGO"),
    ("NCCL_PROTOCOL", "LL", "NCCL_PROTO"),
    ("NCCL_SOCKET_IF_NAME", "eth0", "NCCL_SOCKET_IFNAME"),
    ("NCCL_SOCKET_IFNAMES", "eth0", "NCCL_SOCKET_IFNAME"),
    ("NCCL_SOCKETIFNAME", "eth0", "NCCL_SOCKET_IFNAME"),
    ("NCCL_SOCK_IFNAME", "eth0", "NCCL_SOCKET_IFNAME"),
    ("NCCL_IB_HAC", "mlx5_0", "NCCL_IB_HCA"),
    ("NCCL_IB_DISABLED", "1", "NCCL_IB_DISABLE"),
    ("NCCL_DISABLE_IB", "1", "mean NCCL_IB_DISABLE?"),
    ("NCCL_P2P_DISABLED", "1", "NCCL_P2P_DISABLE"),
    ("NCCL_DISABLE_P2P", "1", "mean NCCL_P2P_DISABLE?"),
    ("NCCL_SHM_DISABLED", "1", "NCCL_SHM_DISABLE"),
    ("NCCL_MIN_CHANNELS", "8", "NCCL_MIN_NCHANNELS"),
    ("NCCL_MAX_CHANNELS", "8", "NCCL_MAX_NCHANNELS"),
    ("NCCL_NCHANNELS_MIN", "8", "mean NCCL_MIN_NCHANNELS?"),
    ("NCCL_BUFFERSIZE", "8388608", "NCCL_BUFFSIZE"),
    ("NCCL_BUFF_SIZE", "8388608", "NCCL_BUFFSIZE"),
    ("NCCL_NTHREAD", "256", "NCCL_NTHREADS"),
    ("NCCL_CROSSNIC", "1", "NCCL_CROSS_NIC"),
    ("NCCL_COLLNET_ENABLED", "1", "NCCL_COLLNET_ENABLE"),
    ("NCCL_NVLS_ENABLED", "1", "NCCL_NVLS_ENABLE"),
    ("NCCL_NET_GDR_LEVELS", "PHB", "NCCL_NET_GDR_LEVEL"),
    ("NCCL_TOPOFILE", "topo.xml", "NCCL_TOPO_FILE"),
    ("NCLL_DEBUG", "INFO", "NCCL_DEBUG"),
    ("NCC_DEBUG", "INFO", "NCCL_DEBUG"),
    ("nccl_debug", "INFO", "NCCL_DEBUG"),
    ("NCCLDEBUG", "INFO", "NCCL_DEBUG"),
    # obsolete
    ("NCCL_TREE_THRESHOLD", "0", "2.5"),
    ("NCCL_LL_THRESHOLD", "0", "2.5"),
    ("NCCL_SINGLE_RING_THRESHOLD", "0", "2.3"),
    ("NCCL_IB_CUDA_SUPPORT", "1", "2.4"),
    ("NCCL_IB_GDR_LEVEL", "PHB", "NCCL_NET_GDR_LEVEL"),
    # never NCCL's
    ("NCCL_TIMEOUT", "1800", "timeout"),
    ("NCCL_COMM_TIMEOUT", "1800", "timeout"),
    ("NCCL_LOG_LEVEL", "INFO", "NCCL_DEBUG"),
    ("NCCL_IFNAME", "eth0", "NCCL_SOCKET_IFNAME"),
    # values
    ("NCCL_DEBUG", "ALL", "INFO"),
    ("NCCL_ALGO", "RNG", "Ring"),
    ("NCCL_PROTO", "LL12", "LL128"),
    ("NCCL_P2P_DISABLE", "true", "0 or 1"),
    ("NCCL_P2P_LEVEL", "NVLINK", "NVL"),
    ("NCCL_NTHREADS", "300", "256"),
    ("NCCL_BUFFSIZE", "8M", "integer"),
    ("NCCL_SOCKET_NTHREADS", "32", "from 1 to 16"),
    # the opposite of a variable
    ("NCCL_NVLS_DISABLE", "1", "mean NCCL_NVLS_ENABLE=0?"),
    ("NCCL_DISABLE_NVLS", "0", "mean NCCL_NVLS_ENABLE=1?"),
    ("NCCL_IB_ENABLE", "0", "mean NCCL_IB_DISABLE=1?"),
    # what NCCL compares exactly, or does not strip or expand
    *[(name, "sys", "in capitals") for name in ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_NET_MERGE_LEVEL")],
    *[(name, "af_inet", "in capitals") for name in ("NCCL_SOCKET_FAMILY", "NCCL_IB_ADDR_FAMILY")],
    ("NCCL_P2P_LEVEL", "NODE", "LOC, NVL"),
    *[(name, "~/nccl.txt", "without ~") for name in ("NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE")],
    *[
        ("NCCL_SOCKET_IFNAME", value, "without spaces")
        for value in ("eth0, eth1", "eth*", "^lo,^docker", "=^lo", "~lo")
    ],
    ("NCCL_IB_HCA", "=mlx5_0,=mlx5_1", "without spaces"),
    ("NCCL_IB_HCA", "mlx5_[0-3]", "without spaces"),
    *[
        ("NCCL_ALGO", value, "COLLECTIVE:LIST")
        for value in ("Ring, Tree", "allreduces:ring", "Ring,^Tree", "ring;tree")
    ],
    *[("NCCL_DEBUG_SUBSYS", value, "without spaces") for value in ("INIT, NET", "ALL,^CALL", "TUNE")],
    ("NCCL_IB_TIMEOUT", "22s", "from 0 to 31"),
    ("NCCL_MIN_NRINGS", "true", "an integer"),  # which no guide has
]

# What NCCL's guide itself gives as examples, and what containers, builds and plugins set.
_RIGHT = [
    *[("NCCL_SOCKET_IFNAME", value) for value in ("eth", "=eth0", "=eth0,eth1", "^docker", "^=docker0")],
    *[("NCCL_IB_HCA", value) for value in ("mlx5", "=mlx5_0:1,mlx5_1:1", "^=mlx5_3,mlx5_4", "=mlx5_0:1:0:1")],
    *[("NCCL_ALGO", value) for value in ("Ring", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring")],
    *[("NCCL_ALGO", value) for value in ("allreduce:^tree", "^Tree", "TREE", "NVLSTree,PAT")],
    *[("NCCL_PROTO", value) for value in ("LL,LL128,Simple", "^LL128", "simple")],
    *[("NCCL_DEBUG_SUBSYS", value) for value in ("INIT,BOOTSTRAP,ENV", "^COLL,NET", "all", "INIT,GRAPH,")],
    *[("NCCL_DEBUG_TIMESTAMP_LEVELS", value) for value in ("WARN,INFO,TRACE", "^TRACE")],
    *[("NCCL_DEBUG", value) for value in ("VERSION", "WARN", "info")],
    *[("NCCL_DEBUG_FILE", value) for value in ("nccl.%h.%p", "stderr")],
    *[("NCCL_RAS_ADDR", value) for value in ("localhost:28028", "[::1]:28028")],
    *[("NCCL_SOCKET_MAGIC", "0x1f"), ("NCCL_IB_GID_INDEX", "-1"), ("NCCL_IB_TIMEOUT", "22"), ("NCCL_NET", "Socket")],
    *[("NCCL_CROSS_NIC", "2"), ("NCCL_NETDEVS_POLICY", "MAX:2"), ("NCCL_CTA_POLICY", "EFFICIENCY|ZERO")],
    *[("NCCL_VERSION", "2.30.7"), ("NCCL_HOME", "/usr"), ("NCCL_ROOT_DIR", "/usr"), ("NCCL_INCLUDE_DIR", "/usr")],
    *[("NCCL_OFI_TUNER_TYPE", "1"), ("NCCL_FASTRAK_NUM_FLOWS", "2"), ("NCCL_TESTS_DEVICE", "0")],
    *[("NCCL_P2P_LEVEL", value) for value in ("5", "4", "NVB", "C2C", "")],
    *[
        (name, "")
        for name in ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_ALGO")
    ],
    *[("NCCL_NVB_DISABLE", "1"), ("NCCL_GRAPH_DUMP_FILE", "/g.xml"), ("NCCL_MIN_NRINGS", "4"), ("NCCL_IB_SL", "010")],
    *[("NCCL_BLOCKING_WAIT", "1"), ("NCCL_ASYNC_ERROR_HANDLING", "1"), ("NCCL_SET_THREAD_NAME", "TRUE")],
    *[("NCCL_GPUDIRECTTCPX_FORCE_ACK", "0"), ("NCCL_TUNER_CONFIG_PATH", "/t"), ("NCCL_DYNAMIC_CHUNK_SIZE", "524288")],
    *[("NCCL_SHARP_DISABLE", "1"), ("NCCL_IBEXT_DISABLE", "1"), ("NCCL_IB_RETRY_CNT", "14"), ("NCCL_MY_LAUNCHER", "x")],
    *[
        ("NCCL_ALGO", "MSCCL,RING,TREE"),
        ("RCCL_DEBUG", "INFO"),
        ("HCCL_SOCKET_IFNAME", "eth0"),
        ("NCCL_INIT_SCRIPT", "/s"),
    ],
    *[("TORCH_NCCL_BLOCKING_WAIT", "1"), ("PATH", "/bin"), ("NCURSES_NO_UTF8_ACS", "1"), ("LC_ALL", "C")],
]


@pytest.mark.parametrize(("name", "value", "meant"), _MISTAKES)
def test_a_mistake_is_found_with_what_is_right(name: str, value: str, meant: str) -> None:
    """If it fails, a variable without effect stays in a user's scripts."""
    (mistake,) = find_mistakes({name: value, "HOME": "/"})
    assert mistake.advice == f"correct or unset {name}"
    assert meant in mistake.what


@pytest.mark.parametrize(("name", "value"), _RIGHT)
def test_what_is_right_is_left_alone(name: str, value: str) -> None:
    """If it fails, users learn to ignore our warnings."""
    assert find_mistakes({name: value}) == []


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

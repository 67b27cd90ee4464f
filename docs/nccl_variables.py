"""Reads NCCL's environment variables from the sources of all its versions, and writes them to the package.

git clone https://github.com/NVIDIA/nccl
python docs/nccl_variables.py nccl [rccl nccl-rdma-sharp-plugins ...]

Further repositories are plugins and forks, whose variables are known and not checked.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "lightning_commopt" / "launch" / "nccl_variables.json"

# How values are compared: what the sources call the functions for, or the user guide says.
LEVELS = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS"]
VALUES: dict[str, dict[str, Any]] = {
    "NCCL_ALGO": {
        "kind": "algorithms",
        "choices": ["Ring", "Tree", "Collnet", "CollnetChain", "CollnetDirect", "NVLS", "NVLSTree", "PAT"],
    },
    "NCCL_PROTO": {"kind": "algorithms", "choices": ["LL", "LL128", "Simple"]},
    "NCCL_DEBUG": {"kind": "choice", "choices": ["VERSION", "WARN", "INFO", "ABORT", "TRACE"]},
    "NCCL_DEBUG_SUBSYS": {
        "kind": "list",
        "choices": [
            *("INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL", "PROXY"),
            *("NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "ALL"),
        ],
    },
    "NCCL_DEBUG_TIMESTAMP_LEVELS": {
        "kind": "list",
        "choices": ["VERSION", "WARN", "INFO", "ABORT", "TRACE", "ALL"],
    },
    "NCCL_P2P_LEVEL": {"kind": "level", "choices": LEVELS},
    "NCCL_NET_GDR_LEVEL": {"kind": "level", "choices": LEVELS, "former_name": "NCCL_IB_GDR_LEVEL"},
    "NCCL_NET_MERGE_LEVEL": {
        "kind": "exact",
        "choices": ["LOC", "PORT", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"],
    },
    "NCCL_SOCKET_FAMILY": {"kind": "exact", "choices": ["AF_INET", "AF_INET6"]},
    "NCCL_IB_ADDR_FAMILY": {"kind": "exact", "choices": ["AF_INET", "AF_INET6"]},
    "NCCL_NET_MERGE_POLICY": {"kind": "choice", "choices": ["ALL", "RAIL"]},
    "NCCL_CHECK_MODE": {"kind": "choice", "choices": ["DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"]},
    "NCCL_LAUNCH_MODE": {"kind": "choice", "choices": ["PARALLEL", "GROUP"]},
    "NCCL_NTHREADS": {"kind": "choice", "choices": ["64", "128", "256", "512"]},
    "NCCL_CGA_CLUSTER_SIZE": {"low": 0, "high": 8},
    "NCCL_SOCKET_NTHREADS": {"low": 1, "high": 16},
    "NCCL_IB_QPS_PER_CONNECTION": {"low": 1, "high": 128},
    "NCCL_IB_TIMEOUT": {"low": 0, "high": 31},
    "NCCL_CTA_POLICY": {"kind": "text"},
}
BOOLEANS = ("NCCL_SET_THREAD_NAME", "NCCL_WARN_ENABLE_DEBUG_INFO", "NCCL_PARAM_DUMP_ALL")
NAMES = re.compile(r"_(IFNAME|HCA)$")
FILES = re.compile(r"_FILE$")
NOT_VARIABLES = re.compile(r"_INITIALIZER$|^NCCL_GRAPH$|^NCCL_GIN_CONNECTION_RAIL$")
# From before the sources were public.
REMOVED = {"NCCL_SINGLE_RING_THRESHOLD": "2.3", "NCCL_CHECKS_DISABLE": "2.3"}

READS = re.compile(r'_PARAM\(\w+,\s*"(?P<integer>[A-Z0-9_]+)"|"(?P<text>NCCL_[A-Z][A-Z0-9_]*)"')


def git(repository: Path, *arguments: str) -> str:
    """Returns what git prints."""
    ran = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    return ran.stdout.decode(errors="replace")


def variables_in(repository: Path, revision: str, folder: str = "") -> dict[str, str]:
    """Returns the kind of each variable that a version reads: "integer" or "text"."""
    patterns = [f"{folder}*.{ending}" for ending in ("cc", "c", "cpp", "h", "hpp", "cu", "cuh")]
    text = git(repository, "grep", "-hE", r'"NCCL_[A-Z]|_PARAM\(', revision, "--", *patterns)
    found: dict[str, str] = {}
    for name in re.findall(r"DEFINE_NCCL_PARAM\(\w+, [^,]+, (NCCL_\w+)", text):
        found[name] = "text"
    for read in READS.finditer(text):
        if read["integer"]:
            found[f"NCCL_{read['integer']}"] = "integer"
        else:
            found.setdefault(read["text"], "text")
    return {name: kind for name, kind in found.items() if not NOT_VARIABLES.search(name)}


def short(tags: list[str], index: int) -> str:
    """Returns a version without its patch number, if it is the first of its minor version."""
    major, minor, patch = re.findall(r"\d+", tags[index])[:3]
    is_first = index == 0 or re.findall(r"\d+", tags[index - 1])[:2] != [major, minor]
    return f"{major}.{minor}" if is_first else f"{major}.{minor}.{patch}"


def facts(name: str, kind: str) -> dict[str, Any]:
    """Returns what a variable accepts."""
    if name in VALUES:
        return {"kind": kind, **VALUES[name]}
    if name in BOOLEANS:
        return {"kind": "choice", "choices": ["0", "1", "T", "F", "TRUE", "FALSE"]}
    if NAMES.search(name):
        return {"kind": "names"}
    if FILES.search(name):
        return {"kind": "file"}
    is_switch = kind == "integer" and re.search(r"_(DISABLE|ENABLE)(_|$)", name)
    return {"kind": "switch" if is_switch or name == "NCCL_P2P_DISABLE" else kind}


def main() -> None:
    """Reads the repositories and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nccl", type=Path, help="a clone of NCCL, with its tags")
    parser.add_argument("others", type=Path, nargs="*", help="clones of plugins and forks")
    arguments = parser.parse_args()
    tags = [tag for tag in git(arguments.nccl, "tag").split() if re.fullmatch(r"v2\.\d+\.\d+-\d", tag)]
    tags.sort(key=lambda tag: [int(number) for number in re.findall(r"\d+", tag)])
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for index, tag in enumerate(tags):
        for name, kind in variables_in(arguments.nccl, tag, "src/").items():
            first.setdefault(name, index)
            last[name] = index
            kinds[name] = kind
    former = {values["former_name"] for values in VALUES.values() if "former_name" in values}
    entries: list[dict[str, Any]] = [
        {"name": name, "kind": "integer", "removed_in": removed} for name, removed in REMOVED.items()
    ]
    for name in kinds.keys() - former:
        entry = {"name": name, **facts(name, kinds[name])}
        if first[name] > 0:
            entry["since"] = short(tags, first[name])
        if last[name] < len(tags) - 1:
            entry["removed_in"] = short(tags, last[name] + 1)
        entries.append(entry)
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in sorted(entries, key=lambda entry: str(entry["name"])))
    repositories = [arguments.nccl, *arguments.others]
    others = {name for repository in repositories for name in variables_in(repository, "HEAD")} - kinds.keys()
    OUTPUT.write_text(f'{{"nccl": [\n{lines}\n], "others": {json.dumps(sorted(others))}}}\n', encoding="utf-8")
    print(f"{len(entries)} variables up to NCCL {tags[-1]}, {len(others)} of others, in {OUTPUT.name}")


if __name__ == "__main__":
    main()

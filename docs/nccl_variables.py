"""Reads facts about NCCL's environment variables from its user guide, and writes them to the package.

git clone https://github.com/NVIDIA/nccl
python docs/nccl_variables.py nccl/docs/userguide/source/env.rst
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "lightning_commopt" / "launch" / "nccl_variables.json"

# What the guide says in sentences, tables or lists of several forms.
CHOICES: dict[str, list[str]] = {
    "NCCL_SOCKET_FAMILY": ["AF_INET", "AF_INET6"],
    "NCCL_IB_ADDR_FAMILY": ["AF_INET", "AF_INET6"],
    "NCCL_DEBUG": ["VERSION", "WARN", "INFO", "TRACE"],
    "NCCL_P2P_LEVEL": ["LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "0", "1", "2", "3", "4"],
    "NCCL_NET_GDR_LEVEL": ["LOC", "PIX", "PXB", "PHB", "SYS", "0", "1", "2", "3", "4"],
    "NCCL_NET_MERGE_LEVEL": ["LOC", "PORT", "PIX", "PXB", "PHB", "SYS"],
    "NCCL_NET_MERGE_POLICY": ["ALL", "RAIL"],
    "NCCL_CHECK_MODE": ["DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"],
    "NCCL_LAUNCH_MODE": ["PARALLEL", "GROUP"],
    "NCCL_NTHREADS": ["64", "128", "256", "512"],
    "NCCL_CROSS_NIC": ["0", "1", "2"],
    "NCCL_NVLS_ENABLE": ["0", "1", "2"],
    "NCCL_MNNVL_ENABLE": ["0", "1", "2"],
    "NCCL_P2P_PXN_LEVEL": ["0", "1", "2"],
    "NCCL_IB_PCI_RELAXED_ORDERING": ["0", "1", "2"],
}
LISTS: dict[str, list[str]] = {
    "NCCL_ALGO": ["Ring", "Tree", "Collnet", "CollnetChain", "CollnetDirect", "NVLS", "NVLSTree", "PAT"],
    "NCCL_PROTO": ["LL", "LL128", "Simple"],
    "NCCL_DEBUG_SUBSYS": [
        *("INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL", "PROXY"),
        *("NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "ALL"),
    ],
    "NCCL_DEBUG_TIMESTAMP_LEVELS": ["VERSION", "WARN", "INFO", "ABORT", "TRACE", "ALL"],
}
SWITCHES = (
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_IGNORE_NET_MISMATCH",
    "NCCL_NET_SHARED_BUFFERS",
    "NCCL_NET_SHARED_COMMS",
)
# Their defaults depend on the version, the GPU or the cloud.
DEPENDS = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_NET_GDR_C2C",
    "NCCL_NET_GDR_READ",
    "NCCL_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
)
TEXTS = re.compile(
    r"_(IFNAME|HCA|RANGE|FILE|PLUGIN|FORMAT|ADDR|POLICY|MAGIC)$|^NCCL_NET$|^NCCL_MNNVL_(UUID|CLIQUE_ID)$"
)
FORMER = re.compile(r"formerly (NCCL_\w+)")


def sections(guide: str) -> list[tuple[str, str, bool]]:
    """Returns the heading and the text of each variable, and whether it stands in the chapter on debugging."""
    lines = guide.splitlines()
    found: list[tuple[str, list[str], bool]] = []
    is_debugging = False
    for number, line in enumerate(lines):
        below = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if below and set(below) == {"="}:
            is_debugging = line.strip() == "Debugging"
        if line.startswith("NCCL_") and below and set(below) == {"-"}:
            found.append((line.strip(), [], is_debugging))
        elif found:
            found[-1][1].append(line)
    return [(heading, "\n".join(text), debugging) for heading, text, debugging in found]


def facts(heading: str, text: str, is_for_debugging: bool) -> dict[str, Any]:
    """Returns what is known of a variable."""
    name = heading.split()[0]
    flat = " ".join(text.split())
    accepted = flat.split("s accepted", 1)[-1] if "s accepted" in flat else flat.split("e accepted", 1)[-1]
    since = re.search(r"\(since (\d[\w.]*)", text)
    gone = re.search(r"removed in (\d[\w.]*)", text)
    deprecated = re.search(r"deprecated in (\d[\w.]*)", text)
    former = FORMER.search(heading)
    found = {
        "name": name,
        **type_of(name, accepted),
        "default": default_of(name, flat),
        "since": since[1].rstrip(".") if since else None,
        "removed_in": gone[1].rstrip(".") if gone else None,
        "deprecated_in": deprecated[1].rstrip(".") if deprecated else None,
        "former_name": former[1] if former else None,
        "is_for_debugging": is_for_debugging,
    }
    return {key: value for key, value in found.items() if value not in (None, False)}


def default_of(name: str, text: str) -> str | None:
    """Returns the one default that the guide names; None if it depends on something."""
    if name in DEPENDS:
        return None
    if marked := re.search(r"\b(\d):? \([Dd]efault\)", text):
        return marked[1]
    named = re.findall(
        r"[Dd]efault(?: value)?(?: used by NCCL)? is (?:``)?\"?(-?\d+\b(?!\.\d)|[A-Z][\w,]+|localhost:\d+)", text
    )
    return named[0] if len(set(named)) == 1 else None


def type_of(name: str, accepted: str) -> dict[str, Any]:
    """Returns the kind of values that a variable takes, and which."""
    if name in CHOICES:
        return {"kind": "choice", "choices": CHOICES[name]}
    if name in LISTS:
        return {"kind": "list", "choices": LISTS[name]}
    if name in SWITCHES:
        return {"kind": "switch"}
    if TEXTS.search(name):
        return {"kind": "text"}
    limits = re.search(r"\b(\d+)(?: to |-| and )(\d+)\b", accepted)
    highest = re.search(r"up to (\d+)(?![\d.])(?! \()", accepted)
    if limits and "version" not in accepted[max(0, limits.start() - 12) : limits.start()]:
        low, high = int(limits[1]), int(limits[2])
        if low < high and (low, high) != (0, 1):
            return {"kind": "integer", "low": low, "high": high}
    looks_like_switch = re.search(r"\b0 or 1\b|to 1 to|set to 1|set to 0|Set to 1|\(0\)|\(1\)", accepted)
    if looks_like_switch and not re.search(r"bytes|larger", accepted):
        return {"kind": "switch"}
    return {"kind": "integer", **({"high": int(highest[1])} if highest and "value" in accepted else {})}


def main() -> None:
    """Reads the guide and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("guide", type=Path, help="env.rst of NCCL's user guide")
    guide = parser.parse_args().guide.read_text(encoding="utf-8")
    variables = [facts(*section) for section in sections(guide)]
    lines = ",\n".join(f"  {json.dumps(variable)}" for variable in sorted(variables, key=lambda each: each["name"]))
    OUTPUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(variables)} variables in {OUTPUT.name}")


if __name__ == "__main__":
    main()

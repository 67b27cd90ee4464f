"""Hydra's groups of ``conf/``, with the YAML of every option."""

from pathlib import Path

_GROUPS = {
    "": "What `commopt-train` runs without an argument.",
    "strategy": "`strategy=NAME`",
    "strategy/comm_hook": "`strategy/comm_hook=NAME`; with options as `strategy.comm_hook.block_size=64`",
    "method": "`method=NAME`",
    "variant": "`variant=NAME`: one option of a plan each, for sweeps",
    "experiment": "`experiment=NAME`: a whole sweep",
    "model": "`model=NAME`",
    "data": "`data=NAME`",
    "trainer": "`trainer=NAME`",
    "callbacks": "`callbacks=NAME`, or several: `callbacks=[default,nvtx]`",
    "logger": "`logger=NAME`",
    "nccl": "`+nccl=NAME`: settings of NCCL",
    "downstream/commopt": "`+commopt=NAME` in a project of your own",
    "downstream/commopt_record": "`+commopt_record=NAME` in a project of your own",
}


def markdown(repository: Path) -> str:
    """Returns a section for each group.

    Raises:
        ValueError: a folder of ``conf/`` is not described here.
    """
    conf = repository / "conf"
    folders = {path.parent.relative_to(conf).as_posix().removeprefix(".") for path in conf.rglob("*.yaml")}
    if folders != {*_GROUPS}:
        raise ValueError(f"config_groups.py and conf/ differ by {sorted(folders ^ {*_GROUPS})}")
    lines = []
    for group, usage in _GROUPS.items():
        lines += [f"## {group.removeprefix('downstream/') or 'train.yaml'}", "", f"{usage.rstrip('.')}.", ""]
        for path in sorted((conf / group).glob("*.yaml")):
            text = path.read_text(encoding="utf-8").rstrip()
            lines += [f'??? note "{path.stem}"', "", "    ```yaml", *(f"    {line}" for line in text.splitlines())]
            lines += ["    ```", ""]
    return "\n".join(lines)

"""How to install the packages of an optional feature. LightServe itself is on no package index."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """For an extra of setup.py: "pip install 'nixl<2,>=1.5'"."""
    try:
        declared = requires("lightserve") or []
    except PackageNotFoundError:  # the modules are on PYTHONPATH only
        declared = []
    is_of_extra = re.compile(rf"extra == ['\"]{extra}['\"]")
    packages = [line.partition(";")[0].strip() for line in declared if is_of_extra.search(line)]
    if not packages:
        return f"pip install -e '.[{extra}]' in the folder of setup.py"
    return "pip install " + " ".join(f"'{package}'" for package in packages)

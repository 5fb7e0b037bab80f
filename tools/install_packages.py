"""Install this project into the environment of this Python, with what trains, develops and documents it: ``install_packages.py``.

By uv where it can be had and succeeds, else by pip, which takes several times as long. uv reads none of pip's settings: indexes,
links, constraints and the certificate are passed on to it, or it would get another build of torch than pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = ("--constraint", "constraints.txt", "--editable", ".[train,dev,docs]")
_PIP = (sys.executable, "-m", "pip")
_OF_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "no-index": "UV_NO_INDEX",
}
"""pip's settings, and the variables by which uv takes them."""
_BY_COMMAS = frozenset({"UV_FIND_LINKS"})


def variables_of(settings: str) -> Mapping[str, str]:
    """The variables for uv by what ``pip config list`` prints, a line ``file.name='value'`` each; those of the environment
    (``:env:.name``) come first.
    """
    lines = [line.partition("=") for line in settings.splitlines() if "=" in line]
    variables: dict[str, str] = {}
    for place, _, quoted in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        name = _OF_UV.get(place.rpartition(".")[2])
        values = quoted.strip().strip("'\"").split()
        if name is not None and values:
            variables[name] = ("," if name in _BY_COMMAS else " ").join(values)
    if "UV_INDEX" in variables:  # as pip, the newest release of all indexes; uv would take the first index that has any
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


def main() -> int:
    settings = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    environ = {**os.environ, **variables_of(settings)}
    got = subprocess.run([*_PIP, "install", "--quiet", "--no-compile", "uv"], capture_output=True, check=False)
    if got.returncode == 0:
        uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable)
        if subprocess.run([*uv, *WANTED], cwd=ROOT, env=environ, check=False).returncode == 0:
            return 0
        print("uv did not install it: pip is tried", file=sys.stderr)
    return subprocess.run([*_PIP, "install", "--quiet", "--no-compile", *WANTED], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

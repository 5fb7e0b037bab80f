"""Find a Chromium for the browser tests, or get one: ``python tools/get_browser.py``.

Looked for, in this order: ``$PPTRACE_BROWSER``, PATH, the usual places, Playwright's own. Where there is none:
``playwright install chromium``, then, as root on Debian, ``apt-get install chromium``. Prints one line with what was found;
exit code 1 and one line on stderr when there is none to be had.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/snap/bin/chromium",
)
_VARIABLE = "PPTRACE_BROWSER"
_DOWNLOAD_S = 120
_INSTALL_S = 600
_VERSION_S = 30

BROWSER_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
"""Arguments for a headless browser that keeps to itself, also as root in a container."""


class NoBrowserError(Exception):
    """No Chromium here; the message is one line that says what to do."""


def find_browser() -> Path:
    """The path of an installed Chromium.

    Raises:
        NoBrowserError: there is none.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if shutil.which(named) is None:
            raise NoBrowserError(f"${_VARIABLE} is {named!r}, which is no program; unset it or name a Chromium")
        return Path(named)
    found = next((path for name in (*_NAMES, *_PLACES) if (path := shutil.which(name))), None) or _playwrights_own()
    if found is None:
        raise NoBrowserError("no Chromium found: run python tools/get_browser.py, or install chromium")
    return Path(found)


def _playwrights_own() -> str | None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def install_browser() -> Path:
    """Get a Chromium, from Playwright or from Debian.

    Raises:
        NoBrowserError: neither can give one.
    """
    tried = []
    for name, commands, seconds in _ways():
        print(f"no Chromium found; trying {name}", file=sys.stderr, flush=True)
        reason = _try_all(commands, seconds)
        if reason is None:
            return find_browser()
        tried.append(f"{name} ({reason})")
    raise NoBrowserError(f"no Chromium, and none to be had: {'; '.join(tried)}; install chromium or google-chrome")


def _ways() -> list[tuple[str, Sequence[Sequence[str]], int]]:
    ways: list[tuple[str, Sequence[Sequence[str]], int]] = [
        ("playwright install", [[sys.executable, "-m", "playwright", "install", "chromium"]], _DOWNLOAD_S)
    ]
    if shutil.which("apt-get") and os.geteuid() == 0:
        apt = [["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]]
        ways.append(("apt-get install", apt, _INSTALL_S))
    return ways


def _try_all(commands: Sequence[Sequence[str]], seconds: int) -> str | None:
    """Run the commands in turn; None when all went well, else why not."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environ, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer in {seconds} s"
        if done.returncode != 0:
            lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            return next((line for line in lines if "rror" in line), lines[-1] if lines else f"exit {done.returncode}")
    return None


def _version(browser: Path) -> str:
    try:
        done = subprocess.run(
            [str(browser), "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    return done.stdout.strip() or "version unknown"


def main() -> int:
    try:
        try:
            browser = find_browser()
        except NoBrowserError:
            if os.environ.get(_VARIABLE):
                raise
            browser = install_browser()
    except NoBrowserError as err:
        print(f"get_browser: {err}", file=sys.stderr)
        return 1
    print(f"browser: {browser} ({_version(browser)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

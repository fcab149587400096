"""Gets what the tests of the page need: Chromium and its driver from Debian, axe-core from npm.

    python -m tools.browser

Installs only what is missing, and only where that needs no password. Exit status 3: it cannot be had here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NODE = Path(__file__).resolve().parents[1] / "tests" / "ui" / "node"
AXE = NODE / "node_modules" / "axe-core" / "axe.min.js"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PACKAGES = ("chromium", "chromium-driver")
_APT = ("apt-get", "--quiet", "--quiet", "-o", "DPkg::Lock::Timeout=300")
NOT_TO_BE_HAD = 3


def browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def driver() -> str | None:
    """The path of its WebDriver."""
    return shutil.which("chromedriver")


def main() -> int:
    """Install what is missing, and say what could not be had."""
    if not (browser() and driver()):
        if not (shutil.which("apt-get") and os.geteuid() == 0):
            print("There is no Chromium with chromedriver here, and no apt-get that may install it.", file=sys.stderr)
            return NOT_TO_BE_HAD
        print(f"installing {' and '.join(_PACKAGES)}", flush=True)
        subprocess.run([*_APT, "update"], check=True, stdout=subprocess.DEVNULL)
        install = [*_APT, "install", "--yes", "--no-install-recommends", *_PACKAGES]
        if subprocess.run([*install, "--simulate"], stdout=subprocess.DEVNULL).returncode:
            print("This system has no packages chromium and chromium-driver.", file=sys.stderr)
            return NOT_TO_BE_HAD
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL, env=quiet)
    if not AXE.exists():
        npm = shutil.which("npm")
        if npm is None:
            print("There is no npm here, with which axe-core is fetched.", file=sys.stderr)
            return NOT_TO_BE_HAD
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(NODE)]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

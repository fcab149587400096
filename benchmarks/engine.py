"""The router against bare vLLM: same model, same settings, same prompts, one run.

    make bench-engine                          all of it
    make bench-engine ARGS="--quick"           does it work; its numbers say little
    make bench-engine ARGS="--json out.json"   the raw data too

The claim: at 1 and at 16 streams the router keeps at least 97 % of bare vLLM's tokens per second and adds at
most 3 ms to the median time to first token. Exit status: 0 it holds, 1 it does not, 2 it was not measured.

Method
- Bare is vLLM's own server with the engine arguments, our defaults and the environment that the resident
  model has in the service (printed). The router is `serve run` of the same file on other ports, with all that
  is in it, the lazy pool too.
- Both are up all the time, but only one is loaded at a time: an idle engine costs next to nothing (measured
  first and printed), while two busy ones on a small machine would measure each other.
- Runs come in pairs, bare and router in one order and in the next round in the other (ABBA), so that a
  machine that becomes slower or faster does so to both. Ratio and difference are taken within each pair, then
  the median over the rounds is judged; the range over the rounds stands beside it.
- Both sides of a pair get the same random prompts and answer lengths, and no prompt ever comes twice to one
  server: neither prefix cache helps. Both must count the same prompt tokens, or the run is void.
- Every answer is checked (see `loadgen`). One wrong answer fails the claim.
- Time to first token leaves out the first answer on each connection, tokens per second does not.

Noise
A column gives what bare vLLM differs from itself between one round and the next. A difference below that is
not a finding. "Other CPU" is what neither server nor client used: where it is more than a tenth of a core,
measure again on a quiet machine. Time to first token at 16 streams waits for the engine's step under way and
so spreads by more than the 3 ms in question: use many rounds (the default ones take about a quarter of an
hour on two cores). CPU per token includes an engine's busy waiting, and the router's what Ray's own processes
use in that time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from benchmarks.loadgen import Ask, Load, LoadError, drive, make_asks
from benchmarks.servers import CpuClock, Server, Servers, StartError
from serve_app.check import read_file
from serve_app.config import ConfigError
from serve_app.model_schema import REPOSITORY

MIN_TOKENS_RATIO = 0.97
MAX_ADDED_TTFT_MS = 3.0
_NOISY_CORES = 0.1
_IDLE_S = 3.0
# Right after its start the service still imports vLLM in the standby host of its pool.
_SETTLED_CORES = {"bare": 0.05, "router": 0.25}
_SETTLE_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One load on one server."""

    side: str  # bare or router
    streams: int
    round: int
    seconds: float
    answers: int
    errors: dict[str, int]
    prompt_tokens: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttfts_ms: list[float]
    gap_ms: float
    worst_gap_ms: float
    cpu_ms_per_token: float
    client_cores: float
    idle_side_cores: float
    other_cores: float


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `requests`: of each stream, by the number of streams; one more opens each."""

    rounds: int
    tokens: int
    prompt_tokens: int
    requests: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """The runs at one number of streams, paired by round."""

    bare: list[Run]
    router: list[Run]

    def values(self, read: Callable[[Run], float]) -> tuple[list[float], list[float]]:
        """One number of each run: bare's and the router's, in the order of the rounds."""
        return [read(run) for run in self.bare], [read(run) for run in self.router]

    def ratios(self, read: Callable[[Run], float]) -> list[float]:
        """Router over bare, for each round."""
        return [router / bare if bare else 0.0 for bare, router in zip(*self.values(read), strict=True)]

    def added(self, read: Callable[[Run], float]) -> list[float]:
        """Router less bare, for each round."""
        return [router - bare for bare, router in zip(*self.values(read), strict=True)]

    def noise(self, read: Callable[[Run], float]) -> float:
        """The median of how much bare differs from itself between one round and the next."""
        bare, _ = self.values(read)
        return statistics.median(abs(b - a) for a, b in itertools.pairwise(bare)) if len(bare) > 1 else 0.0


def main() -> int:
    """Measure, print the report, and say by the exit status whether the claim holds."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        file = read_file(options.config)
        model = file.config.residents[0]
        size = _size(options)
        with Servers() as servers:
            _say(f"starting bare vLLM with {model.id}")
            bare = servers.bare(file.config, model)
            _say(f"starting the service ({options.config})")
            router = servers.service(file)
            clock = CpuClock(bare)
            sides = {"bare": bare, "router": router}
            _warm_up(sides, model.id, size)
            idle = _settle(clock)
            runs = _measure(sides, model.id, size, clock)
    except (ConfigError, StartError, LoadError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; both servers are stopped", file=sys.stderr)
        return 130
    holds = _report(sides, size, idle, runs)
    if options.json:
        data = {
            "idle_cores": idle,
            "size": dataclasses.asdict(size),
            "runs": [dataclasses.asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if holds else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, default=REPOSITORY / "deployments" / "local.yaml", help="deployment file"
    )
    parser.add_argument("--rounds", type=int, default=8, help="pairs of runs at each number of streams (default 8)")
    parser.add_argument("--tokens", type=int, default=32, help="mean length of an answer (default 32)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="about this many (default 64)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="default: 1 16")
    parser.add_argument("--quick", action="store_true", help="two short rounds, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw data here")
    options = parser.parse_args()
    if min(options.rounds, options.tokens - 1, options.prompt_tokens, *options.streams) < 1:
        parser.error("rounds, prompt-tokens and streams must be at least 1, tokens at least 2")
    return options


def _size(options: argparse.Namespace) -> Size:
    if options.quick:
        return Size(
            2,
            min(options.tokens, 24),
            options.prompt_tokens,
            {n: 4 if n == 1 else 2 for n in options.streams},
        )
    requests = {n: max(6, 16 // n) for n in options.streams}
    return Size(options.rounds, options.tokens, options.prompt_tokens, requests)


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def _warm_up(sides: dict[str, Server], model_id: str, size: Size) -> None:
    for streams in size.requests:
        asks = make_asks(2 * streams, streams, prompt_tokens=size.prompt_tokens, tokens=16, seed=("warm", streams))
        for side, server in sides.items():
            _say(f"warming {side} at {streams} streams")
            if errors := uvloop.run(drive(server.url, model_id, asks, streams)).errors:
                raise LoadError(f"{server.name} answers wrongly: {'; '.join(errors)}")


def _settle(clock: CpuClock) -> dict[str, float]:
    """Wait until both servers are idle; the CPU that each uses then, in cores."""
    _say("waiting until both are idle")
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        _, used = clock.cores_while(lambda: time.sleep(_IDLE_S))
        settled = all(used[side] <= limit for side, limit in _SETTLED_CORES.items())
        if settled or time.monotonic() > deadline:
            return used


def _measure(sides: dict[str, Server], model_id: str, size: Size, clock: CpuClock) -> list[Run]:
    runs: list[Run] = []
    for number in range(size.rounds):
        order = ["bare", "router"] if number % 2 == 0 else ["router", "bare"]
        for streams, requests in size.requests.items():
            asks = make_asks(
                streams * (requests + 1),
                streams,
                prompt_tokens=size.prompt_tokens,
                tokens=size.tokens,
                seed=(number, streams),
            )
            for side in order:
                run = _run(side, sides[side], model_id, asks, streams, number, clock)
                runs.append(run)
                _say(
                    f"round {number + 1}/{size.rounds}, {streams} streams, {side}:"
                    f" {run.tokens_per_s:.1f} tokens/s, TTFT {run.ttft_p50_ms:.1f} ms,"
                    f" other CPU {run.other_cores:.2f}"
                )
    return runs


def _run(
    side: str, server: Server, model_id: str, asks: Sequence[Ask], streams: int, number: int, clock: CpuClock
) -> Run:
    load, cores = clock.cores_while(lambda: uvloop.run(drive(server.url, model_id, asks, streams)))
    assert isinstance(load, Load)
    if not load.ttfts_s:
        raise LoadError(f"{server.name} gave no right answer: {load.errors}")
    ttfts_ms = [value * 1000 for value in load.ttfts_s]
    return Run(
        side=side,
        streams=streams,
        round=number,
        seconds=load.wall_s,
        answers=len(load.answers),
        errors=load.errors,
        prompt_tokens=load.prompt_tokens,
        tokens_per_s=load.tokens_per_s,
        ttft_p50_ms=statistics.median(ttfts_ms),
        ttfts_ms=ttfts_ms,
        gap_ms=statistics.median(answer.mean_gap_s for answer in load.answers) * 1000,
        worst_gap_ms=statistics.median(answer.worst_gap_s for answer in load.answers) * 1000,
        cpu_ms_per_token=cores[side] * load.wall_s / load.tokens * 1000,
        client_cores=load.client_cpu,
        idle_side_cores=cores["router" if side == "bare" else "bare"],
        other_cores=cores["other"],
    )


def _report(sides: dict[str, Server], size: Size, idle: dict[str, float], runs: list[Run]) -> bool:
    counts = ", ".join(f"{n} x {requests + 1} at {n} streams" for n, requests in size.requests.items())
    print("## Router against bare vLLM\n")
    print(f"{os.cpu_count()} cores, {platform.machine()}, {time.strftime('%Y-%m-%d %H:%M')}.")
    print(f"{size.rounds} rounds of answers of about {size.tokens} tokens to about {size.prompt_tokens} words;")
    print(f"answers in a run: {counts}.\n")
    for server in sides.values():
        print(f"- {server.name}: `{server.as_typed()}`")
    print(
        f"- both idle, CPU in cores: bare {idle['bare']:.3f}, service with Ray {idle['router']:.3f},"
        f" others {idle['other']:.3f}\n"
    )
    print("| streams | median over rounds | bare | router | router against bare (range) | noise | wanted | |")
    print("|---|---|---|---|---|---|---|---|")
    verdicts = []
    for streams in size.requests:
        pairs = Pairs(*([run for run in runs if run.streams == streams and run.side == side] for side in sides))
        verdicts += _rows(streams, pairs)
    wrong = [f"{run.side}: {what} ({count}x)" for run in runs for what, count in run.errors.items()]
    if uneven := _uneven(runs):
        wrong.append(f"the two sides counted different prompt tokens in rounds {uneven}")
    right, errors = sum(run.answers for run in runs), sum(sum(run.errors.values()) for run in runs)
    print("\nNoise: the median of what bare differs from itself between one round and the next.")
    print(f"Answers: {right} right, {errors} wrong.")
    for line in wrong:
        print(f"- {line}")
    noisy = [run for run in runs if run.other_cores > _NOISY_CORES]
    if noisy:
        print(f"Noisy: others used more than {_NOISY_CORES} cores in {len(noisy)} of {len(runs)} runs.")
    holds = all(verdicts) and not wrong
    print(f"\n**{'PASS' if holds else 'FAIL'}**")
    return holds


def _uneven(runs: list[Run]) -> list[int]:
    """Rounds in which the sides saw different prompts, as far as complete runs tell."""
    seen: dict[tuple[int, int], set[int]] = {}
    for run in runs:
        if not run.errors:
            seen.setdefault((run.round, run.streams), set()).add(run.prompt_tokens)
    return sorted({number for (number, _), counts in seen.items() if len(counts) > 1})


def _rows(streams: int, pairs: Pairs) -> list[bool]:
    """Print the rows of one number of streams; whether each of the two limits is kept."""

    def row(name: str, read: Callable[[Run], float], digits: int, limit: str = "", verdict: bool | None = None) -> None:
        bare, router = (statistics.median(values) for values in pairs.values(read))
        ratios, added = pairs.ratios(read), pairs.added(read)
        against = f"x {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        if name.endswith("ms"):
            span = f"{min(added):+.{digits}f} to {max(added):+.{digits}f}"
            against = f"{statistics.median(added):+.{digits}f} ({span}); {against}"
        word = "" if verdict is None else "PASS" if verdict else "FAIL"
        cells = [streams, name, f"{bare:.{digits}f}", f"{router:.{digits}f}", against]
        cells += [f"± {pairs.noise(read):.{digits}f}", limit, word]
        print("|", " | ".join(map(str, cells)), "|")

    def plain(name: str, read: Callable[[Run], float]) -> None:
        bare, router = (statistics.median(values) for values in pairs.values(read))
        print(f"| {streams} | {name} | {bare:.3f} | {router:.3f} | | | | |")

    fast = statistics.median(pairs.ratios(lambda run: run.tokens_per_s)) >= MIN_TOKENS_RATIO
    quick = statistics.median(pairs.added(lambda run: run.ttft_p50_ms)) <= MAX_ADDED_TTFT_MS
    row("tokens/s", lambda run: run.tokens_per_s, 1, f"≥ x {MIN_TOKENS_RATIO}", fast)
    row("TTFT p50, ms", lambda run: run.ttft_p50_ms, 1, f"≤ +{MAX_ADDED_TTFT_MS:g}", quick)
    row("gap between tokens, ms", lambda run: run.gap_ms, 2)
    row("worst gap of an answer, ms", lambda run: run.worst_gap_ms, 1)
    row("server CPU per token, ms", lambda run: run.cpu_ms_per_token, 2)
    plain("client CPU, cores", lambda run: run.client_cores)
    plain("CPU of the idle side, cores", lambda run: run.idle_side_cores)
    plain("other CPU, cores", lambda run: run.other_cores)
    return [fast, quick]


if __name__ == "__main__":
    sys.exit(main())

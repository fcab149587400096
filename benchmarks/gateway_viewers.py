"""What those who watch `/v1/router/events` cost the requests of a Router: the same load with and without them.

    make bench-gateway ARGS="--viewers 50"            about five minutes
    make bench-gateway ARGS="--viewers 50 --quick"    a minute: does it work?

Runs without and with viewers take turns, in the reverse order every other round, and each pair of neighbours gives one
ratio: what the machine does meanwhile is in both. The median of the ratios is held to the limit. The viewers read all
that they are sent, in a process of their own on the cores of engine and load, and must all be there until the end.
CPU per request is held to it where the gateway is busy: what viewers cost is per second, and is given in cores, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks.closed_loop import Kind
from benchmarks.gateway_report import Result
from benchmarks.loadgen import LoadError, loopback

MOST_CHANGE = 0.03
_START_S = 30.0
_END_S = 10.0
_BYE = b"event: bye\n"

# One load of the router, with or without viewers, whose processes are given.
Run = Callable[[Kind, int, int, list[int]], Result]
# A cell: kind, connections, and what is held to the limit there.
Cell = tuple[Kind, int, Sequence[str]]
FIGURES: dict[str, Callable[[Result], float]] = {
    "CPU ms a request": lambda one: one.gateway_ms,
    "requests/s": lambda one: one.per_s,
    "p50 ms": lambda one: one.p50_ms,
    "TTFT p50 ms": lambda one: one.ttft_p50_ms,
    "first token to end ms": lambda one: one.span_p50_ms,
}


def compare(run: Run, url: str, viewers: int, cells: Sequence[Cell], rounds: int) -> bool:
    """Measure, print what was found, and say whether viewers change nothing that counts."""
    pairs: dict[tuple[str, int], list[tuple[Result, Result]]] = {}
    read = 0
    for number in range(-1, rounds):  # the first is for warmth
        for kind, connections, _ in cells:
            found: dict[bool, Result] = {}
            for watched in (False, True) if number % 2 else (True, False):
                if watched:
                    with watching(url, viewers) as process:
                        found[True] = run(kind, connections, number, [process.pid])
                        read += _events_read(process, viewers)
                else:
                    found[False] = run(kind, connections, number, [])
            if number >= 0:
                pairs.setdefault((kind.name, connections), []).append((found[False], found[True]))
    print(f"\n## {viewers} viewers against none, {rounds} pairs of runs\n")
    print("| request | connections | | without | with | ratio (least to most) | |\n|---|---|---|---|---|---|---|")
    holds = [_row(kind, connections, held, pairs[kind.name, connections]) for kind, connections, held in cells]
    results = [result for cell in pairs.values() for pair in cell for result in pair]
    wrong = {what for result in results for what in result.errors}
    noise = statistics.median(result.other_cores for result in results)
    print(f"\nThe viewers read {read} events. Others used {noise:.3f} cores (median over the runs).")
    for what in sorted(wrong):
        print(f"wrong reply: {what}")
    print(f"\n**{'PASS' if all(holds) and not wrong else 'FAIL'}**: less than {MOST_CHANGE:.0%} worse is wanted")
    return all(holds) and not wrong


def _row(kind: Kind, connections: int, held: Sequence[str], pairs: Sequence[tuple[Result, Result]]) -> bool:
    holds = True
    for name, read in FIGURES.items():
        if name.startswith(("TTFT", "first")) and not kind.stream:
            continue
        ratios = [read(with_them) / read(without) for without, with_them in pairs]
        without, with_them = (statistics.median(read(pair[side]) for pair in pairs) for side in (0, 1))
        passes = name not in held or not worse(name, statistics.median(ratios))
        holds = holds and passes
        verdict = "" if name not in held else "PASS" if passes else "FAIL"
        cells = (kind.name, connections, name, f"{without:.3f}", f"{with_them:.3f}")
        print(
            "|", *(f"{cell} |" for cell in cells),
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | {verdict} |",
        )  # fmt: skip
    cores = [statistics.median(pair[side].gateway_cores for pair in pairs) for side in (0, 1)]
    print(f"| {kind.name} | {connections} | gateway's cores | {cores[0]:.3f} | {cores[1]:.3f} | | |")
    return holds


def worse(figure: str, ratio: float) -> bool:
    """Whether a figure with viewers over the same without them is too much worse; better it may be."""
    return ratio < 1 - MOST_CHANGE if figure == "requests/s" else ratio > 1 + MOST_CHANGE


@contextlib.contextmanager
def watching(url: str, viewers: int) -> Iterator[subprocess.Popen[bytes]]:
    """So many viewers in a process of their own, all of whom have been told how things are."""
    command = [sys.executable, "-m", "benchmarks.gateway_viewers", url, str(viewers)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        if not process.stdout.readline():
            raise LoadError(f"{viewers} viewers could not watch {url}")
        yield process
    finally:
        process.kill()
        process.wait()


def _events_read(process: subprocess.Popen[bytes], viewers: int) -> int:
    """Have them leave; how many events they read. Raises `LoadError` if one of them was sent away."""
    said, _ = process.communicate(b"", timeout=_END_S)
    found = json.loads(said)
    if found["stayed"] != viewers:
        raise LoadError(f"{viewers - found['stayed']} of {viewers} viewers were sent away")
    return int(found["events"])


async def _watch(url: str, viewers: int) -> None:
    """Watch until the end of standard input; says when all are told, and at the end what they got."""
    host, port = loopback(url)
    events = stayed = 0
    told: list[asyncio.Future[None]] = []

    async def view(first: asyncio.Future[None]) -> None:
        nonlocal events, stayed
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /v1/router/events HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % host.encode())
        stayed += 1
        try:
            while (data := await reader.read(1 << 16)) and _BYE not in data:
                events += data.count(b"event: ")
                if b"event: requests\n" in data and not first.done():
                    first.set_result(None)
        finally:
            writer.close()
        stayed -= 1
        if not first.done():
            first.set_exception(LoadError("a viewer was not let in"))

    tasks = []
    for _ in range(viewers):
        told.append(asyncio.get_running_loop().create_future())
        tasks.append(asyncio.create_task(view(told[-1])))
    async with asyncio.timeout(_START_S):
        await asyncio.gather(*told)
    print("all are told", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"events": events, "stayed": stayed}), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


if __name__ == "__main__":
    try:
        asyncio.run(_watch(sys.argv[1], int(sys.argv[2])))
    except LoadError as error:
        sys.exit(str(error))

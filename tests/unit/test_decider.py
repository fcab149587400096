"""serve_app.router.decider: what decisions remember, which headers they see, and when a scorer is asked."""

import hashlib
import logging
from typing import Any

import orjson
import pytest
from judging import CATALOG, TOOLS, WAKE_S, rule, score, talk, tool_loop
from starlette.datastructures import Headers

from serve_app.errors import ApiError
from serve_app.router.decider import Decided, Decider, preferred_wait
from serve_app.router.tokens import TokenCounter
from serve_app.routing.excerpt import Excerpt
from serve_app.routing.facts import Endpoint
from serve_app.routing.lexical import Score
from serve_app.routing.policy import ModelState, policy_of
from serve_app.routing_schema import RoutingSettings
from serve_app.routing_schema import Scorer as ScorerSettings
from serve_app.scoring.guard import Guarded, NotReady

SECRET_HEADERS = ["authorization", "cookie", "x-api-key", "proxy-authorization"]
HARD = score(think=0.95, large=0.95)
EASY = score(think=0.05, large=0.05)


class Scripted:
    """A scorer that answers the same each time, or is not ready."""

    def __init__(self, given: Score | None) -> None:
        self.given = given
        self.asked = 0

    async def start(self) -> None:
        self.given = self.given or EASY

    async def close(self) -> None:
        self.given = None

    async def score(self, excerpt: Excerpt, body: dict[str, Any]) -> Score:
        self.asked += 1
        if self.given is None:
            raise NotReady
        return self.given


def decider(scorer: Scripted | None = None, *, awake: bool = True, **settings: Any) -> Decider:
    """A decider for the catalogue; a scorer of these tests is asked without a cache."""
    made = RoutingSettings.model_validate({"shipped_rules": False, **settings})
    view = {model_id: ModelState(awake or model_id == "large", WAKE_S) for model_id in CATALOG.models}
    guard = Guarded(scorer, ScorerSettings(cache_entries=0)) if scorer else None
    return Decider(policy_of(CATALOG, made), view, guard, TokenCounter("/nowhere"))


async def decide(
    made: Decider, body: object, endpoint: Endpoint = "chat", *, keep: bool = True, **headers: str
) -> Decided:
    """Decide one request, and remember it as the Router does unless it is a preview."""
    decided = await made.decide(
        body, endpoint, Headers({key.replace("_", "-"): value for key, value in headers.items()})
    )
    if keep:
        made.remember(decided)
    return decided


# Memory


async def test_follow_up_inherits_from_the_request_before() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer)
    await decide(made, talk("prove it"))
    scorer.given = EASY
    decision = (await decide(made, talk("prove it", "First, …", "go ahead"))).decision
    assert (decision.thinking, decision.thinking_source) == (True, "sticky")


async def test_tool_loop_keeps_its_mode_over_requests() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer)
    first = await decide(made, talk("what is it worth", tools=TOOLS))
    scorer.given = EASY
    for rounds in (1, 2, 3):
        decision = (await decide(made, tool_loop("what is it worth", rounds=rounds))).decision
        assert (decision.model_id, decision.thinking) == (first.decision.model_id, True)


async def test_preview_is_not_remembered() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer)
    await decide(made, talk("prove it"), keep=False)
    scorer.given = EASY
    assert (await decide(made, talk("prove it", "First, …", "go ahead"))).decision.thinking_source == "scorer"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"authorization": "Bearer one"}, {"authorization": "Bearer two"}),
        ({"x_session_id": "s1"}, {"x_session_id": "s2"}),
        ({"authorization": "Bearer one", "x_session_id": "s"}, {"authorization": "Bearer two", "x_session_id": "s"}),
    ],
)
async def test_conversation_of_another_key_or_session_inherits_nothing(
    first: dict[str, str], then: dict[str, str]
) -> None:
    scorer = Scripted(HARD)
    made = decider(scorer)
    await decide(made, talk("prove it"), **first)
    scorer.given = EASY
    body = talk("prove it", "First, …", "go ahead")
    assert (await decide(made, body, **then)).decision.thinking_source == "scorer"
    assert (await decide(made, body, **first)).decision.thinking_source == "sticky"


async def test_session_holds_conversations_together_whose_opening_is_gone() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer)
    await decide(made, talk("prove it"), x_session_id="s")
    scorer.given = EASY
    decided = await decide(made, talk("Summary: …", "First, …", "go ahead"), x_session_id="s")
    assert decided.decision.thinking_source == "sticky"


async def test_switched_off_nothing_is_remembered() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer, sticky={"enabled": False})
    assert (await decide(made, talk("prove it"))).conversation is None
    scorer.given = EASY
    assert (await decide(made, talk("prove it", "First, …", "go ahead"))).decision.thinking_source == "scorer"


async def test_conversation_stays_with_the_model_that_answered() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer, small_model="small")
    texts = ["word " * 2000]
    assert (await decide(made, talk(*texts))).decision.model_id == "large"
    scorer.given = score(think=0.05, large=0.49)
    decision = (await decide(made, talk(*texts, "done", "and the second?"))).decision
    assert (decision.model_id, decision.model_source) == ("large", "sticky")


# Headers


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("wait=10", 10),
        ("wait=0", 0),
        ("respond-async, wait=10", 10),
        ("wait=10, respond-async", 10),
        ("Wait=10", 10),
        ('wait="10"', 10),
        ("wait = 10", 10),
        ("return=minimal; foo; wait=5", 5),
        ("", None),
        ("respond-async", None),
        ("wait", None),
        ("wait=", None),
        ("wait=soon", None),
        ("wait=-5", None),
        ("await=10", None),
        ("no-wait=10", None),
    ],
)
def test_patience_of_the_client_is_read(header: str, wait_s: float | None) -> None:
    assert preferred_wait(Headers({"prefer": header})) == wait_s


def test_without_the_header_there_is_no_patience() -> None:
    assert preferred_wait(Headers({})) is None


def test_preferences_may_stand_in_several_headers() -> None:
    assert preferred_wait(Headers(raw=[(b"prefer", b"respond-async"), (b"prefer", b"wait=10")])) == 10


async def test_patience_comes_with_the_decision() -> None:
    assert (await decide(decider(), talk("hello"), prefer="wait=7")).wait_s == 7


async def test_rules_may_ask_for_headers() -> None:
    made = decider(rules=[rule(when={"header": {"X-Tier": "^gold$"}}, thinking=True)])
    assert (await decide(made, talk("hello"), x_tier="gold")).decision.thinking_source == "rule"
    assert (await decide(made, talk("hello"), x_tier="old")).decision.thinking_source == "scorer"


@pytest.mark.parametrize("name", [*SECRET_HEADERS, "Authorization", "X-Api-Key"])
async def test_rules_cannot_read_headers_that_hold_secrets(name: str) -> None:
    decided = await decide(decider(), talk("hello"), **{name: "Bearer sk-secret"})
    assert decided.facts.header(name) is None


async def test_other_headers_can_be_read() -> None:
    assert (await decide(decider(), talk("hello"), x_tier="gold")).facts.header("x-tier") == "gold"


@pytest.mark.parametrize("header", ["Bearer sk-1", "bearer sk-1", "Bearer  sk-1 "])
async def test_key_is_known_by_its_fingerprint(header: str) -> None:
    fingerprint = hashlib.sha256(b"sk-1").hexdigest()[:12]
    made = decider(rules=[rule(when={"key": fingerprint}, thinking=True)])
    decided = await decide(made, talk("hello"), authorization=header)
    assert (decided.facts.key, decided.decision.thinking_source) == (fingerprint, "rule")
    other = await decide(made, talk("hello"), authorization="Bearer sk-2")
    assert other.decision.thinking_source == "scorer"


async def test_key_that_lets_a_request_in_is_the_key_that_rules_know() -> None:
    fingerprint = hashlib.sha256(b"sk-1").hexdigest()[:12]
    for other in ("Basic dXNlcg==", "sk-2", ""):
        decided = await decide(decider(), talk("hello"), authorization=other, x_api_key="sk-1")
        assert decided.facts.key == fingerprint


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer "])
async def test_request_without_a_key_has_no_fingerprint(header: str) -> None:
    assert (await decide(decider(), talk("hello"), authorization=header)).facts.key == ""


async def test_nothing_of_the_key_is_in_the_decision() -> None:
    decided = await decide(decider(), talk("hello"), authorization="Bearer sk-secret")
    assert "sk-secret" not in repr(decided.decision) + str(decided.conversation) + decided.facts.key


# Scorer


async def test_scorer_is_asked_only_where_the_decision_is_open() -> None:
    scorer = Scripted(HARD)
    made = decider(scorer, rules=[rule(when={"text": "^sort"}, thinking=False)])
    for body in (talk("hello", mode="thinking"), talk("sort it"), talk("hello", max_tokens=10)):
        await decide(made, body)
    await decide(made, {"prompt": "x", "model": "large"}, "completions")
    assert scorer.asked == 0
    assert (await decide(made, talk("hello"))).decision.score == HARD
    assert scorer.asked == 1


async def test_lexical_score_decides_while_the_scorer_starts() -> None:
    made = decider(Scripted(None))
    score = (await decide(made, talk("hello"))).decision.score
    assert score
    assert score.kind == "lexical"
    await made.start()
    assert (await decide(made, talk("hello"))).decision.score == EASY
    await made.close()
    assert (await decide(made, talk("hello"))).decision.score != EASY


async def test_size_is_the_scorers_too() -> None:
    assert (await decide(decider(Scripted(EASY), small_model="small"), talk("hello"))).decision.model_id == "small"


# The rest


async def test_cold_model_that_would_be_better_is_named() -> None:
    cold = decider(Scripted(EASY), awake=False, small_model="small")
    decided = await decide(cold, talk("hello"))
    assert (decided.decision.model_id, decided.decision.better, cold.warms) == ("large", "small", True)
    assert decided.cold is None, "nobody waits for a smaller model"
    assert not decider(warm=False).warms


@pytest.mark.parametrize("body", [None, [], {}, {"messages": []}, {"messages": "hi"}, {"messages": [{}]}])
async def test_bad_body_is_refused(body: object) -> None:
    with pytest.raises(ApiError) as error:
        await decide(decider(), body)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("endpoint", "body"), [("completions", {"prompt": "x"}), ("embeddings", {"input": "x", "model": "large"})]
)
async def test_other_endpoints_belong_to_no_conversation(endpoint: Endpoint, body: dict[str, Any]) -> None:
    made = decider()
    if endpoint == "embeddings":
        with pytest.raises(ApiError):
            await decide(made, body, endpoint)
        return
    decided = await decide(made, body, endpoint)
    assert (decided.decision.model_id, decided.conversation) == ("large", None)


async def test_body_of_the_client_is_not_changed() -> None:
    body = tool_loop(max_tokens=None, conversation="c", extra_body={"top_k": 1})
    before = orjson.dumps(body)
    await decide(decider(), body)
    assert orjson.dumps(body) == before


async def test_prompt_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await decide(decider(Scripted(None)), talk("patient-4711 " * 4000))
    assert "patient-4711" not in caplog.text


# Shadow mode


async def test_shadow_mode_applies_the_default_and_knows_what_it_would_have_done(tmp_path: Any) -> None:
    shadow = {"enabled": True, "file": str(tmp_path / "shadow.jsonl")}
    made = decider(Scripted(HARD), shadow=shadow, small_model="small", rules=[rule(model="coder")])
    decided = await decide(made, talk("hello"))
    assert (decided.decision.model_id, decided.decision.thinking) == ("large", False)
    assert decided.shadowed
    assert (decided.shadowed.model_id, decided.shadowed.thinking) == ("coder", True)
    assert (decided.cold, made.warms) == (None, False)
    await made.close()
    assert (tmp_path / "shadow.jsonl").read_bytes().count(b"\n") == 1


async def test_shadow_mode_follows_the_client(tmp_path: Any) -> None:
    made = decider(Scripted(HARD), shadow={"enabled": True, "file": str(tmp_path / "s.jsonl")})
    decided = await decide(made, talk("hello", model="coder", mode="thinking"))
    assert (decided.decision.model_id, decided.decision.thinking_source) == ("coder", "mode")
    await made.close()


async def test_shadow_mode_remembers_what_it_would_have_done(tmp_path: Any) -> None:
    scorer = Scripted(HARD)
    made = decider(scorer, shadow={"enabled": True, "file": str(tmp_path / "s.jsonl")})
    await decide(made, talk("prove it"))
    scorer.given = EASY
    decided = await decide(made, talk("prove it", "First, …", "go ahead"))
    assert decided.shadowed
    assert (decided.shadowed.thinking, decided.shadowed.thinking_source) == (True, "sticky")
    assert not decided.decision.thinking
    await made.close()


async def test_preview_in_shadow_mode_leaves_no_record(tmp_path: Any) -> None:
    made = decider(shadow={"enabled": True, "file": str(tmp_path / "s.jsonl")})
    await decide(made, talk("hello"), keep=False)
    await made.close()
    assert not (tmp_path / "s.jsonl").exists() or not (tmp_path / "s.jsonl").read_bytes()

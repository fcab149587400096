"""serve_app.scoring.self_judge: the question shares the request's prefill, and its one token is read as a share."""

import copy
import math
from typing import Any

import pytest
from catalogs import CATALOG, PLAIN
from judging import TOOLS, talk

from serve_app.routing.decide import decide
from serve_app.routing.decision import Setting
from serve_app.routing.excerpt import read_excerpt
from serve_app.routing.facts import read_facts
from serve_app.routing.lexical import shipped_lexicon
from serve_app.routing.outgoing import engine_body
from serve_app.scoring.self_judge import QUESTION, NoVerdict, SelfScorer, share_of_yes


def answer(**chances: float) -> dict[str, Any]:
    """An engine's answer with these probabilities of its first token; `_` in a name stands for a space."""
    alternatives = [
        {"token": token.replace("_", " "), "logprob": math.log(chance)} for token, chance in chances.items()
    ]
    return {"choices": [{"logprobs": {"content": [{"token": "x", "top_logprobs": alternatives}]}}]}


class Asked:
    """Answers every question alike and keeps what was asked."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        return self.given


def question(body: dict[str, Any]) -> dict[str, Any]:
    return SelfScorer("thinker", Asked({})).question(body)


CONVERSATIONS = [
    talk("hello"),
    talk("prove it", "First, …", "go ahead"),
    {
        "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "and now?"},
        ]
    },
    talk("look it up", tools=TOOLS),
    talk("hello", chat_template_kwargs={"custom": 1}),
]


@pytest.mark.parametrize("body", CONVERSATIONS)
def test_question_comes_after_the_very_messages_that_the_engine_will_get(body: dict[str, Any]) -> None:
    facts = read_facts(body, "chat")
    real = engine_body(facts, decide(facts, PLAIN, Setting({})), CATALOG.models["thinker"])
    asked = question(facts.body)
    assert asked["messages"] == [*real["messages"], {"role": "user", "content": QUESTION}]
    assert asked.get("tools") == real.get("tools")


def test_question_costs_one_token_and_shows_its_chances() -> None:
    asked = question(talk("hello", max_tokens=4000, temperature=2, stream=True, n=5, stop=["Y"]))
    assert (asked["max_tokens"], asked["temperature"], asked["logprobs"], asked["top_logprobs"]) == (1, 0, True, 20)
    assert not {"stream", "n", "stop"} & asked.keys()
    assert asked["model"] == "thinker"


def test_question_is_never_thought_about() -> None:
    asked = question(talk("hello", chat_template_kwargs={"enable_thinking": True, "custom": 1}))
    assert asked["chat_template_kwargs"] == {"enable_thinking": False, "custom": 1}


def test_tools_are_seen_but_not_called() -> None:
    assert question(talk("hello", tools=TOOLS, tool_choice="required"))["tool_choice"] == "none"
    assert "tools" not in question(talk("hello", tools=[]))


def test_body_of_the_client_is_not_changed() -> None:
    body = talk("hello", tools=TOOLS, chat_template_kwargs={"custom": 1})
    before = copy.deepcopy(body)
    question(body)["messages"].append("more")
    assert body == before


@pytest.mark.parametrize(
    ("chances", "share"),
    [
        ({"Y": 0.6, "N": 0.2}, 0.75),
        ({"Y": 0.9}, 1.0),
        ({"N": 0.9}, 0.0),
        ({"Y": 0.3, "y": 0.1, "_Y": 0.1, "Yes": 0.1, "N": 0.2, "_no": 0.2}, 0.6),
        ({"Y": 0.01, "N": 0.01, "Well": 0.9}, 0.5),
        ({"Yay": 0.5, "Not": 0.4, "N": 0.1}, 0.0),
    ],
)
def test_share_is_that_of_yes_among_the_verdicts(chances: dict[str, float], share: float) -> None:
    assert share_of_yes(answer(**chances)) == pytest.approx(share)


@pytest.mark.parametrize("chances", [{}, {"Well": 1.0}, {"Yes!": 0.5, "Nope": 0.5}])
def test_neither_letter_is_no_verdict(chances: dict[str, float]) -> None:
    with pytest.raises(NoVerdict):
        share_of_yes(answer(**chances))


def test_letters_of_no_probability_are_no_verdict() -> None:
    given = answer(Y=0.5)
    given["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] = -9999.0
    with pytest.raises(NoVerdict):
        share_of_yes(given)


async def test_score_has_the_models_verdict_and_the_lexical_size() -> None:
    body = talk("Prove that pi is irrational.")
    excerpt = read_excerpt(body["messages"])
    ask = Asked(answer(Y=0.8, N=0.2))
    score = await SelfScorer("thinker", ask).score(excerpt, body)
    words = shipped_lexicon().score(excerpt)
    assert (score.think, score.think_at, score.kind) == (pytest.approx(0.8), 0.5, "self")
    assert (score.large, score.small_below) == (words.large, words.small_below)
    assert len(ask.bodies) == 1


async def test_scorer_without_a_verdict_raises() -> None:
    body = talk("hello")
    with pytest.raises(NoVerdict):
        await SelfScorer("thinker", Asked(answer(Well=1.0))).score(read_excerpt(body["messages"]), body)

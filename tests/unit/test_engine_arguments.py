"""serve_app.engine_arguments: what a deployment file may not ask of an engine; and where engines fetch media from."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from catalogs import chat

from serve_app import engine_arguments
from serve_app.catalog import catalog_of
from serve_app.check import read_file
from serve_app.config import Config, ConfigError, parse_config
from serve_app.engines import vllm
from serve_app.engines.environment import host_environment
from serve_app.errors import ApiError
from serve_app.model_schema import REPOSITORY
from serve_app.routing.decide import decide
from serve_app.routing.decision import Setting
from serve_app.routing.facts import Endpoint, read_facts
from serve_app.routing.policy import ModelState, policy_of
from serve_app.routing_schema import RoutingSettings


def args(**fields: Any) -> dict[str, Any]:
    return {"models": [{"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096, **fields}]}


def complaint(**fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(args(**fields))
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("host", "0.0.0.0", "set by the router"),
        ("uds", "/tmp/s", "set by the router"),
        ("config", "more.yaml", "set by the router"),
        ("ssl_keyfile", "key.pem", "only the router can reach"),
        ("allowed_origins", ["*"], "only the router can reach"),
        ("enable_log_requests", True, "logs"),
        ("enable_log_outputs", True, "logs"),
        ("enable-log-requests", True, "logs"),
        ("middleware", ["evil.Middleware"], "does not check"),
        ("profiler_config", {"profiler": "torch"}, "does not check"),
        ("enable_prompt_embeds", True, "does not check"),
        ("tool_server", "demo", "does not check"),
        ("trust_request_chat_template", True, "does not check"),
        ("allowed_local_media_path", "/", "read files of the node"),
        ("hf_token", "hf_secret", "HF_TOKEN"),
        ("allowed_media_domains", [], "list of host names"),
        ("allowed_media_domains", None, "list of host names"),
        ("allowed_media_domains", "example.org", "list of host names"),
    ],
)
def test_argument_that_opens_the_engine_is_refused_by_its_path_and_without_its_value(
    key: str, value: Any, reason: str
) -> None:
    said = complaint(engine={key: value})
    assert said.startswith(f"models[0].engine.{key}: ")
    assert reason in said
    assert "hf_secret" not in said


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY"])
def test_environment_that_opens_the_engine_is_refused_by_its_path(name: str) -> None:
    assert complaint(engine_env={name: "1"}).startswith(f"models[0].engine_env.{name}: ")


def test_vllm_knows_every_argument_that_is_refused() -> None:
    """Where a new vLLM has renamed one, the table here is out of date."""
    known = set(vllm._options()) | {"model_tag"}
    assert set(engine_arguments._REFUSED) <= known


# The model's own code


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("key", ["trust_remote_code", "trust-remote-code"])
def test_trust_among_the_engines_arguments_is_refused_with_the_place_where_it_belongs(key: str, value: bool) -> None:
    said = complaint(engine={key: value})
    assert said.startswith(f"models[0].engine.{key}: write it beside `engine`")


def test_only_the_model_that_asks_for_it_runs_its_own_code() -> None:
    models = args(trust_remote_code=True)["models"] + [{**args()["models"][0], "id": "other", "tier": "lazy"}]
    config = Config.model_validate({"models": models})
    trusting, other = (config.engine_spec(model) for model in config.models)
    assert vllm.parse_arguments(trusting.source, "hot", trusting.args).trust_remote_code
    assert not vllm.parse_arguments(other.source, "other", other.args).trust_remote_code


def test_adapter_runs_no_code_of_its_own() -> None:
    adapter = {"id": "tuned", "base": "hot", "adapter": "org/tuned", "trust_remote_code": True}
    with pytest.raises(ConfigError, match=r"models\[1\]\.base: .*trust_remote_code"):
        parse_config({"models": [*args()["models"], adapter]})


# Media by URL


def test_engine_fetches_media_from_nowhere_unless_hosts_are_listed() -> None:
    assert vllm.parse_arguments("m", "m", {}).allowed_media_domains == ["media.invalid"]
    listed = vllm.parse_arguments("m", "m", {"allowed_media_domains": ["a.example", "b.example"]})
    assert listed.allowed_media_domains == ["a.example", "b.example"]


@pytest.mark.case(127)
def test_engine_follows_no_redirects_and_opens_nothing_for_developers_whatever_its_node_says() -> None:
    environment = host_environment()
    assert environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert environment["VLLM_SERVER_DEV_MODE"] == "0"


def looked_at(part: dict[str, Any], hosts: list[str] | None = None) -> str:
    """What a chat with this part is refused with, or the model that answers."""
    engine = {"allowed_media_domains": hosts} if hosts else {}
    config = Config.model_validate(args(abilities=["chat", "vision"], engine=engine))
    policy = policy_of(catalog_of(config), RoutingSettings())
    body = chat()
    body["messages"][0]["content"] = [{"type": "text", "text": "What is this?"}, part]
    try:
        return decide(read_facts(body, "chat"), policy, Setting({"hot": ModelState(awake=True)})).model_id
    except ApiError as error:
        return "echoed" if "secret-host" in error.message else f"{error.status} {error.code}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data/"}},
        {"type": "image_url", "image_url": {"url": "https://secret-host.example/a.png"}},
        {"type": "image_url", "image_url": "http://127.0.0.1:8265/"},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "//secret-host/a.png"}},
        {"type": "image_url", "image_url": {"url": "http://[::1"}},
        {"type": "input_image", "image_url": "http://secret-host/"},
        {"type": "audio_url", "audio_url": {"url": "http://secret-host/a.wav"}},
        {"type": "video_url", "video_url": {"url": "ftp://secret-host/a.mp4"}},
        {"type": "image_url", "image_url": {"url": " data:image/png;base64,AAAA"}},
    ],
)
def test_media_from_elsewhere_is_a_400_before_anything_is_fetched(part: dict[str, Any]) -> None:
    assert looked_at(part) == "400 unsupported_content"
    assert looked_at(part, ["good.example"]) == "400 unsupported_content"


FOREIGN = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]
OWN = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("tokenize", lambda parts: {"messages": [{"role": "user", "content": parts}]}, "messages"),
        ("embeddings", lambda parts: {"input": "x", "messages": [{"role": "user", "content": parts}]}, "messages"),
        ("score", lambda parts: {"text_1": "a", "text_2": {"content": parts}}, "text_2"),
        ("score", lambda parts: {"text_1": {"content": parts}, "text_2": ["a", "b"]}, "text_1"),
        ("score", lambda parts: {"queries": ["a"], "items": ["b", {"content": parts}]}, "items"),
        ("score", lambda parts: {"data_1": "a", "data_2": [{"content": parts}]}, "data_2"),
        ("rerank", lambda parts: {"query": {"content": parts}, "documents": ["a"]}, "query"),
        ("rerank", lambda parts: {"query": "a", "documents": ["b", {"content": parts}]}, "documents"),
    ],
)
def test_media_from_elsewhere_is_a_400_wherever_an_engine_would_look_for_them(
    endpoint: Endpoint, body: Callable[[object], dict[str, Any]], field: str
) -> None:
    config = Config.model_validate(args(abilities=["score"] if endpoint in ("score", "rerank") else ["embeddings"]))
    policy = policy_of(catalog_of(config), config.routing)
    decide(read_facts(body(OWN), endpoint), policy, Setting({}))
    with pytest.raises(ApiError) as refused:
        decide(read_facts(body(FOREIGN), endpoint), policy, Setting({}))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "unsupported_content", field)


@pytest.mark.parametrize(
    "odd", [5, None, [[]], [5], {"content": 5}, [{"content": [5, None]}], {}, "x", [{"a": FOREIGN}]]
)
def test_odd_inputs_of_scores_are_left_to_the_engine(odd: object) -> None:
    config = Config.model_validate(args(abilities=["score"]))
    policy = policy_of(catalog_of(config), config.routing)
    for body in ({"query": odd, "documents": odd}, {"text_1": odd, "text_2": odd}):
        assert decide(read_facts(body, "rerank"), policy, Setting({})).model_id == "hot"


def test_media_in_the_responses_api_is_looked_at_too() -> None:
    config = Config.model_validate(args(abilities=["chat", "vision"]))
    image = {"type": "input_image", "image_url": "http://169.254.169.254/"}
    body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}, image]}]}
    with pytest.raises(ApiError) as refused:
        decide(read_facts(body, "responses"), policy_of(catalog_of(config), RoutingSettings()), Setting({}))
    assert refused.value.code == "unsupported_content"


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "DATA:image/png;base64,AAAA"])
def test_media_in_the_request_itself_is_taken(url: str) -> None:
    assert looked_at({"type": "image_url", "image_url": {"url": url}}) == "hot"


def test_media_from_a_listed_host_is_taken_and_from_one_that_looks_like_it_is_not() -> None:
    def from_url(url: str) -> str:
        return looked_at({"type": "image_url", "image_url": {"url": url}}, ["good.example"])

    assert from_url("https://good.example/a.png") == "hot"
    assert from_url("https://GOOD.example:443/a.png") == "hot"
    for url in ("https://good.example.evil.org/", "https://good.example@evil.org/", "https://evil.org/good.example"):
        assert from_url(url) == "400 unsupported_content"


def test_vllm_itself_fetches_nothing_with_what_it_is_told_by_default() -> None:
    from vllm.multimodal.media import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    connector = MediaConnector(allowed_media_domains=vllm.parse_arguments("m", "m", {}).allowed_media_domains)
    with socket.socket() as inner:
        inner.bind(("127.0.0.1", 0))
        inner.listen()
        inner.settimeout(0.2)
        with pytest.raises(ValueError, match="allowed domains"):
            connector.load_from_url(f"http://127.0.0.1:{inner.getsockname()[1]}/", ImageMediaIO())
        with pytest.raises(TimeoutError):
            inner.accept()


def on_the_command_line(engine: dict[str, Any]) -> list[str]:
    """Arguments as people type them after `vllm serve`."""
    words: list[str] = []
    for key, value in engine.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        else:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


# Said in docs/configuration.md, and what the pool decides.
OURS = {*vllm._DEFAULTS, "enable_auto_tool_choice", "enable_sleep_mode", "gpu_memory_utilization"}


@pytest.mark.case(136)
@pytest.mark.parametrize("file", sorted((REPOSITORY / "deployments").glob("*.yaml")), ids=lambda file: file.name)
def test_engines_are_started_as_vllm_serve_would_with_the_same_flags(file: Path) -> None:
    config = read_file(file).config
    for model in [*config.residents, *config.lazy]:
        if model.fake or model.external:
            continue
        spec = config.engine_spec(model)
        ours = vars(vllm.parse_arguments(spec.source, spec.model_id, spec.args))
        flags = ["--model", spec.source, "--served-model-name", model.id, "--max-model-len", str(model.context)]
        theirs = vars(vllm._parser().parse_args(flags + on_the_command_line(model.engine)))
        differing = {key for key in ours if ours[key] != theirs[key]}
        assert differing <= OURS - set(model.engine), model.id

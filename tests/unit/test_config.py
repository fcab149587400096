"""serve_app.config: what is wrong is refused by its path; what is right is complete."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.config import Config, ConfigError, parse_config
from serve_app.model_schema import DEFAULT_EFFORTS, REPOSITORY

THINKS = {"supported": True}
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}


def resident(**fields: Any) -> dict[str, Any]:
    return {"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096, **fields}


def lazy(**fields: Any) -> dict[str, Any]:
    return {"id": "cold", "tier": "lazy", "source": "org/cold", "context": 2048, **fields}


def parsed(*models: dict[str, Any], **sections: Any) -> Config:
    return parse_config({"models": list(models) or [resident()], **sections})


def complaint(*models: Any, **sections: Any) -> str:
    """What `parse_config` says about these models and sections."""
    with pytest.raises(ConfigError) as error:
        parse_config({"models": list(models) or [resident()], **sections})
    return str(error.value)


@pytest.mark.parametrize("args", [None, [], "models: []", 7])
def test_args_that_are_no_mapping_are_refused(args: object) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_config(args)


def test_missing_models_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^models: missing$"):
        parse_config({})


def test_empty_list_of_models_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^models: "):
        parse_config({"models": []})


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"rooter": {}}, "rooter"),
        ({"router": {"prot": 1}}, "router.prot"),
        ({"pool": {"memory": 1}}, "pool.memory"),
        ({"pool": {"resources": {"gpus": 1}}}, "pool.resources.gpus"),
    ],
)
def test_unknown_key_is_refused_by_its_path(args: dict[str, Any], path: str) -> None:
    assert complaint(**args) == f"{path}: no such key"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"contxt": 1}, "models[1].contxt"),
        ({"thinking": {"suported": True}}, "models[1].thinking.suported"),
        ({"sampling": {"plain": {"temprature": 1}}}, "models[1].sampling.plain.temprature"),
    ],
)
def test_unknown_key_of_a_model_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    assert complaint(resident(), lazy(**fields)) == f"{path}: no such key"


def test_unknown_key_of_a_fake_script_is_refused_by_its_path() -> None:
    model = lazy(fake={"speed": 9}) | {"source": ""}
    assert complaint(resident(), model) == "models[1].fake.speed: no such key"


def test_every_wrong_key_is_named_not_only_the_first() -> None:
    lines = complaint(resident(context=1), lazy(tier="warm"), router={"port": 70000}).splitlines()
    assert {line.split(":")[0] for line in lines} == {"router.port", "models[0].context", "models[1].tier"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"id": ""}, "id"),
        ({"id": "two words"}, "id"),
        ({"id": "tab\there"}, "id"),
        ({"id": "auto"}, "id"),
        ({"id": "auto:best"}, "id"),
        ({"id": "x" * 201}, "id"),
        ({"aliases": ["auto"]}, "aliases"),
        ({"aliases": [" padded"]}, "aliases"),
        ({"aliases": [""]}, "aliases[0]"),
        ({"context": 15}, "context"),
        ({"abilities": ["chat", "flying"]}, "abilities[1]"),
        ({"memory_gb": 0}, "memory_gb"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"replicas": 0}, "replicas"),
        ({"sampling": {"thinking": {"top_p": 0}}}, "sampling.thinking.top_p"),
        ({"sampling": {"plain": {"temperature": 3}}}, "sampling.plain.temperature"),
        ({"source": ""}, "source"),
        ({"fake": {}}, "fake"),
        ({"engine": {"max_model_len": 1}}, "engine.max_model_len"),
        ({"engine": {"model": "other"}}, "engine.model"),
        ({"engine": {"port": 1}}, "engine.port"),
        ({"engine": {"api_key": "k"}}, "engine.api_key"),
        ({"thinking": {"default": True}}, "thinking.default"),
        ({"thinking": {"supported": True}}, "engine.reasoning_parser"),
        ({"abilities": ["chat", "tools"]}, "engine.tool_call_parser"),
        ({"abilities": ["chat", "embeddings"]}, "abilities"),
        ({"thinking": {"supported": True, "efforts": {"low": 1}}}, "thinking.efforts"),
        ({"thinking": {"efforts": {**DEFAULT_EFFORTS, "low": -1}}}, "thinking.efforts.low"),
    ],
)
def test_wrong_value_of_a_model_is_named_by_its_path(fields: dict[str, Any], path: str) -> None:
    assert complaint(resident(**fields)).startswith(f"models[0].{path}: ")


@pytest.mark.parametrize(("total_s", "drain_s", "fits"), [(600, 600, True), (601, 600, False), (None, 1, True)])
def test_answer_that_may_take_longer_than_a_replica_drains_is_refused_at_start(
    total_s: float | None, drain_s: float, fits: bool
) -> None:
    """Replicas that an upgrade or a scale-down takes away finish their answers within `drain_s`."""
    models, router = [resident(), resident(id="second", total_timeout_s=total_s)], {"drain_s": drain_s}
    if fits:
        assert parse_config({"models": models, "router": router}).router.drain_s == drain_s
    else:
        assert complaint(*models, router=router) == (
            "models[1].total_timeout_s: 601 is more than router.drain_s: 600;"
            " an upgrade or a scale-down would cut such an answer: raise drain_s"
        )


@pytest.mark.parametrize("size", [float("inf"), float("nan")])
def test_memory_that_is_no_size_is_refused(size: float) -> None:
    assert complaint(resident(), pool={"memory_gb": size}).startswith("pool.memory_gb: ")
    assert complaint(resident(memory_gb=size)).startswith("models[0].memory_gb: ")


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"router": {"port": 0}}, "router.port"),
        ({"router": {"max_body_bytes": 10}}, "router.max_body_bytes"),
        ({"router": {"hold_s": -1}}, "router.hold_s"),
        ({"log_level": "loud"}, "log_level"),
        ({"pool": {"gpu_memory_gb": 0}}, "pool.gpu_memory_gb"),
    ],
)
def test_wrong_value_of_a_section_is_named_by_its_path(section: dict[str, Any], path: str) -> None:
    assert complaint(**section).startswith(f"{path}: ")


def test_a_resident_model_is_required() -> None:
    assert complaint(lazy()).startswith("models: one must have tier: resident")


@pytest.mark.parametrize("other", [lazy(id="hot"), lazy(aliases=["hot"]), lazy(aliases=["nick"]), lazy(id="nick")])
def test_a_name_may_stand_for_one_model_only(other: dict[str, Any]) -> None:
    assert "names more than one model" in complaint(resident(aliases=["nick"]), other)


def test_a_model_may_repeat_its_own_name_among_its_aliases() -> None:
    assert parsed(resident(aliases=["hot", "hot"])).models[0].id == "hot"


def test_lazy_model_larger_than_the_pool_is_refused_by_path_with_both_numbers() -> None:
    text = complaint(resident(), lazy(memory_gb=9), pool={"memory_gb": 8})
    assert text == "models[1].memory_gb: 9 is more than the pool's 8; it could never load"


def test_resident_model_may_be_larger_than_the_pool() -> None:
    assert parsed(resident(memory_gb=80), pool={"memory_gb": 8})


@pytest.mark.parametrize(
    "fields",
    [{"resources": {"num_gpus": 1}}, {"replicas": 2}, {"autoscaling": {"max_replicas": 2}}, {"gpu_memory_gb": 24}],
)
def test_lazy_model_with_resources_of_its_own_is_refused(fields: dict[str, Any]) -> None:
    assert complaint(resident(), lazy(**fields)).startswith("models[1]: resources, gpu_memory_gb, replicas and")


def test_autoscaling_is_instead_of_a_number_of_replicas() -> None:
    both = {"replicas": 2, "autoscaling": {"max_replicas": 3}}
    assert complaint(resident(**both)).startswith("models[0].replicas: is decided by autoscaling")
    assert complaint(pool=both).startswith("pool.replicas: is decided by autoscaling")


@pytest.mark.parametrize(
    ("scaling", "path"),
    [
        ({}, "max_replicas: missing"),
        ({"max_replicas": 0}, "max_replicas: "),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: 2 is less than min_replicas: 3"),
        ({"min_replicas": -1, "max_replicas": 2}, "min_replicas: "),
        ({"max_replicas": 2, "downscale_delay_s": -1}, "downscale_delay_s: "),
    ],
)
def test_wrong_value_of_autoscaling_is_named_by_its_path(scaling: dict[str, Any], path: str) -> None:
    assert complaint(pool={"autoscaling": scaling}).startswith(f"pool.autoscaling.{path}")
    assert complaint(resident(autoscaling=scaling)).startswith(f"models[0].autoscaling.{path}")


def test_the_pool_may_be_empty_and_a_resident_model_may_not() -> None:
    none = {"min_replicas": 0, "max_replicas": 2}
    assert parsed(pool={"autoscaling": none}).pool.autoscaling
    assert complaint(resident(autoscaling=none)).startswith("models[0].autoscaling.min_replicas: ")


def test_the_replicas_that_are_there_from_the_start_are_counted() -> None:
    scaled = resident(id="scaled", autoscaling={"min_replicas": 2, "max_replicas": 5})
    config = parsed(resident(replicas=3), scaled)
    assert [model.least_replicas for model in config.models] == [3, 2]


def test_pool_larger_than_its_gpu_is_refused() -> None:
    assert complaint(pool={"memory_gb": 100, "gpu_memory_gb": 80}).startswith("pool.memory_gb: 100 ")


@pytest.mark.parametrize("name", ["org/model", "qwen3:4b", "a/b:c", "千问", "x:think"])
def test_ids_may_hold_slashes_colons_and_any_script(name: str) -> None:
    assert parsed(resident(id=name)).models[0].id == name


def test_the_defaults_are_safe_on_one_machine() -> None:
    config = parsed()
    assert (config.router.host, config.router.port, config.engine_host) == ("127.0.0.1", 8000, "127.0.0.1")
    assert config.models[0].abilities == ["chat", "completions"]
    assert not config.models[0].thinking.supported


def test_residents_and_lazy_models_keep_the_order_of_the_file() -> None:
    config = parsed(lazy(), resident(), resident(id="second"), lazy(id="frozen"))
    assert [model.id for model in config.residents] == ["hot", "second"]
    assert [model.id for model in config.lazy] == ["cold", "frozen"]


def test_config_survives_the_trip_to_another_process() -> None:
    config = parsed(resident(thinking=THINKS, engine=PARSERS), lazy(sampling={"plain": {"top_k": 20}}))
    assert Config.model_validate(config.model_dump()) == config


def test_engine_sends_its_spans_where_the_router_does_unless_it_says_otherwise() -> None:
    ours, theirs = "http://collector:4318/v1/traces", "http://other:4318/v1/traces"
    config = parsed(
        resident(), lazy(engine={"otlp_traces_endpoint": theirs}, memory_gb=1), telemetry={"otlp_endpoint": ours}
    )
    specs = [config.engine_spec(model) for model in config.models]
    assert [spec.args["otlp_traces_endpoint"] for spec in specs] == [ours, theirs]
    assert specs[0].env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    untraced = parsed(resident())
    assert "otlp_traces_endpoint" not in untraced.engine_spec(untraced.models[0]).args


def test_engine_gets_its_context_and_its_own_arguments() -> None:
    config = parsed(resident(engine={"dtype": "bfloat16"}, engine_env={"A": "1"}, max_ongoing_requests=3))
    spec = config.engine_spec(config.models[0])
    assert (spec.kind, spec.source, spec.max_ongoing, spec.env) == ("vllm", "org/hot", 3, {"A": "1"})
    assert spec.args == {"max_model_len": 4096, "dtype": "bfloat16"}


@pytest.mark.case(74)
def test_lazy_model_gets_its_share_of_the_gpu() -> None:
    config = parsed(resident(), lazy(memory_gb=6), pool={"memory_gb": 60, "gpu_memory_gb": 80})
    assert config.engine_spec(config.models[1]).args["gpu_memory_utilization"] == 0.075
    assert "gpu_memory_utilization" not in config.engine_spec(config.models[0]).args


def test_share_of_the_gpu_that_was_given_is_kept() -> None:
    model = lazy(memory_gb=40, engine={"gpu_memory_utilization": 0.5})
    config = parsed(resident(), model, pool={"memory_gb": 60, "gpu_memory_gb": 80})
    assert config.engine_spec(config.models[1]).args["gpu_memory_utilization"] == 0.5


def test_fake_model_gets_its_script_and_no_source() -> None:
    config = parsed(resident(source="", fake={"tokens": 3}))
    spec = config.engine_spec(config.models[0])
    assert (spec.kind, spec.source, spec.args["tokens"]) == ("fake", "", 3)


def test_source_below_models_dir_is_a_path_and_any_other_is_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    config = parsed(resident(source="here"), lazy(), models_dir=str(tmp_path))
    assert config.engine_spec(config.models[0]).source == str(tmp_path / "here")
    assert config.engine_spec(config.models[1]).source == "org/cold"


def test_relative_path_lies_below_models_dir_wherever_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed(resident(source="./mine"), models_dir=".models")
    assert Path(config.engine_spec(config.models[0]).source) == REPOSITORY / ".models" / "mine"


# Sleep, schedule, operators


@pytest.mark.parametrize(
    "line",
    [
        "",
        "tomorrow",
        "30 8 * *",
        "30 8 * * * * *",
        "60 8 * * *",
        "30 24 * * *",
        "30 8 * * mo",
        "30 8 * * fri-mon",
        "*/0 * * * *",
        "0 0 30 2 *",
        "0 0 */31 * mon#5",
    ],
)
def test_time_that_is_none_is_refused_by_its_path(line: str) -> None:
    text = complaint(resident(), lazy(warm_at=["30 8 * * *", line]))
    assert text.startswith("models[1].warm_at[1]: no cron expression")


@pytest.mark.parametrize("line", ["30 8 * * *", "30 8 * * mon-fri", "*/5 8-18 1,15 * *", "0 0 l * *", "0 0 29 2 *"])
def test_time_that_comes_is_taken(line: str) -> None:
    assert parsed(resident(), lazy(warm_at=[line])).models[1].warm_at == [line]


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "/etc/localtime", "UTC+8", "asia", "Asia"])
def test_zone_that_is_none_is_refused_by_its_path(zone: str) -> None:
    assert complaint(pool={"timezone": zone}) == f"pool.timezone: {zone} is no time zone"


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York"])
def test_zone_is_taken_by_its_name(zone: str) -> None:
    assert parsed(pool={"timezone": zone}).pool.timezone == zone


@pytest.mark.parametrize("fields", [{"preload": True}, {"warm_at": ["30 8 * * *"]}])
def test_resident_model_needs_not_be_loaded_ahead(fields: dict[str, Any]) -> None:
    text = complaint(lazy(), resident(**fields))
    assert text == "models[1]: preload and warm_at are for lazy models; this one is always loaded"


def test_host_memory_for_sleep_needs_gpus() -> None:
    text = complaint(resident(), lazy(), pool={"host_memory_gb": 64})
    assert text == "pool.host_memory_gb: vLLM sleeps on GPUs only, and the pool has none for cold"
    on_gpu = {"host_memory_gb": 64, "resources": {"num_gpus": 1}}
    assert parsed(resident(), lazy(), pool=on_gpu)
    assert parsed(resident(), lazy(fake={}, source=""), pool={"host_memory_gb": 64})
    assert parsed(resident(), lazy(sleep={"level": 0}), pool={"host_memory_gb": 64})


def test_process_that_needs_more_host_memory_than_there_is_is_refused() -> None:
    pool = {"host_memory_gb": 2, "process_gb": 3, "resources": {"num_gpus": 1}}
    assert complaint(resident(), lazy(), pool=pool) == (
        "pool.process_gb: 3 is more than pool.host_memory_gb: 2; nothing could ever load"
    )


@pytest.mark.parametrize(
    ("level", "host_memory_gb", "sleeps"), [(1, 64, True), (2, 64, True), (0, 64, False), (1, None, False)]
)
def test_engine_of_a_model_that_sleeps_is_started_for_it(
    level: int, host_memory_gb: float | None, sleeps: bool
) -> None:
    pool = {"host_memory_gb": host_memory_gb, "resources": {"num_gpus": 1}}
    config = parsed(resident(), lazy(sleep={"level": level, "timeout_s": 7}), pool=pool)
    spec = config.engine_spec(config.models[1])
    assert spec.args.get("enable_sleep_mode", False) is sleeps
    assert spec.steer_timeout_s == 7
    assert "enable_sleep_mode" not in config.engine_spec(config.models[0]).args


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sleep": {"level": 3}}, "sleep.level"),
        ({"sleep": {"host_gb": -1}}, "sleep.host_gb"),
        ({"sleep": {"gpu_gb": -1}}, "sleep.gpu_gb"),
        ({"sleep": {"timeout_s": 0}}, "sleep.timeout_s"),
        ({"sleep": {"depth": 1}}, "sleep.depth"),
        ({"idle_sleep_s": 0}, "idle_sleep_s"),
        ({"expected_wake_s": 0}, "expected_wake_s"),
        ({"warm_at": "30 8 * * *"}, "warm_at"),
    ],
)
def test_wrong_word_about_sleep_is_named_by_its_path(fields: dict[str, Any], path: str) -> None:
    assert complaint(resident(), lazy(**fields)).startswith(f"models[1].{path}: ")


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"pool": {"host_memory_gb": 0}}, "pool.host_memory_gb"),
        ({"pool": {"process_gb": -1}}, "pool.process_gb"),
        ({"pool": {"grace_s": -1}}, "pool.grace_s"),
        ({"router": {"max_held": 0}}, "router.max_held"),
        ({"router": {"max_held_per_model": 0}}, "router.max_held_per_model"),
    ],
)
def test_wrong_limit_is_named_by_its_path(section: dict[str, Any], path: str) -> None:
    assert complaint(**section).startswith(f"{path}: ")


DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@pytest.mark.parametrize("key", ["my-key", "", DIGEST.upper(), DIGEST[:-1], DIGEST + "0", "g" * 64, DIGEST + "\n"])
def test_key_that_is_no_hash_is_refused_and_not_repeated(key: str) -> None:
    text = complaint(security={"keys": [{"id": "a", "sha256": DIGEST}, {"id": "b", "sha256": key}]})
    assert text.startswith("security.keys[1].sha256: ")
    assert not key or key not in text


def test_hashes_of_keys_are_taken() -> None:
    assert parsed(security={"keys": [{"id": "a", "sha256": DIGEST}]}).security.keys[0].sha256 == DIGEST


# Conversations


def test_conversations_are_off_and_in_memory_unless_said() -> None:
    kept = parsed().conversations
    assert (kept.enabled, kept.redis_url) == (False, "")


def test_several_routers_need_redis_for_conversations() -> None:
    text = complaint(router={"replicas": 2}, conversations={"enabled": True})
    assert text.startswith("conversations.redis_url: missing; 2 Routers")
    assert parsed(router={"replicas": 2}, conversations={"enabled": True, "redis_url": "redis://x"})
    assert parsed(router={"replicas": 2})


def test_a_redis_url_is_one_and_is_not_quoted() -> None:
    text = complaint(conversations={"redis_url": "http://:secret@x"})
    assert text.startswith("conversations.redis_url: must begin with redis://")
    assert "secret" not in text


@pytest.mark.parametrize(
    ("field", "value"), [("ttl_s", 0), ("max_tokens", 0), ("max_conversations", 0), ("enabled", "perhaps")]
)
def test_wrong_conversation_settings_are_named(field: str, value: object) -> None:
    assert complaint(conversations={field: value}).startswith(f"conversations.{field}: ")

"""Mistakes in deployment files that YAML, Serve or vLLM pass over in silence: each is refused, by its path and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_check import DEPLOYMENTS, changed
from test_config import complaint, lazy, parsed, resident
from typer.testing import CliRunner

from serve_app.check import problems, warnings
from serve_app.cli import app
from serve_app.config import parse_config
from serve_app.deployment_file import line_of
from serve_app.model_schema import REPOSITORY

GPU = {"resources": {"num_gpus": 1}, "gpu_memory_gb": 80, "memory_gb": 74}


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    return file


# What YAML makes of it


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "    args:\n",
            "    args:\n      models_dir: a\n      models_dir: b\n",
            "applications[0].args.models_dir: stands",
        ),
        ("memory_gb: 48\n", "memory_gb: 48\n          memory_gb: 8\n", "models[4].memory_gb: stands twice, in lines"),
        ("http_options:", "http_options: {port: 1}\nhttp_options:", "http_options: stands twice, in lines"),
    ],
    ids=["args", "model", "document"],
)
def test_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path, old: str, new: str, found: str) -> None:
    text = (REPOSITORY / "deployments" / "prod.yaml").read_text()
    assert old in text
    (problem,) = problems(written(tmp_path, text.replace(old, new, 1)))
    assert found in problem


def test_anchors_and_merges_are_no_double_keys(tmp_path: Path) -> None:
    text = (REPOSITORY / "deployments" / "prod.yaml").read_text()
    document = yaml.safe_load(text)
    models = document["applications"][0]["args"]["models"]
    models[1]["engine"] = models[2]["engine"]  # dumped as an anchor and its alias
    file = written(tmp_path, yaml.safe_dump(document))
    assert "&id" in file.read_text()
    assert problems(file) == []
    merged = "applications:\n- {<<: {name: a}, <<: {route_prefix: /}, import_path: x}\n"
    assert not any("twice" in problem for problem in problems(written(tmp_path, merged)))


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"router": {"replicas": True}}, "router.replicas"),
        ({"router": {"drain_s": False}}, "router.drain_s"),
        ({"router": {"host": False}}, "router.host"),
        ({"pool": {"memory_gb": True}}, "pool.memory_gb"),
        ({"log_level": False}, "log_level"),
    ],
)
def test_a_bare_yes_or_no_is_no_number_and_no_name(section: dict[str, Any], path: str) -> None:
    assert complaint(**section).startswith(f"{path}: must not be true or false (YAML reads yes, no")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"source": "${MODELS}/qwen3"}, "models[0].source"),
        ({"engine": {"tokenizer": "${MODELS}/qwen3"}}, "models[0].engine.tokenizer"),
        ({"engine_env": {"HF_HOME": "${HOME}/hf"}}, "models[0].engine_env.HF_HOME"),
    ],
)
def test_a_variable_that_nobody_fills_in_is_refused(fields: dict[str, Any], path: str) -> None:
    assert complaint(resident(**fields)).startswith(f"{path}: ${{")
    assert complaint(batches={"directory": "${DATA}/batches"}).startswith("batches.directory: ${DATA} stays as it is")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"memory_gb": "8GB"}, "models[0].memory_gb"),
        ({"memory_gb": -1}, "models[0].memory_gb"),
        ({"context": -4096}, "models[0].context"),
        ({"context": "32k"}, "models[0].context"),
        ({"id": 4}, "models[0].id"),
        ({"idle_unload_s": 0}, "models[0].idle_unload_s"),
        ({"aliases": "gpt-4"}, "models[0].aliases"),
        ({"load_timeout_s": ".inf"}, "models[0].load_timeout_s"),
        ({"memory_gb": float("nan")}, "models[0].memory_gb"),
    ],
)
def test_sizes_and_times_that_are_none_are_refused(fields: dict[str, Any], path: str) -> None:
    assert complaint(resident(**fields)).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"security": {"redis_url": "cache:6379"}}, "security.redis_url"),
        ({"telemetry": {"otlp_endpoint": "collector:4318"}}, "telemetry.otlp_endpoint"),
        ({"audit": {"sink": "otlp", "otlp_endpoint": "grpc://collector:4317"}}, "audit.otlp_endpoint"),
    ],
)
def test_an_address_without_its_scheme_is_refused_and_not_quoted(section: dict[str, Any], path: str) -> None:
    said = complaint(**section)
    assert said.startswith(f"{path}: must begin with ")
    assert "cache" not in said
    assert "collector" not in said


def test_numbers_in_quotes_are_numbers() -> None:
    config = parsed(resident(context="4096", memory_gb="1.5"), router={"port": "8123"})
    assert (config.models[0].context, config.models[0].memory_gb, config.router.port) == (4096, 1.5, 8123)


def test_a_path_with_spaces_is_one_path(tmp_path: Path) -> None:
    (tmp_path / "my models" / "qwen 3").mkdir(parents=True)
    config = parsed(resident(source="qwen 3"), models_dir=str(tmp_path / "my models"))
    assert config.engine_spec(config.models[0]).source == str(tmp_path / "my models" / "qwen 3")


# What Serve passes over


@pytest.mark.case(80)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda doc, args: doc["applications"][0].update(import_path="serve_app.app:buidl"),
            "applications: needs exactly one with import_path: serve_app.app:build",
        ),
        (
            lambda doc, args: doc["applications"][0].update(deployments=[{"name": "Router"}, {"name": "Resident"}]),
            "applications[0].deployments[1].name: there is no deployment Resident; there are Router, Resident-",
        ),
        (
            lambda doc, args: doc["applications"].append({"name": "b", "route_prefix": "/", "import_path": "a:b"}),
            "applications: Found duplicate applications for route prefix",
        ),
        (
            lambda doc, args: doc["applications"][0].update(
                deployments=[{"name": "Router", "autoscaling_config": {"max_ongoing_requests": 10}}]
            ),
            "applications[0].deployments[0].autoscaling_config.max_ongoing_requests: no such key",
        ),
        (lambda doc, args: doc["applications"][0].update(route_prefx="/"), "applications[0].route_prefx: no such key"),
        (lambda doc, args: args["router"].update(port=8001), "http_options.port: 8001 is router.port too"),
        (lambda doc, args: doc.pop("http_options"), "http_options.port: 8000 is router.port too"),
    ],
)
def test_what_serve_would_wait_for_for_ever_is_named(tmp_path: Path, change: Any, found: str) -> None:
    assert any(problem.startswith(found) for problem in changed(tmp_path, change)), changed(tmp_path, change)


@pytest.mark.case(80)
def test_check_says_file_line_and_path(tmp_path: Path) -> None:
    text = (REPOSITORY / "deployments" / "prod.yaml").read_text().replace("max_num_seqs: 256", "max_num_seq: 256", 1)
    file = written(tmp_path, text)
    result = CliRunner().invoke(app, ["check", str(file)])
    line = text[: text.index("max_num_seq: 256")].count("\n") + 1
    assert result.exit_code == 1
    assert f"{file}:{line}: models[0].engine.max_num_seq: vLLM has no such argument" in result.output


def test_line_of_what_is_not_there_is_that_of_the_key_above_it(tmp_path: Path) -> None:
    file = written(
        tmp_path, "applications:\n- name: x\n  args:\n    models:\n    - id: a\n      engine:\n        b: 1\n"
    )
    assert line_of(file, "models[0].engine.b: wrong") == 7
    assert line_of(file, "models[0].engine.c: missing") == 6
    assert line_of(file, "models[0].tier: missing") == 5
    assert line_of(file, "applications[0].route_prefix: missing") == 2
    assert line_of(file, "no such file") is None
    assert line_of(tmp_path / "none.yaml", "no such file") is None


# What ends in two engines on one card, or in one that is never full


@pytest.mark.case(74)
@pytest.mark.parametrize(
    ("models", "pool", "found"),
    [
        (
            [lazy(memory_gb=10, engine={"gpu_memory_utilization": 0.3})],
            GPU,
            "models[1].engine.gpu_memory_utilization: 0.3 of gpu_memory_gb: 80 is 24, more than memory_gb: 10",
        ),
        (
            [lazy(memory_gb=10)],
            {**GPU, "resources": {"num_gpus": 0.3}},
            "pool.memory_gb: 74 is more than its share of the GPU: resources.num_gpus: 0.3 of gpu_memory_gb: 80",
        ),
        (
            [lazy()],
            {"resources": {"num_gpus": 0.3}},
            "models[1].engine.gpu_memory_utilization: missing; a replica with num_gpus: 0.3",
        ),
        (
            [lazy(engine={"gpu_memory_utilization": 0.5}), lazy(id="b", engine={"gpu_memory_utilization": 0.3})],
            {"resources": {"num_gpus": 0.3}},
            "models[1].engine.gpu_memory_utilization: 0.5; a replica with num_gpus: 0.3",
        ),
    ],
)
def test_engines_of_one_gpu_that_do_not_fit_on_it_together_are_refused(
    models: list[Any], pool: dict[str, Any], found: str
) -> None:
    assert complaint(resident(), *models, pool=pool).startswith(found)


@pytest.mark.case(74)
def test_hot_and_lazy_engines_that_fit_on_one_gpu_are_taken_and_share_what_is_left() -> None:
    hot = resident(resources={"num_gpus": 0.6}, engine={"gpu_memory_utilization": 0.6})
    config = parsed(
        hot,
        lazy(memory_gb=15),
        lazy(id="b", memory_gb=15),
        pool={"resources": {"num_gpus": 0.4}, "gpu_memory_gb": 80, "memory_gb": 32},
    )
    shares = [config.engine_spec(model).args["gpu_memory_utilization"] for model in config.models]
    assert sum(shares) <= 1
    over = resident(resources={"num_gpus": 0.5}, engine={"gpu_memory_utilization": 0.6})
    assert complaint(over).startswith("models[0].engine.gpu_memory_utilization: 0.6; a replica with num_gpus: 0.5")


@pytest.mark.case(124)
@pytest.mark.parametrize("target", [8, 9])
def test_a_target_that_a_full_replica_does_not_pass_is_refused(target: int) -> None:
    scaling = {"max_replicas": 4, "target_ongoing_requests": target}
    said = complaint(resident(max_ongoing_requests=8, autoscaling=scaling))
    assert said.startswith(f"models[0].autoscaling.target_ongoing_requests: {target} must be less than")
    assert parsed(resident(max_ongoing_requests=8, autoscaling={**scaling, "target_ongoing_requests": 7}))


@pytest.mark.case(70)
@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: file.name)
def test_every_shipped_generating_engine_can_be_filled_and_says_how_far(file: Path) -> None:
    config = parse_config(yaml.safe_load(file.read_text())["applications"][0]["args"])
    for model in config.models:
        if not (model.base or model.fake or model.external):
            assert "max_num_seqs" in model.engine, model.id
            assert model.max_ongoing_requests >= model.engine["max_num_seqs"], model.id


# What is of the right type and still nothing that can be


@pytest.mark.parametrize("host", ["", "http://0.0.0.0", "0.0.0.0:8000", "my host", "10.0.0.256", "*", "host:"])
def test_a_host_that_nobody_can_listen_on_is_refused(host: str) -> None:
    """The empty one is every address to the operating system, and looks like none."""
    assert complaint(router={"host": host}).startswith("router.host: must be an address or a host name alone")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "localhost", "node-3.example.internal"])
def test_a_host_that_can_be_listened_on_is_taken(host: str) -> None:
    assert parsed(router={"host": host}).router.host == host


@pytest.mark.parametrize("host", ["nodes", "0.0.0.0", "::", "Node", ""])
def test_engines_listen_on_the_node_or_on_one_address_that_routers_can_be_told(host: str) -> None:
    assert complaint(engine_host=host).startswith("engine_host: must be `node`, or one address")


@pytest.mark.parametrize("pool", [{}, {"pool": {"resources": {"num_gpus": 1.5}}}])
def test_more_than_one_gpu_is_a_whole_number_of_them(pool: dict[str, Any]) -> None:
    """Ray refuses the actor, and Serve tries it again for ever."""
    model = resident() if pool else resident(resources={"num_gpus": 2.5})
    assert "resources.num_gpus: must be a whole number, or less than 1" in complaint(model, **pool)


def test_a_model_that_can_nothing_is_refused() -> None:
    assert complaint(resident(abilities=[])).startswith("models[0].abilities: ")


@pytest.mark.parametrize("field", ["id", "aliases"])
def test_a_name_that_is_anothers_with_its_thinking_set_is_refused(field: str) -> None:
    """An exact name goes before a profile: what asks the hot model to answer at once would go to the other."""
    other = lazy(**{field: "hot:fast" if field == "id" else ["hot:fast"]})
    assert complaint(resident(), other).startswith("models: hot:fast is what hot is called with its thinking set")
    assert parsed(resident(id="hot:fast"), lazy()).models[0].id == "hot:fast"


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"telemetry": {"otlp_endpoint": "http://collector:4318"}}, "telemetry.otlp_endpoint: has no path"),
        ({"telemetry": {"otlp_endpoint": "http://collector:port/v1/traces"}}, "telemetry.otlp_endpoint: names no host"),
        ({"audit": {"sink": "otlp", "otlp_endpoint": "http://c:4318/"}}, "audit.otlp_endpoint: has no path"),
        ({"security": {"redis_url": "redis://cache:port/0"}}, "security.redis_url: names no host, or no number"),
        ({"security": {"redis_url": "redis:///0"}}, "security.redis_url: names no host"),
        ({"security": {"redis_url": "redis://cache/rates"}}, "security.redis_url: must end in the number"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(section: dict[str, Any], path: str) -> None:
    assert complaint(**section).startswith(path)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("max_num_seqs: 256", "max_num_seqs: 0256", "max_num_seqs: YAML reads 0256 as 174; write that"),
        ("drain_s: 600", "drain_s: 10:00", "router.drain_s: YAML reads 10:00 as 600; write that"),
    ],
)
def test_a_number_that_yaml_reads_as_another_is_refused(tmp_path: Path, old: str, new: str, found: str) -> None:
    text = (REPOSITORY / "deployments" / "prod.yaml").read_text()
    (problem,) = problems(written(tmp_path, text.replace(old, new, 1)))
    assert found in problem


@pytest.mark.parametrize("text", ["applications: &a\n- *a\n", "a: " + "[" * 5000 + "]" * 5000])
def test_yaml_without_an_end_is_told_and_no_traceback(tmp_path: Path, text: str) -> None:
    assert len(problems(written(tmp_path, text))) == 1


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization: Input should be less than or equal to 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: Input should be greater than or equal to 1"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size: argument"),
        ({"max_num_seqs": 0}, "max_num_seqs: Input should be greater than or equal to 1"),
        ({"max_num_batched_tokens": 64}, "max_num_seqs: max_num_batched_tokens (64) must be greater than or equal"),
        ({"quantization": "awqq"}, "quantization: vLLM has no awqq; it has awq, "),
        ({"chat_template": "/none/chat.jinja"}, "chat_template: The supplied chat template"),
        ({"hf_overrides": {"rope_parameters": "yarn"}}, "hf_overrides.rope_parameters: must be a mapping"),
        ({"hf_overrides": {"rope_parameters": {"factor": "four"}}}, "hf_overrides.rope_parameters.factor: must be a"),
    ],
)
def test_values_that_no_engine_starts_with_are_found_before_one_does(
    tmp_path: Path, engine: dict[str, Any], found: str
) -> None:
    told = changed(tmp_path, lambda doc, args: args["models"][0]["engine"].update(engine))
    assert len(told) == 1
    assert told[0].startswith(f"models[0].engine.{found}"), told


@pytest.mark.parametrize("source", ["https://huggingface.co/Qwen/Qwen3-14B", "Qwen/Qwen3 14B", "a/b/c", "Qwen/Qwen3/"])
def test_a_source_that_is_neither_a_directory_nor_a_hub_id_is_refused(tmp_path: Path, source: str) -> None:
    (told,) = changed(tmp_path, lambda doc, args: args["models"][0].update(source=source))
    assert told.startswith(f"models[0].source: {source} is neither a directory below models_dir nor a hub id")


def test_a_directory_that_is_not_here_is_a_warning(tmp_path: Path) -> None:
    """Another machine may have it."""
    assert changed(tmp_path, lambda doc, args: args["models"][0].update(source="/none/qwen3")) == []
    assert warnings(tmp_path / "changed.yaml") == ["models[0].source: /none/qwen3 is not on this machine"]


def test_seconds_that_look_like_milliseconds_are_a_warning(tmp_path: Path) -> None:
    assert changed(tmp_path, lambda doc, args: args["router"].update(hold_s=120_000)) == []
    assert warnings(tmp_path / "changed.yaml") == ["router.hold_s: 120000 s are 1.4 days; times are in seconds"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda app: app.update(deployments=[{"name": "Router", "graceful_shutdown_timeout_s": 20}]),
            "applications[0].deployments[0].graceful_shutdown_timeout_s: 20 is less than router.drain_s: 600",
        ),
        (
            lambda app: app.update(runtime_env={"env_vars": {"VLLM_USE_V1": 1}}),
            "applications[0].runtime_env.env_vars.VLLM_USE_V1: must be a text; put it in quotes",
        ),
    ],
)
def test_what_serve_would_take_and_regret_is_named(tmp_path: Path, change: Any, found: str) -> None:
    (told,) = changed(tmp_path, lambda doc, args: change(doc["applications"][0]))
    assert told.startswith(found)


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"])
def test_a_secret_for_an_engine_is_refused_and_not_quoted(name: str) -> None:
    """Ray's dashboard shows the configuration."""
    said = complaint(resident(engine_env={name: "hf_xyzzy"}))
    assert said.startswith(f"models[0].engine_env.{name}: a secret does not belong here")
    assert "xyzzy" not in said


def test_variables_that_only_sound_like_secrets_are_taken() -> None:
    assert parsed(resident(engine_env={"TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_KVCACHE_SPACE": "4"}))


def _app(doc: Any) -> Any:
    return doc["applications"][0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda doc, args: args["models"][0].update(id={"a": 1}), "models[0].id: "),
        (lambda doc, args: args["models"][1].update(base={"a": 1}), "models[1].base: "),
        (lambda doc, args: _app(doc).update(deployments=-1), "applications[0].deployments: "),
        (lambda doc, args: _app(doc).update(deployments=[1.5]), "applications: is not of the form"),
        (lambda doc, args: _app(doc).update(deployments=[{"name": [1]}]), "applications[0].deployments[0].name: "),
        (lambda doc, args: _app(doc).update(runtime_env=-1), "applications[0].runtime_env: "),
        (lambda doc, args: _app(doc).update(runtime_env={"env_vars": True}), "applications[0].runtime_env"),
        (lambda doc, args: doc.update(http_options=7), "http_options: "),
    ],
)
def test_what_is_of_another_type_is_named_and_is_no_traceback(tmp_path: Path, change: Any, found: str) -> None:
    told = changed(tmp_path, change)
    assert told[0].startswith(found), told


def test_wrong_types_of_serves_hide_nothing_of_ours(tmp_path: Path) -> None:
    def both(doc: Any, args: Any) -> None:
        doc["http_options"] = 7
        args["router"]["prot"] = 1

    told = changed(tmp_path, both)
    assert [problem.partition(":")[0] for problem in told] == ["http_options", "router.prot"]


def test_an_argument_of_null_is_as_one_left_out(tmp_path: Path) -> None:
    null = {"gpu_memory_utilization": None, "tensor_parallel_size": None, "kv_cache_dtype": None}
    assert changed(tmp_path, lambda doc, args: args["models"][0]["engine"].update(null)) == []


def test_autoscaling_of_replicas_that_take_one_request_each_is_refused() -> None:
    """Nothing is in flight beyond what is running, so that no replica would ever seem too few."""
    said = complaint(resident(max_ongoing_requests=1, autoscaling={"max_replicas": 4}))
    assert said.startswith("models[0].max_ongoing_requests: 1 leaves autoscaling nothing to go by")

"""`user_config` over `args`: what it changes, and that what it cannot change is refused by its path."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.check import problems, read_file
from serve_app.config import ConfigError, parse_config
from serve_app.live import with_live
from serve_app.residency.events import LazyModel, Limits, Load, Loaded, Order, Ordered, Unload, Unloaded, Wanted
from serve_app.residency.policy import Residency

FAKE = {"context": 1024, "fake": {}}
HOT = {"id": "hot", "tier": "resident", **FAKE}
COLD = {"id": "cold", "tier": "lazy", **FAKE}
ARGS = parse_config({"models": [HOT], "pool": {}, "router": {"hold_s": 7}}).model_dump()
RULE = {"name": "poems", "when": {"text": ["poem"]}, "then": {"model": "cold"}}


def test_nothing_live_is_the_configuration_of_args() -> None:
    assert with_live(ARGS, {}) == with_live(ARGS, None) == parse_config(ARGS)


def test_sections_are_merged_key_by_key() -> None:
    config = with_live(ARGS, {"router": {"max_held": 3}})
    assert (config.router.max_held, config.router.hold_s) == (3, 7)


def test_a_lazy_model_comes_with_rules_and_keys_that_name_it() -> None:
    key = {"id": "k", "sha256": "a" * 64, "models": ["cold"]}
    config = with_live(ARGS, {"models": [COLD], "routing": {"rules": [RULE]}, "security": {"keys": [key]}})
    assert [model.id for model in config.lazy] == ["cold"]


def test_limits_of_a_resident_model_change_and_its_engine_stays() -> None:
    before = parse_config(ARGS)
    after = with_live(ARGS, {"models": [{"id": "hot", "queue": {"size": 2}, "max_prompt_tokens": 9}]})
    assert after.residents[0].queue.size == 2
    assert after.engine_spec(after.residents[0]) == before.engine_spec(before.residents[0])


@pytest.mark.parametrize(
    ("live", "said"),
    [
        ([], "user_config: must be a mapping"),
        ({"pool": {}}, "user_config.pool: cannot change without a restart; it belongs into args"),
        ({"router": {"port": 1}}, "user_config.router.port: cannot change without a restart; it belongs into args"),
        ({"router": {"hold_s": -1}}, "user_config.router.hold_s: "),
        ({"routing": {"rules": [RULE]}}, "user_config.routing.rules[0].then.model: cold"),
        ({"models": {}}, "user_config.models: must be a list"),
        ({"models": [{}]}, "user_config.models[0].id: missing"),
        ({"models": [{**COLD, "context": 1}]}, "user_config.models[0].context: "),
        ({"models": [COLD, COLD]}, "models: cold names more than one model"),
        ({"models": [{"id": "hot", "context": 9}]}, "user_config.models[0].context: of a resident model"),
        ({"models": [{**HOT, "id": "new"}]}, "user_config.models[0].tier: only lazy models can come"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(live: object, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        with_live(ARGS, live)
    assert said in str(raised.value)


def write(tmp_path: Path, args: dict[str, Any], live: dict[str, object]) -> Path:
    deployments = [{"name": name, "user_config": found} for name, found in live.items()]
    application = {
        "name": "switchyard",
        "import_path": "serve_app.app:build",
        "args": {"router": {"port": 8100}, **args},
        "deployments": deployments,
    }
    file = tmp_path / "live.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    return file


def test_check_reads_what_applies_once_the_file_is_deployed(tmp_path: Path) -> None:
    live = {"models": [COLD]}
    file = write(tmp_path, {"models": [HOT], "pool": {}}, {"Router": live, "LazyPool": live})
    assert problems(file) == []
    assert [model.id for model in read_file(file).config.models] == ["hot", "cold"]


@pytest.mark.parametrize(
    ("live", "said"),
    [
        ({"Router": {"models": [COLD]}}, ".deployments: LazyPool has no user_config"),
        ({"Router": {"models": [COLD]}, "LazyPool": {"models": []}}, ".deployments[1].user_config: is not that of"),
        ({"LazyPool": {"models": [COLD]}}, ".deployments: Router has no user_config"),
        ({"Router": {"models": [{"id": "hot", "fake": {}}]}}, ".deployments: Resident-hot has no user_config"),
        ({"Router": {"router": {"hold_s": -1}}}, ".deployments[0].user_config.router.hold_s: "),
    ],
)
def test_check_finds_deployments_that_would_go_their_own_way(
    tmp_path: Path, live: dict[str, object], said: str
) -> None:
    (found,) = problems(write(tmp_path, {"models": [HOT], "pool": {}}, live))
    assert found.startswith("applications[0]" + said)


def pool_of(*models: LazyModel) -> Residency:
    return Residency(models, Limits(memory_bytes=10, min_residency_s=0, ageing_s=60, backoff_s=10))


def test_a_model_is_forgotten_only_once_it_is_stopped_and_nobody_waits() -> None:
    cold = LazyModel("cold", 4, 0, idle_unload_s=600)
    pool = pool_of()
    pool.configure(cold)
    assert pool.handle(Wanted("cold"), 0.0) == [Load("cold")]
    assert not pool.forget("cold")
    pool.handle(Loaded("cold", 1.0, 4), 1.0)
    assert not pool.forget("cold")
    assert pool.handle(Ordered("cold", Order.UNLOAD), 20.0) == [Unload("cold", drain=True)]
    assert not pool.forget("cold")
    pool.handle(Unloaded("cold"), 21.0)
    assert pool.forget("cold")
    assert pool.used_bytes() == 0


def test_a_model_that_is_up_does_not_count_less_than_it_takes() -> None:
    pool = pool_of(LazyModel("cold", 4, 0, idle_unload_s=600))
    pool.handle(Wanted("cold"), 0.0)
    pool.handle(Loaded("cold", 1.0, 4), 1.0)
    pool.configure(LazyModel("cold", 2, 0, idle_unload_s=600))
    assert pool.used_bytes() == 4

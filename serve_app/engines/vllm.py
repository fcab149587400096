"""vLLM behind the Engine protocol. Every import of vLLM in this project is in this module.

Written against vLLM 0.32.0. What it uses of `vllm.entrypoints.launchers` is what `vllm serve` itself is made
of; it is not documented as an API, and `tests/contract` runs all of it on the real engine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError

from serve_app.engines import compute_threads, gpu_turn
from serve_app.engines.base import EngineLoad, EngineSpec, Phase, ReportPhase, ServedApp
from serve_app.engines.environment import has_cuda
from serve_app.engines.messages import complete_messages

# What an engine process imports on its way to the first token. Found by starting one and listing
# sys.modules; a wrong or renamed entry costs start-up time only, so a missing one is passed over.
_PRELOADED = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.generate.api_router",
    "vllm.reasoning.qwen3_engine_reasoning_parser",
    "vllm.tool_parsers.hermes_tool_parser",
    "vllm.renderers.hf",
    "vllm.transformers_utils.chat_templates",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.triton_utils.dispatcher",
    "vllm.utils.cpu_triton_utils",
    "transformers.file_utils",
    "compressed_tensors",
    "compressed_tensors.compressors",
    "compressed_tensors.quantization",
    "model_hosting_container_standards.sagemaker",
    "prometheus_fastapi_instrumentator",
    "fastapi.staticfiles",
    "setproctitle",
    "xgrammar",
)

# Ours, where the user's configuration says nothing. `tool_strict_level: parameter` holds tool arguments to
# their schema (at vLLM's default a required call could carry arguments that are no object). Compact JSON: a model
# that likes white space may fill its answer with it (vllm-project/vllm#13260); vLLM can forbid it with a named
# backend only, and so refuses the few schema keywords that only its other backend knows.
# Media that a request names by URL are fetched by the engine, from the cluster's own addresses and the cloud's metadata
# service too, unless there is a list of hosts; this one never resolves (RFC 6761), so only `data:` URLs are taken.
_DEFAULTS: dict[str, Any] = {
    "allowed_media_domains": ["media.invalid"],
    "disable_uvicorn_access_log": True,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "tool_strict_level": "parameter",
}


def preload() -> None:
    """Import what an engine needs, so that one forked from this process starts in seconds."""
    os.register_at_fork(after_in_child=compute_threads.bind)
    for name in _PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            logging.getLogger(__name__).debug("not preloaded: %s: %s", name, error)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))

    def refuse(message: str) -> None:
        raise ValueError(message)

    parser.error = refuse  # type: ignore[assignment,method-assign]
    return parser


@functools.cache
def _options() -> dict[str, argparse.Action]:
    return {action.dest: action for action in _parser()._actions if action.option_strings}


def parse_arguments(model: str, served_as: str, args: Mapping[str, Any]) -> argparse.Namespace:
    """The namespace that `vllm serve` would make of these arguments.

    Raises `ValueError` that names the argument which vLLM does not know or does not take.
    """
    command_line = ["--model", model, "--served-model-name", served_as]
    for key, value in {**_DEFAULTS, **args}.items():
        command_line += _as_option(key, value)
    try:
        namespace = _parser().parse_args(command_line)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    try:
        validate_parsed_serve_args(namespace)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return namespace


def _as_option(key: str, value: Any) -> list[str]:
    action = _options().get(key)
    if action is None:
        raise ValueError(f"{key}: vLLM has no such argument")
    flag = next(name for name in action.option_strings if name.startswith("--"))
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        negative = next((name for name in action.option_strings if name.startswith("--no-")), None)
        if not value and not negative:
            return []
        return [flag if value else str(negative)]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
    return [flag, str(value)]


def argument_problems(model: str, args: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with engine arguments, by key; empty if vLLM would take them. Reads no model files.

    Each argument is tried alone first so that the answer names the right one, then all together.
    """
    from vllm.exceptions import VLLMValidationError

    problems = {}
    for key, value in args.items():
        try:
            parse_arguments(model, "check", {key: value} if key != "enable_auto_tool_choice" else {})
        except (ValueError, VLLMValidationError) as error:
            problems[key] = str(error).removeprefix(f"{key}: ")
    if not problems:
        try:
            namespace = parse_arguments(model, "check", args)
            _check_parsers(namespace)
            problems = _value_problems(namespace)
        except (ValueError, VLLMValidationError) as error:
            problems[""] = str(error)
    return problems


def _value_problems(namespace: argparse.Namespace) -> dict[str, str]:
    """Values of the right type that no engine starts with: vLLM looks at them only when it does."""
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    found = {}
    given = {key: value for key, value in vars(namespace).items() if value is not None}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    scheduled = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    for section, names, more in (
        (CacheConfig, ("gpu_memory_utilization",), {}),
        *((ParallelConfig, (size,), {}) for size in sizes),
        (SchedulerConfig, scheduled, {"is_encoder_decoder": False}),
    ):
        try:
            section(**{name: given[name] for name in names if name in given}, **more)
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_input=False):
                where = problem["loc"][0] if problem["loc"] and problem["loc"][0] in names else names[0]
                found[str(where)] = problem["msg"].removeprefix("Value error, ")
    if (method := namespace.quantization) is not None and method not in QUANTIZATION_METHODS:
        found["quantization"] = f"vLLM has no {method}; it has {', '.join(QUANTIZATION_METHODS)}"
    return found


def _check_parsers(namespace: argparse.Namespace) -> None:
    from vllm.entrypoints.launchers.launcher import validate_api_server_args

    try:
        validate_api_server_args(namespace)
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    from vllm.reasoning import ReasoningParserManager

    # Given on its own it is looked up only when the engine starts.
    known = ReasoningParserManager.list_registered()
    if (parser := namespace.reasoning_parser) and parser not in known:
        raise ValueError(f"invalid reasoning parser: {parser} (chose from {', '.join(known)})")


def version() -> str:
    """The version of the vLLM that is installed here."""
    from vllm.version import __version__

    return str(__version__)


# A running engine takes a step more often than this; one that does not run may have said its last word long ago.
_STALE_S = 5.0


class Meter:
    """Listens to the scheduler of each engine core (data parallel engines have several).

    `record` and what it is given are vLLM's `StatLoggerBase`, which AsyncLLM takes from its user.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cores: dict[int, tuple[float, EngineLoad]] = {}
        self.steps = 0

    def factory(self) -> Any:
        """For `stat_loggers`."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        cores, clock, meter = self._cores, self._clock, self

        class Listener(StatLoggerBase):  # type: ignore[misc] # vLLM has no types for us
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *more: Any, **named: Any) -> None:
                meter.steps += 1
                if scheduler_stats is not None:
                    cores[named.get("engine_idx", 0)] = (
                        clock(),
                        EngineLoad(
                            kv_cache=round(scheduler_stats.kv_cache_usage, 3),
                            running=scheduler_stats.num_running_reqs,
                            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                        ),
                    )

            def log_engine_initialized(self) -> None:
                pass

        return Listener

    def load(self) -> EngineLoad:
        """The emptiest core's KV cache, which gets the next request, and the requests of all."""
        now = self._clock()
        loads = [load for at, load in self._cores.values() if now - at < _STALE_S]
        return EngineLoad(
            kv_cache=min((load.kv_cache for load in loads), default=0.0),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
        )


@asynccontextmanager
async def serve(spec: EngineSpec, report: ReportPhase) -> AsyncIterator[ServedApp]:
    """Run vLLM's own OpenAI app on an engine of its own. See `base.Runtime`."""
    report(Phase.CONFIGURING)
    os.environ.update(spec.env)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    args = parse_arguments(spec.source, spec.model_id, spec.args)
    context = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
    # On a CPU the line above asks for spawned children, each of which imports vLLM again (15 s instead of 3).
    # Ours may be forked: this process holds no CUDA context and no thread of PyTorch's. Where forking would
    # be wrong vLLM itself goes back to spawning.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    report(Phase.LOADING)
    meter = Meter()
    with gpu_turn.turn(os.environ.get("CUDA_VISIBLE_DEVICES") if has_cuda() else ""):
        engine = AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=context,
            enable_log_requests=False,
            disable_log_stats=args.disable_log_stats,
            # Asking for no statistics at all, one gets none.
            stat_loggers=None if args.disable_log_stats else [meter.factory()],
        )
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        complete_messages(app.state)
        report(Phase.WARMING)
        await _warm_up(engine, generates="generate" in tasks)

        def attach_server(server: Any) -> None:
            app.state.server = server

        sleeper = _Sleeper(engine, generates="generate" in tasks)
        yield ServedApp(
            app=app,
            dead=lambda: bool(engine.errored),
            attach_server=attach_server,
            sleep=sleeper.sleep,
            wake=sleeper.wake,
            load=meter.load,
            steps=lambda: None if args.disable_log_stats else meter.steps,
            probe=lambda: _warm_up(engine, generates="generate" in tasks),
        )
    finally:
        engine.shutdown(timeout=0)


class _Sleeper:
    """vLLM's sleep mode: https://docs.vllm.ai/en/latest/features/sleep_mode.html"""

    def __init__(self, engine: Any, *, generates: bool) -> None:
        self._engine = engine
        self._generates = generates
        self._level = 0

    async def sleep(self, level: int) -> None:
        if not self._engine.model_config.enable_sleep_mode:
            raise ValueError("the engine was started without enable_sleep_mode")
        self._level = level
        await self._engine.sleep(level)

    async def wake(self) -> None:
        if self._level == 2:
            # The weights are gone: their memory first, then their values, then room for the KV cache.
            await self._engine.wake_up(["weights"])
            await self._engine.collective_rpc("reload_weights")
            await self._engine.wake_up(["kv_cache"])
        else:
            await self._engine.wake_up()
        # What the cache held is lost with its memory.
        await self._engine.reset_prefix_cache()
        await _warm_up(self._engine, generates=self._generates)


async def _warm_up(engine: Any, *, generates: bool) -> None:
    """One token (or one embedding): the first request must not pay for lazy initialisation."""
    prompt = {"prompt_token_ids": [1]}
    if generates:
        from vllm.sampling_params import SamplingParams

        stream = engine.generate(prompt, SamplingParams(max_tokens=1), "switchyard-warm-up")
    else:
        from vllm.pooling_params import PoolingParams

        stream = engine.encode(prompt, PoolingParams(task="embed"), "switchyard-warm-up")
    async for _ in stream:
        pass

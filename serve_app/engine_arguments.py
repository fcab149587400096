"""Engine arguments that a deployment file may not set, and why. vLLM 0.32 takes them all. Pure data.

Three kinds: what this service decides itself; what opens the engine to clients, or their text to logs; and the one
that runs a model's own code, which has a key beside `engine`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_OURS = "is set by the router; remove it"
_NO_SERVER = "has no effect: only the router can reach the engine's port; remove it"
_LOGS = "writes prompts or answers to the logs; remove it"
_OPENS = "lets clients at the engine in ways that the router does not check; remove it"

# `config` names a file of more arguments, past every check here.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("model", "served_model_name", "host", "port", "api_key", "uds", "grpc", "grpc_port"), _OURS),
    **dict.fromkeys(("headless", "api_server_count", "lora_modules", "config", "model_tag"), _OURS),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"), _NO_SERVER),
    **dict.fromkeys(("enable_ssl_refresh", "root_path", "disable_access_log_for_endpoints"), _NO_SERVER),
    **dict.fromkeys(("allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers"), _NO_SERVER),
    **dict.fromkeys(("enable_log_requests", "enable_log_outputs", "enable_log_deltas", "log_error_stack"), _LOGS),
    **dict.fromkeys(("middleware", "enable_offline_docs", "enable_tokenizer_info_endpoint", "profiler_config"), _OPENS),
    **dict.fromkeys(("enable_scale_out", "tokens_only", "tool_server", "trust_request_chat_template"), _OPENS),
    **dict.fromkeys(("trust_request_mm_kwargs", "enable_prompt_embeds", "enable_mm_embeds"), _OPENS),
    "allowed_local_media_path": "lets clients read files of the node; have them send `data:` URLs, and remove it",
    "hf_token": "a secret does not belong here: Ray shows the configuration; set HF_TOKEN on the nodes",
}
# Names that hold one wherever they are used: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY, ...
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS)$", re.IGNORECASE)
_TRUST = "trust_remote_code"
# Switches of vLLM's environment that do the same.
_REFUSED_ENV: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": _OPENS,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _OPENS,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": _OPENS,
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": _LOGS,
    "VLLM_API_KEY": _OURS,
}


def refused_arguments(engine: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[str]:
    """What is wrong, as `engine.KEY: reason` or `engine_env.KEY: reason`."""
    # vLLM's command line takes `-` and `_` alike.
    for key in engine:
        name = key.replace("-", "_")
        if name == _TRUST:
            yield f"engine.{key}: write it beside `engine`, as `{_TRUST}: true` of this model; it runs the model's code"
        elif reason := _REFUSED.get(name):
            yield f"engine.{key}: {reason}"
        elif name == "allowed_media_domains" and not _are_hosts(engine[key]):
            yield f"engine.{key}: must be a list of host names; without it only `data:` URLs are taken"
    for key in env:
        if _SECRET.search(key) and key not in _REFUSED_ENV:
            yield f"engine_env.{key}: a secret does not belong here: Ray shows the configuration; set it on the nodes"
        if reason := _REFUSED_ENV.get(key):
            yield f"engine_env.{key}: {reason}"


def _are_hosts(value: object) -> bool:
    # vLLM takes an empty list for all there are.
    return isinstance(value, list) and bool(value) and all(isinstance(host, str) and host for host in value)

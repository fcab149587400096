"""The environment of engine processes: what must be set before they start, and what they run on. Imports no vLLM."""

from __future__ import annotations

import glob
import importlib.util
import os
from pathlib import Path

# Whatever the node's environment says. A redirect is followed past the list of hosts, so none is.
_CLOSED = {
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "False",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
}


def host_environment() -> dict[str, str]:
    """Environment that must be set before an engine host starts.

    vLLM on a CPU preloads PyTorch's libgomp, so that its compute threads bind to their cores
    (vllm-project/vllm#27369), and its own tcmalloc. It does so for children it spawns; ours are forked, so
    the host must have both from its own start.
    """
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", **_CLOSED}
    if has_cuda():
        return environment
    libraries = []
    for package, pattern in (
        ("vllm", "libs/libtcmalloc*.so*"),
        ("torch", "../torch.libs/libgomp*.so*"),
        ("torch", "lib/libgomp*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            libraries += glob.glob(str(Path(spec.origin).parent / pattern))
    preloaded = [*libraries, *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {**environment, "LD_PRELOAD": ":".join(preloaded)} if preloaded else environment


def has_cuda() -> bool:
    """Whether this machine has a GPU of NVIDIA's."""
    return Path("/proc/driver/nvidia/version").exists()

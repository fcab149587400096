# What runs on every node of the cluster, head and workers:
#   docker build -f docker/cuda.Dockerfile -t registry.example.com/switchyard-cuda:0.1.0 .
# vLLM's own image, because its kernels are compiled on first use with the CUDA tools that are in it.
FROM vllm/vllm-openai:v0.32.0

USER root
WORKDIR /opt/switchyard
COPY docker/constraints.txt pyproject.toml ./
COPY serve_app serve_app
# Without the extra `cuda`: vLLM is here already, and must stay the one that is.
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt '.[scorer]' 'nvidia-ml-py>=12' \
    && python3 -c "from importlib.metadata import version; found = version('vllm'), version('ray'); \
assert found == ('0.32.0', '2.60.0'), found" \
    && python3 -m serve_app --help > /dev/null
# Ubuntu's image has a user of this number; KubeRay's pods run as it (k8s/base/rayservice.yaml).
RUN (userdel --remove ubuntu 2> /dev/null || true) \
    && useradd --uid 1000 --create-home --home-dir /home/switchyard --shell /bin/bash switchyard

USER 1000:1000
WORKDIR /home/switchyard
ENV HOME=/home/switchyard PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
# KubeRay gives the command: `ray start` of head or worker.
ENTRYPOINT []
CMD ["bash"]

# The same without GPUs: for trying manifests on a laptop's cluster, and for small models.
#   docker build -f docker/cpu.Dockerfile -t registry.example.com/switchyard-cpu:0.1.0 .
FROM python:3.12.12-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/switchyard
COPY docker/constraints.txt pyproject.toml ./
COPY serve_app serve_app
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu '.[cpu,scorer]' \
    && (python3 -m pip uninstall --yes torchvision torchaudio torchcodec || true) \
    && python3 -m serve_app --help > /dev/null
RUN useradd --uid 1000 --create-home --home-dir /home/switchyard --shell /bin/bash switchyard

USER 1000:1000
WORKDIR /home/switchyard
ENV HOME=/home/switchyard PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
CMD ["bash"]

# The server in a container. CPU: `docker build -t offload-rt .`; CUDA: see docs/pages/deploying.md.
# Torch comes from the index that BASE's machines reach; nothing of this was built where the project is developed.
ARG BASE=python:3.11-slim
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends curl && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY constraints.txt pyproject.toml setup.py LICENSE README.md ./
COPY offload_rt offload_rt
COPY kernels kernels
COPY skewing skewing
COPY eval eval
ARG EXTRAS=serve,structured
# The compiler builds the CPU kernels into the package. CUDA needs it at run time too: Triton compiles its launchers.
ARG KEEP_COMPILER=
# Without this, pip refuses to install into the Python of Ubuntu 24.04 (PEP 668).
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && python3 -m pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && if [ -z "${KEEP_COMPILER}" ]; then apt-get purge -y --auto-remove gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/*
# Images of Ubuntu 24.04 already have a user with this id.
RUN useradd --create-home --non-unique --uid 1000 server && mkdir /models /sessions && chown server /models /sessions
USER server
ENV HF_HOME=/models
VOLUME ["/models", "/sessions"]
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD curl -fs http://127.0.0.1:8000/health
# A key must be given (OFFLOAD_RT_API_KEY): the server listens on every address of its container.
ENTRYPOINT ["offload-rt", "serve", "--host", "0.0.0.0", "--store", "/sessions"]
CMD ["reference"]

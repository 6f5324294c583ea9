# A client, or a host of several. Build in the root of a clone:
#     docker build -f deploy/client.Dockerfile -t fedtide-client .
# Arguments: TORCH=cu128 for CUDA; EXTRAS=mlflow,prometheus for extras of fedtide; PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and
# TORCH_INDEX for indexes of your own, PYTHON for the image to begin with. An index that asks who you are gets a secret in
# place of an argument, which everybody could read in the image: --secret id=pip,src=pip.conf
ARG PYTHON=python:3.11-slim
FROM ${PYTHON} AS wheel
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir build==1.2.2 && python -m build --wheel --outdir /wheels

FROM ${PYTHON}
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}
ARG EXTRAS=
COPY --from=wheel /wheels /wheels
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir "torch>=2.9" "torchvision>=0.24" --index-url "${TORCH_INDEX}" \
    && pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRAS:+[${EXTRAS}]}" \
    && useradd --create-home --uid 10001 fedtide && install -d -o fedtide -m 1777 /state
USER 10001
WORKDIR /state
VOLUME /state
STOPSIGNAL SIGTERM
ENTRYPOINT ["fedcli"]
CMD ["--help"]

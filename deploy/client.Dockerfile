# A client, or a host of several. Build in the root of a clone:
#     docker build -f deploy/client.Dockerfile -t fedtide-client .
#     docker build -f deploy/client.Dockerfile -t fedtide-client:cuda --build-arg TORCH=cu128 .
FROM python:3.11-slim AS wheel
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir build==1.2.2 && python -m build --wheel --outdir /wheels

FROM python:3.11-slim
ARG TORCH=cpu
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "torch>=2.9" "torchvision>=0.24" --index-url "https://download.pytorch.org/whl/${TORCH}" \
    && pip install --no-cache-dir /wheels/*.whl \
    && useradd --create-home --uid 10001 fedtide && install -d -o fedtide -m 1777 /state
USER 10001
WORKDIR /state
VOLUME /state
STOPSIGNAL SIGTERM
ENTRYPOINT ["fedcli"]
CMD ["--help"]

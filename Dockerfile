# Lockstep on a CPU:   docker build -t lockstep .
# Lockstep on CUDA:    docker build -t lockstep-cuda --build-arg TORCH_INDEX=<the index of torch wheels for your CUDA> \
#                        --build-arg CONSTRAINT= .
# torch's CUDA wheels bring the CUDA libraries; the host needs NVIDIA's driver and container toolkit.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG CONSTRAINT="--constraint constraints.txt"

WORKDIR /opt/lockstep
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir "torch>=2.11,<2.16" $CONSTRAINT --index-url "$TORCH_INDEX" \
    && pip install --no-cache-dir $CONSTRAINT ".[tensorboard]"

# A user of its own: training needs no root.
RUN useradd --create-home train
USER train
WORKDIR /home/train
ENTRYPOINT ["lockstep"]
CMD ["env"]

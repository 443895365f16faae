#!/usr/bin/env bash
# One of several nodes without SLURM, by torchrun: to be started on each of them, with its number.
#   NODES=2 NODE=0 DEVICES=8 MASTER=host0 scripts/node.sh --config configs/algorithm/grpo.yaml
#   NODES=2 NODE=1 DEVICES=8 MASTER=host0 scripts/node.sh --config configs/algorithm/grpo.yaml
# STRATEGY names a file of configs/strategy; PYTHON the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${NODES:?number of nodes}" "${NODE:?number of this node, from 0}" "${MASTER:?address of node 0}"
DEVICES=${DEVICES:-8}
exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
  --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$DEVICES" \
  --master-addr "$MASTER" --master-port "${PORT:-29500}" \
  train.py fit --config "configs/strategy/${STRATEGY:-fsdp2}.yaml" "$@" \
  --trainer.num_nodes "$NODES" --trainer.devices "$DEVICES"

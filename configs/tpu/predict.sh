#!/usr/bin/env bash
# Throughput against concurrency on a slice that is not here: decode steps compiled over numbers of slots and budgets, their costs by the
# TPU compiler's own estimate, and the rounds that `angelspec bench load -o TRACES` recorded. Estimates, not measurements.
#
#   configs/tpu/predict.sh TRACES [CONFIG] [TOPOLOGY]
#   SLOTS="1 32 256 1024" BUDGETS="0 3 7" CAPACITY=512 configs/tpu/predict.sh load.json targets/qwen3_8b v6e:2x4
#
# Needs the compiler (pip install "jax[tpu]") and no TPU; every program takes minutes of CPU, and one that is in the folder is kept.
set -euo pipefail

traces=${1:?name the JSON file that "angelspec bench load -o" wrote}
config=${2:-targets/qwen3_8b}
topology=${3:-v6e:2x4}
folder=${FOLDER:-predicted/$(basename "$config")-${topology//:/-}}

mkdir -p "$folder"
compiled=()
for slots in ${SLOTS:-1 32 256 1024}; do
  for budget in ${BUDGETS:-0 3 7}; do
    file="$folder/slots-$slots-budget-$budget.json"
    if [[ ! -s $file ]]; then
      angelspec compile "$config" "decode.requests=$slots" "decode.budgets=[$budget]" "decode.capacity=${CAPACITY:-512}" \
        --only decode --topology "$topology" --output "$file"
    fi
    compiled+=(--compiled "$file")
  done
done
angelspec bench simulate "$traces" "${compiled[@]}" --concurrency "${CONCURRENCY:-1,4,16,64,256,1024}" \
  --output "$folder/predicted.json" --plot "$folder/predicted.png"

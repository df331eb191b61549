#!/usr/bin/env bash
# Every family for SmolLM2, trained on the same answers for the same time and compared on the same prompts.
#
#   configs/compare.sh ANSWERS PROMPTS FOLDER [option of `angelspec bench drafters` ...]
#   TRAIN_SECONDS=300 configs/compare.sh answers.jsonl.gz prompts compared --limit 8
#
# ANSWERS: JSONL of conversations. PROMPTS: a folder of JSONL files, one a domain, with {"prompt"} a line. TRAIN_SECONDS (1080): of each family,
# compilation left out; a first short run measures what a step takes. The same command continues one that was stopped.
set -euo pipefail

answers=${1:?name a JSONL file of conversations to train on}
prompts=${2:?name a folder of JSONL files with prompts}
folder=${3:?name a folder for the drafters and the results}
shift 3
mkdir -p "$folder"

train() {  # FAMILY STEPS OUTPUT
  local own=()
  case $1 in
    dfly | dflash | dflare) own=(drafter.block_size=5 drafter.layers=2) ;;
    dspark) own=(drafter.block_size=4 drafter.layers=2 drafter.rank=32) ;;  # its first slot drafts too, so four drafts as well
  esac
  # DFly comes first: the features that it keeps serve all.
  angelspec train "train/smollm2_$1" "data.paths=$answers" "data.cache=$folder/features" "train.steps=$2" "output=$3" drafter.draft_vocab=12288 \
    train.chunk=192 train.compute_dtype=bfloat16 train.save_every=100 evaluation.every=0 "${own[@]}"
}

drafters=()
for family in dfly mtp eagle3 dflash dflare dspark; do
  if [ ! -s "$folder/$family.steps" ]; then
    rm -rf "$folder/rate"
    train "$family" 12 "$folder/rate"
    step=$(grep -o '"step_seconds": [0-9.]*' "$folder/rate/metrics.jsonl" | tail -n 1 | cut -d' ' -f2)
    awk -v s="${TRAIN_SECONDS:-1080}" -v t="$step" 'BEGIN { n = int(s / t); print(n < 12 ? 12 : n) }' >"$folder/$family.steps"
  fi
  train "$family" "$(cat "$folder/$family.steps")" "$folder/$family"
  drafters+=(-d "$family=$folder/$family/drafter")
done
angelspec bench drafters "$prompts"/*.jsonl "${drafters[@]}" -d lookup:4 -d early_exit:8 --limit 40 --timed 4 -n 32 --capacity 640 \
  --output "$folder/comparison.json" --plots "$folder/plots" "$@"

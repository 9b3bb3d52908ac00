#!/usr/bin/env bash
# Does bf16 training learn like fp32? Trains weft in bf16 and PyTorch in fp32 from the same weights on the same windows
# and prints the largest relative difference of their smoothed losses. Exit 0 if it is at most TOLERANCE.
#
#   dev/bench/learning_check.sh data/tinyshakespeare.txt tokenizer.json     on a GPU, a few minutes
#   STEPS=3 DEVICE=cpu dev/bench/learning_check.sh data/tinyshakespeare.txt tokenizer.json
#
# Settings, in the environment: STEPS=500 DEVICE=cuda|cpu CONFIG=d12 MICRO_BATCH SEQ_LEN BATCH_TOKENS LR SEED SMOOTH=25
# TOLERANCE=0.005 WORK=runs/learning_check PYTHON=python3 (with torch, transformers and scripts/requirements.txt).
# Shards that are in WORK/data already are used as they are; then no arguments are needed. On the CPU weft computes in
# fp32: that checks the script, and with SMOOTH=1 TOLERANCE=1e-4 every step.
set -euo pipefail
readonly USAGE_ERROR=2

die() { printf 'error: %s\n' "$1" >&2; exit "$USAGE_ERROR"; }

caller=$PWD
cd "$(dirname "$0")/../.."
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$caller" "$1" ;; esac; }

device=${DEVICE:-cuda} steps=${STEPS:-500} smooth=${SMOOTH:-25}
work=$(absolute "${WORK:-$PWD/runs/learning_check}")
python=${PYTHON:-python3}
case $device in
  cuda) precision=bf16 micro_batch=${MICRO_BATCH:-16} seq_len=${SEQ_LEN:-256} ;;
  cpu) precision=fp32 micro_batch=${MICRO_BATCH:-2} seq_len=${SEQ_LEN:-32} ;;
  *) die "DEVICE: got $device, expected cuda or cpu" ;;
esac
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "STEPS: got $steps, expected a number of steps"
warmup=$((steps < 50 ? steps : 50))

if [[ ! -e $work/data/train_00000.bin ]]; then
  [[ $# == 2 ]] || die "usage: learning_check.sh TEXT TOKENIZER_JSON, see the head of the script"
  "$python" dev/prepare_data.py "$(absolute "$1")" --tokenizer "$(absolute "$2")" -o "$work/data"
fi

rm -rf "$work/weft"
./train_llama --config "${CONFIG:-d12}" --train "$work/data/train_*.bin" --out "$work/weft" --device "$device" \
  --precision "$precision" --steps "$steps" --warmup-steps "$warmup" --micro-batch "$micro_batch" --seq-len "$seq_len" \
  --batch-tokens "${BATCH_TOKENS:-$((micro_batch * seq_len))}" --lr "${LR:-1e-4}" --seed "${SEED:-1}" \
  --save-every 0 --sample-every 0

"$python" scripts/train_reference.py "$work/weft" --device "$device" --against "$work/weft/log.jsonl" \
  --smooth $((smooth < steps ? smooth : steps)) --tolerance "${TOLERANCE:-0.005}" -o "$work/reference.jsonl"

#!/usr/bin/env bash
# make demo: the first minutes of weft on any machine, in two parts with the compiling of infer_pythia between them.
#   scripts/run_demo.sh train    trains the tiny Llama from nothing on stories that the project generates itself, samples
#                                from it and plots the loss
#   scripts/run_demo.sh infer    runs the tiny Pythia that comes with the project
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
say() { printf '\n== %s\n' "$*"; }

train() {
  say "corpus: generated stories, as tokens"
  if [ ! -e data/stories/train_00000.bin ]; then
    $python dev/data/make_stories.py -o data/stories
    $python dev/prepare_data.py data/stories/train.txt --val data/stories/val.txt \
      --tokenizer models/tiny-llama/tokenizer.json -o data/stories
  fi

  read -ra train_options <<<"${DEMO_TRAIN_OPTIONS:-}"
  say "training: a Llama of 2 million parameters, about a minute on 2 cores"
  rm -rf runs/demo
  ./train_llama --config tiny --train 'data/stories/train_*.bin' --val 'data/stories/val_*.bin' --out runs/demo \
    --max-minutes "${DEMO_MINUTES:-3}" "${train_options[@]}"

  say "plot: runs/demo/loss.png"
  $python scripts/plot_log.py runs/demo -o runs/demo/loss.png
}

infer() {
  say "inference: the tiny Pythia that comes with weft"
  $python scripts/convert_hf.py models/tiny-pythia -o runs/demo/tiny-pythia.bin
  ./infer_pythia --model runs/demo/tiny-pythia.bin --prompt "Once upon a time" --max-tokens 160 --temperature 0.7 --seed 1

  newest=$(printf '%s\n' runs/demo/step_???????? | tail -n 1)
  # What this run was started with, but --steps, which is what "more" changes.
  options=${DEMO_TRAIN_OPTIONS:-}
  if [[ $options =~ ^(.*)--steps[=\ ]+[0-9]+(.*)$ ]]; then options=${BASH_REMATCH[1]}${BASH_REMATCH[2]}; fi
  read -ra same <<<"$options"
  say "next: talk to this model, and serve it to browsers, curl and OpenAI's client (doc/serving.md)"
  echo "  ./infer_pythia --model $newest/model.bin --interactive --temperature 0.7"
  echo "  ./infer_pythia --model $newest/model.bin --served-name demo --serve 127.0.0.1:8000"
  say "or train it for longer"
  echo "  ./train_llama --config tiny --train 'data/stories/train_*.bin' --val 'data/stories/val_*.bin' --out runs/demo --steps 800${same[*]:+ ${same[*]}}"
  say "or train a model on your own text, here my.txt (doc/own_tokenizer.md)"
  echo "  $python dev/prepare_data.py my.txt --tokenizer models/tiny-llama/tokenizer.json -o data/mine"
  echo "  ./train_llama --config tiny --train 'data/mine/train_*.bin' --val 'data/mine/val_*.bin' --out runs/mine"
}

case ${1:-} in
  train | infer) "$1" ;;
  *) echo "run_demo: got '${1:-}', expected train or infer. Run: make demo" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# make demo: the first minutes of weft on any machine, in parts; infer_pythia is compiled behind the first one.
#   scripts/run_demo.sh train    trains the tiny Llama from nothing on stories that the project generates itself, samples
#                                from it and plots the loss
#   scripts/run_demo.sh infer    runs the tiny Pythia that comes with the project
#   scripts/run_demo.sh chat     tunes the tiny Llama on conversations about these stories, and asks it for one
# DEMO_TRAIN_OPTIONS has further options of both trainings, as --steps 10.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
say() { printf '\n== %s\n' "$*"; }
newest() { printf '%s\n' "$1"/step_???????? | tail -n 1; }
# A training that was stopped goes on if the options are the same; all others begin anew.
begin_or_go_on() {
  local state="unfinished ${DEMO_TRAIN_OPTIONS:-}"
  [ "$(cat "$1.demo" 2>/dev/null)" == "$state" ] || rm -rf "$1"
  mkdir -p "$(dirname "$1")"
  echo "$state" >"$1.demo"
}
read -ra train_options <<<"${DEMO_TRAIN_OPTIONS:-}"

train() {
  say "corpus: generated stories, as tokens"
  if [ ! -e data/stories/train_00000.bin ]; then
    $python dev/data/make_stories.py -o data/stories
    $python dev/prepare_data.py data/stories/train.txt --val data/stories/val.txt \
      --tokenizer models/tiny-llama/tokenizer.json -o data/stories
  fi

  say "training: a Llama of 2 million parameters, about a minute on 2 cores"
  begin_or_go_on runs/demo
  ./train_llama --config tiny --train 'data/stories/train_*.bin' --val 'data/stories/val_*.bin' --out runs/demo \
    --max-minutes "${DEMO_MINUTES:-3}" "${train_options[@]}"
  rm runs/demo.demo

  say "plot: runs/demo/loss.png"
  $python scripts/plot_log.py runs/demo -o runs/demo/loss.png
}

infer() {
  say "inference: the tiny Pythia that comes with weft"
  $python scripts/convert_hf.py models/tiny-pythia -o runs/demo/tiny-pythia.bin
  ./infer_pythia --model runs/demo/tiny-pythia.bin --prompt "Once upon a time" --max-tokens 160 --temperature 0.7 --seed 1
}

chat() {
  say "conversations about the stories, as tokens"
  if [ ! -e data/chats/train_00000.bin ]; then
    $python dev/data/make_chats.py -o data/chats/chats.jsonl
    $python dev/prepare_data.py --chat data/chats/chats.jsonl --tokenizer models/tiny-llama/tokenizer.json \
      --chat-format models/tiny-llama/chat_format.json -o data/chats
  fi

  say "tuning: the same Llama on conversations, half a minute on 2 cores"
  begin_or_go_on runs/demo-chat
  tuning=()
  for option in "--steps 60" "--seq-len 320" "--lr 1e-3"; do
    [[ " ${DEMO_TRAIN_OPTIONS:-}" == *" ${option% *}"* ]] || read -ra tuning <<<"${tuning[*]} $option"
  done
  ./train_llama --model "$(newest runs/demo)/model.bin" --train 'data/chats/train_*.bin' --val 'data/chats/val_*.bin' --out runs/demo-chat \
    --max-minutes 1 "${tuning[@]}" "${train_options[@]}"
  rm runs/demo-chat.demo

  model=$(newest runs/demo-chat)/model.bin
  say "chat: one turn"
  question="Tell me a story about Mia, a curious girl who lived by the sea."
  echo "> $question"
  ./infer_pythia --model "$model" --chat --temperature 0.5 --seed 1 <<<"$question"

  # What the first training was started with, but --steps, which is what "longer" changes. In a directory of its own, which no
  # demo removes, and from nothing: a finished run that gets more steps goes back to a higher learning rate.
  options=${DEMO_TRAIN_OPTIONS:-}
  if [[ $options =~ ^(.*)--steps[=\ ]+[0-9]+(.*)$ ]]; then options=${BASH_REMATCH[1]}${BASH_REMATCH[2]}; fi
  read -ra same <<<"$options"
  say "next: chat with this model, and serve it to browsers, curl and OpenAI's client (doc/serving.md)"
  echo "  ./infer_pythia --model $model --chat --temperature 0.5"
  echo "  ./infer_pythia --model $model --served-name demo --serve 127.0.0.1:8000"
  say "or train one for longer, from nothing"
  echo "  ./train_llama --config tiny --train 'data/stories/train_*.bin' --val 'data/stories/val_*.bin' --out runs/demo-longer --steps 800${same[*]:+ ${same[*]}}"
  say "or train a model on your own text, here my.txt (doc/own_tokenizer.md)"
  local mine=mine number=2
  while [ -e "data/$mine" ] || [ -e "runs/$mine" ]; do mine=mine-$((number++)); done
  echo "  $python dev/prepare_data.py my.txt --tokenizer models/tiny-llama/tokenizer.json -o data/$mine"
  echo "  ./train_llama --config tiny --train 'data/$mine/train_*.bin' --val 'data/$mine/val_*.bin' --out runs/$mine"
}

case ${1:-} in
  train | infer | chat) "$1" ;;
  *) echo "run_demo: got '${1:-}', expected train, infer or chat. Run: make demo" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# Downloads what the examples need: a small text, and checkpoints from the Hugging Face hub.
#
# The promise: a file under its final name is whole and right. Everything is received as FILE.part,
# compared with the size and hash the server announces, synced, and only then renamed. Whatever
# stops the script (Ctrl-C, a cut line, a full disk) leaves at most .part files, and the next run
# goes on from them.
#
# Reading order: main() at the bottom, download_model(), fetch(), then ask() and receive().
set -euo pipefail
export LC_ALL=C # df, stat and curl print the same everywhere

readonly OK=0 USAGE=2 BAD_CONTENT=3 ENVIRONMENT=4 NO_SPACE=5

# name, repository, parameters, access. Every pythia also exists as NAME-deduped.
readonly MODELS='
pythia-14m       EleutherAI/pythia-14m     14M    open
pythia-31m       EleutherAI/pythia-31m     31M    open
pythia-70m       EleutherAI/pythia-70m     70M    open
pythia-160m      EleutherAI/pythia-160m    162M   open
pythia-410m      EleutherAI/pythia-410m    405M   open
pythia-1b        EleutherAI/pythia-1b      1.0B   open
pythia-1.4b      EleutherAI/pythia-1.4b    1.4B   open
pythia-2.8b      EleutherAI/pythia-2.8b    2.8B   open
pythia-6.9b      EleutherAI/pythia-6.9b    6.9B   open
pythia-12b       EleutherAI/pythia-12b     11.8B  open
llama-3.2-1b     meta-llama/Llama-3.2-1B   1.2B   gated
llama-3.2-3b     meta-llama/Llama-3.2-3B   3.2B   gated
llama-3.1-8b     meta-llama/Llama-3.1-8B   8.0B   gated
llama-3.2-1b-instruct  meta-llama/Llama-3.2-1B-Instruct  1.2B  gated
smollm2-135m     HuggingFaceTB/SmolLM2-135M  135M  open
smollm2-135m-instruct  HuggingFaceTB/SmolLM2-135M-Instruct  135M  open
qwen2.5-0.5b     Qwen/Qwen2.5-0.5B         494M   open
qwen2.5-0.5b-instruct  Qwen/Qwen2.5-0.5B-Instruct  494M  open
qwen2.5-1.5b     Qwen/Qwen2.5-1.5B         1.5B   open
qwen3-0.6b       Qwen/Qwen3-0.6B-Base      596M   open
qwen3-1.7b       Qwen/Qwen3-1.7B-Base      1.7B   open
qwen3-8b         Qwen/Qwen3-8B-Base        8.2B   open
qwen3-0.6b-instruct  Qwen/Qwen3-0.6B       596M   open
qwen3-1.7b-instruct  Qwen/Qwen3-1.7B       1.7B   open
qwen3-8b-instruct  Qwen/Qwen3-8B           8.2B   open
smollm3-3b       HuggingFaceTB/SmolLM3-3B-Base  3.1B  open
smollm3-3b-instruct  HuggingFaceTB/SmolLM3-3B  3.1B  open
mistral-7b       mistralai/Mistral-7B-v0.3  7.2B  gated
mistral-7b-instruct  mistralai/Mistral-7B-Instruct-v0.3  7.2B  gated
gemma3-1b        google/gemma-3-1b-pt      1.0B   gated
gemma3-1b-instruct  google/gemma-3-1b-it   1.0B   gated
tinyllama-1.1b   TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T  1.1B  open
'
readonly DEFAULT_PACK=(tinyshakespeare pythia-160m)

# Karpathy's copy of the public-domain text. The hash is pinned: the branch may move, the text may not.
readonly TEXT_PATH=karpathy/char-rnn/master/data/tinyshakespeare/input.txt
readonly TEXT_SIZE=1115394
readonly TEXT_SHA256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed

readonly OPTIONS=(--out --data --revision --dry-run --list --help)
readonly MAX_REDIRECTS=5
readonly MAX_RETRY_AFTER_S=120          # a server that asks for more is not worth waiting for
readonly MAX_BACKOFF_MS=30000
readonly XET_BYTES=50000000000          # above this the hub serves a file through hf_xet alone
readonly MAX_CONFIG_BYTES=8388608       # of a JSON file: what scripts/hf_config.py reads
readonly MAX_TOKENIZER_BYTES=100000000  # of tokenizer.json, likewise
readonly PROGRESS_BYTES=2000000         # smaller files are done before a progress line helps

usage() {
  cat <<'END'
Usage: dev/download_starter_pack.sh [OPTION]... [NAME]...

Downloads the named texts and models, checks their size and hash, and prints the next command.
Without NAME: tinyshakespeare and pythia-160m.

NAME is tinyshakespeare, a model of --list, or any ORG/MODEL on the hub with safetensors weights.

  -o, --out DIR        models go to DIR/NAME (default: models)
      --data DIR       texts go here (default: data)
      --revision REV   branch, tag or commit of the models (default: main). Pythia has step0 to
                       step143000. Anything but main is saved as NAME-REV.
      --dry-run        show files, sizes and free space; save nothing
      --list           show the names
  -h, --help           show this help

Environment:
  HF_ENDPOINT                   the hub or a mirror (default: https://huggingface.co)
  HF_TOKEN, HF_TOKEN_PATH       access token, or the file that holds it (default: $HF_HOME/token);
                                needed for gated models, sent to HF_ENDPOINT alone
  HF_HOME, HF_HUB_CACHE         an existing hub cache; what it holds is not downloaded again
  HF_HUB_OFFLINE=1              use the cache and the files already here, never the network
  HF_HUB_DOWNLOAD_TIMEOUT       seconds without an answer or data before a retry (default: 10)
  HF_HUB_DISABLE_PROGRESS_BARS=1, NO_COLOR    quieter terminals
  WEFT_TEXT_ENDPOINT            where tinyshakespeare is (default: https://raw.githubusercontent.com)
  WEFT_DOWNLOAD_TRIES           attempts without progress before giving up (default: 5)
  WEFT_DOWNLOAD_BACKOFF_MS      wait before the second attempt, doubled each time (default: 1000)
  https_proxy, no_proxy, CURL_CA_BUNDLE       as curl reads them (~/.curlrc is not read)

Exit codes: 0 ok, 2 usage, 3 bad content (hash, size, web page), 4 environment (network, access,
not found, missing tool), 5 no space on the disk, 130/143 stopped by a signal.
END
}

# ---- messages: results go to stdout, everything else to stderr -------------------------------

# Names, headers and files come from outside: no control character of theirs reaches the terminal.
say() { printf '%s\n' "${1//[[:cntrl:]]/?}" >&2; }
note() { say "$1"; }
warn() { say "warning: $1"; }

die() { # die CODE "<what>: got X, expected Y. <what to do>"
  local red='' plain=''
  if colours_wanted; then red=$'\e[31m' plain=$'\e[0m'; fi
  printf '%serror:%s %s\n' "$red" "$plain" "${2//[[:cntrl:]]/?}" >&2
  exit "$1"
}

colours_wanted() { [[ -t 2 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; }
progress_wanted() { [[ -t 2 && ${TERM:-dumb} != dumb ]] && ! is_true "${HF_HUB_DISABLE_PROGRESS_BARS:-}"; }

is_true() { [[ ${1^^} =~ ^(1|ON|YES|TRUE)$ ]]; } # the spellings huggingface_hub accepts
human() { numfmt --to=si --round=nearest --suffix=B --format=%.1f -- "$1"; }

nearest() { # nearest WORD CANDIDATE... → " Did you mean X?" or nothing
  python3 - "$@" <<'END'
import difflib, sys
match = difflib.get_close_matches(sys.argv[1].lower(), sys.argv[2:], n=1)
print(f" Did you mean {match[0]}?" if match else "", end="")
END
}

# ---- settings ---------------------------------------------------------------------------------

out_dir=models
data_dir=data
revision=main
dry_run=no
names=()

parse_options() {
  local option value
  while (($#)); do
    option=$1
    shift
    case $option in
      --out=* | --data=* | --revision=*) value=${option#*=} option=${option%%=*} ;;
      -o | --out | --data | --revision)
        (($#)) || die $USAGE "$option: got no value, expected one. See --help."
        value=$1
        shift
        ;;
    esac
    case $option in
      -o | --out) out_dir=$value ;;
      --data) data_dir=$value ;;
      --revision) revision=$value ;;
      --dry-run) dry_run=yes ;;
      --list) list_models && exit $OK ;;
      -h | --help) usage && exit $OK ;;
      --)
        names+=("$@")
        break
        ;;
      -*) die $USAGE "$option: got an unknown option, expected one of ${OPTIONS[*]}.$(nearest "${option%%=*}" "${OPTIONS[@]}")" ;;
      *) names+=("$option") ;;
    esac
  done
  ((${#names[@]})) || names=("${DEFAULT_PACK[@]}")
  [[ -n $out_dir && -n $data_dir ]] || die $USAGE "--out, --data: got an empty name, expected a directory. Leave the option out for the default."
  [[ $revision =~ ^[A-Za-z0-9][A-Za-z0-9._/-]*$ && $revision != *..* ]] ||
    die $USAGE "--revision: got '$revision', expected a branch, tag or commit such as main or step1000. Check the spelling."
}

list_models() {
  printf '%-22s %-52s %-11s %s\n' NAME REPOSITORY PARAMETERS ACCESS
  printf '%-22s %-52s %-11s %s\n' tinyshakespeare "(text, $(human $TEXT_SIZE))" - open
  awk 'NF { printf "%-22s %-52s %-11s %s\n", $1, $2, $3, $4 }' <<<"$MODELS"
  echo
  echo 'Every pythia also exists as NAME-deduped. Gated models need their licence accepted and HF_TOKEN.'
}

read_settings() {
  endpoint=${HF_ENDPOINT:-https://huggingface.co}
  endpoint=${endpoint%/}
  require_url HF_ENDPOINT "$endpoint" https://huggingface.co
  endpoint_origin=$(origin_of "$endpoint")
  text_endpoint=${WEFT_TEXT_ENDPOINT:-https://raw.githubusercontent.com}
  text_endpoint=${text_endpoint%/}
  require_url WEFT_TEXT_ENDPOINT "$text_endpoint" https://raw.githubusercontent.com

  hf_home=${HF_HOME:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/huggingface}
  hub_cache=${HF_HUB_CACHE:-$hf_home/hub}
  read_token
  if [[ -n $token && $endpoint == http://* && ! $endpoint =~ ^http://(localhost|127\.|\[::1\]) ]]; then
    warn "HF_ENDPOINT is plain http: HF_TOKEN travels unencrypted."
  fi
  offline=no
  if is_true "${HF_HUB_OFFLINE:-}"; then offline=yes; fi

  timeout_s=$(whole_number HF_HUB_DOWNLOAD_TIMEOUT 10 1 3600)
  max_tries=$(whole_number WEFT_DOWNLOAD_TRIES 5 1 100)
  backoff_ms=$(whole_number WEFT_DOWNLOAD_BACKOFF_MS 1000 0 $MAX_BACKOFF_MS)
}

require_url() { # require_url VARIABLE VALUE EXAMPLE
  local host='(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:[0-9]+)?' path='(/[A-Za-z0-9._~/-]*)?'
  [[ $2 =~ ^https?://$host$path$ ]] && return
  local shown="'$2'"
  [[ $2 != *@* ]] || shown='a value with a user name' # it may hold a password
  die $USAGE "$1: got $shown, expected a URL such as $3. Start it with https:// and leave out user names and queries."
}

whole_number() { # whole_number VARIABLE DEFAULT MIN MAX → its value
  local value=${!1:-$2}
  if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < $3 || value > $4)); then
    die $USAGE "$1: got '$value', expected a whole number from $3 to $4. Change or unset it."
  fi
  echo "$value"
}

# The token is kept out of messages, of the environment of child processes and of command lines.
read_token() {
  local origin=HF_TOKEN file=${HF_TOKEN_PATH:-$hf_home/token}
  token=${HF_TOKEN:-}
  unset HF_TOKEN
  if [[ -z $token && -r $file && ! -d $file ]]; then
    origin=$file
    token=$(<"$file") # drops the newline at the end of the file
  fi
  # Quotes and backslashes too: they would end the string in the configuration given to curl.
  [[ $token =~ ^[A-Za-z0-9._~+/=:-]*$ ]] ||
    die $USAGE "$origin: got a token with spaces, newlines or signs that no token has, expected one word such as hf_.... Paste it again."
}

require_tools() {
  local tool
  for tool in curl python3 flock sha256sum sha1sum awk df stat numfmt sync; do
    command -v "$tool" >/dev/null ||
      die $ENVIRONMENT "$tool: got no such program, expected it on PATH. Install it with the package manager of this system."
  done
}

# ---- one HTTP request -------------------------------------------------------------------------

subject=       # what messages are about
declare -A headers
most_bytes=0   # that the next request may write to a file
child=         # curl or sleep, waited for in the background so that Ctrl-C is served at once

# scheme://host:port, the unit that the token is bound to
origin_of() {
  local rest=${1#*://} origin
  origin=${1%%://*}://${rest%%[/?#]*}
  echo "${origin,,}"
}

at_endpoint() { [[ $(origin_of "$1") == "$endpoint_origin" ]]; }

# URL (it may be signed) and token reach curl through a pipe: a process list shows neither.
curl_config() { # curl_config URL
  local url=${1//\\/%5C}
  printf 'url = "%s"\n' "${url//\"/%22}"
  if [[ -n $token ]] && at_endpoint "$1"; then printf 'header = "Authorization: Bearer %s"\n' "$token"; fi
}

# The most bytes that a file may have, by its kind. Weights may have any size that is announced.
limit_of() { # limit_of FILE
  case ${1##*/} in
    *.safetensors) echo "$XET_BYTES" ;;
    tokenizer.json) echo "$MAX_TOKENIZER_BYTES" ;;
    *) echo "$MAX_CONFIG_BYTES" ;;
  esac
}

# Refuses what the server announces, if no file of this kind has so many bytes.
check_announced() { # check_announced TARGET
  local most
  most=$(limit_of "$1")
  [[ $1 == *.safetensors ]] || ((${remote_size:-0} <= most)) ||
    die $BAD_CONTENT "$subject: got $remote_size bytes announced, expected at most $most for this kind of file. Check the repository and HF_ENDPOINT."
}

# Limits what a process may write to a file, whatever the server announced: what is longer ends with a write error. Not below a
# megabyte, for curl writes headers as well; and never above a limit that is there already.
limit_writes() { # limit_writes BYTES
  local blocks=$((($1 + 1023) / 1024)) now
  now=$(ulimit -S -f)
  ((blocks >= 1024)) || blocks=1024
  if [[ $now == unlimited ]] || ((now > blocks)); then ulimit -S -f "$blocks"; fi
  trap '' XFSZ # an error of write() instead of a signal
}

# Sets curl_status, http_status, redirect (where a 3xx points to) and headers.
# --fail keeps error pages out of the output file. Redirects are followed by curl only on hosts that
# never get the token.
request() { # request URL [CURL OPTION]...
  local url=$1 follow=()
  shift
  at_endpoint "$url" || follow=(--location --max-redirs "$MAX_REDIRECTS" --proto-redir "=${url%%://*},https")
  : >"$scratch/headers"
  {
    limit_writes "$most_bytes"
    exec curl -q --silent --fail --globoff --proto '=http,https' --user-agent weft \
      --header 'Accept-Encoding: identity' --connect-timeout "$timeout_s" --speed-limit 1 --speed-time "$timeout_s" \
      --dump-header "$scratch/headers" --write-out '%{http_code} %{redirect_url}' \
      "${follow[@]}" "$@" --config -
  } < <(curl_config "$url") >"$scratch/answer" &
  child=$!
  if [[ -n $progress_file ]]; then watch_progress; fi
  curl_status=0
  wait "$child" || curl_status=$?
  child=
  read -r http_status redirect <"$scratch/answer" || true
  http_status=${http_status:-000}
  read_headers
}

# Fills headers[name in lower case] from the last block: with proxies and redirects there are several.
read_headers() {
  local line
  headers=()
  while IFS= read -r line; do
    if [[ $line == HTTP/* ]]; then headers=(); fi
    if [[ $line =~ ^([A-Za-z0-9-]+):[[:space:]]*(.*[^[:space:]]) ]]; then
      headers[${BASH_REMATCH[1],,}]=${BASH_REMATCH[2]}
    fi
  done <"$scratch/headers"
}

# The last answer as one word: ok moved missing denied again range norange disk other
verdict() {
  case $curl_status:$http_status in
    *:416) echo range ;;        # nothing after the offset we asked for
    33:*) echo norange ;;       # 200 to a Range request: curl has kept the file as it was
    0:2??) echo ok ;;
    0:3??) echo moved ;;
    22:404 | 22:410) echo missing ;;
    22:401 | 22:403) echo denied ;;
    22:408 | 22:429 | 22:5??) echo again ;;
    5:* | 6:* | 7:* | 28:* | 35:*) echo again ;;                  # no name, no connection, silence
    16:* | 18:* | 52:* | 55:* | 56:* | 92:*) echo again ;;        # cut in the middle
    23:*) echo disk ;;
    *) echo other ;;
  esac
}

cause() {
  case $curl_status in
    0 | 22) echo "HTTP $http_status" ;;
    5 | 6) echo 'a host name that does not resolve' ;;
    7) echo 'no connection' ;;
    18 | 52 | 55 | 56 | 92) echo 'a cut connection' ;;
    28) echo "no answer for $timeout_s s" ;;
    35 | 51 | 53 | 58 | 60 | 77) echo 'a failed TLS handshake or certificate check' ;;
    47) echo 'too many redirects' ;;
    *) echo "curl error $curl_status" ;;
  esac
}

# Waits before attempt TRIES + 1, or gives up.
back_off() { # back_off TRIES
  local wait_ms=$((backoff_ms << ($1 - 1 < 10 ? $1 - 1 : 10))) asked
  (($1 < max_tries)) || give_up "$1"
  wait_ms=$((wait_ms < MAX_BACKOFF_MS ? wait_ms : MAX_BACKOFF_MS))
  asked=${headers[retry-after]:-}
  if [[ $asked =~ ^[0-9]{1,9}$ ]]; then
    ((10#$asked <= MAX_RETRY_AFTER_S)) ||
      die $ENVIRONMENT "$subject: got $(cause) with a request to wait $asked s, expected the file. Run the command again later."
    if ((10#$asked * 1000 > wait_ms)); then wait_ms=$((10#$asked * 1000)); fi
  fi
  warn "$subject: got $(cause). Attempt $(($1 + 1)) of $max_tries follows in $((wait_ms / 1000)).$((wait_ms % 1000 / 100)) s."
  sleep "$((wait_ms / 1000)).$(printf %03d $((wait_ms % 1000)))" &
  child=$!
  wait "$child"
  child=
}

give_up() { # give_up TRIES
  case $curl_status in
    5 | 6 | 7 | 28 | 35)
      die $ENVIRONMENT "$subject: got no usable network to $(origin_of "$asked_url") ($(cause), $1 attempts), expected an answer. Check the network, the proxy and HF_ENDPOINT, then run the command again: it resumes."
      ;;
  esac
  die $ENVIRONMENT "$subject: got $(cause) ($1 attempts), expected the file. The server has trouble: run the command again later, it resumes."
}

# The end of a request that cannot be repeated with better luck.
refuse() {
  local what at=''
  what="$subject: got $(cause)"
  if [[ -n $repo ]]; then at=" and the revision $revision"; fi
  case $(verdict) in
    missing) die $ENVIRONMENT "$what (not found), expected the file. Check the name$at: $asked_url" ;;
    denied) refuse_access "$what" ;;
    disk) die $NO_SPACE "$subject: got a write error, expected to save the file. Free space in $dir, then run the command again: it resumes." ;;
    moved) die $ENVIRONMENT "$what and a redirect to $redirect, expected the file. Check HF_ENDPOINT." ;;
  esac
  if [[ -n $remote_size ]] && ((remote_size > XET_BYTES)); then
    die $ENVIRONMENT "$what for a file of $(human "$remote_size"), expected it whole. The hub serves files over 50 GB through hf_xet alone: use its own client."
  fi
  die $ENVIRONMENT "$what from $(origin_of "$asked_url"), expected the file. Check the network, the proxy and HF_ENDPOINT."
}

refuse_access() { # refuse_access WHAT
  if [[ -z $repo ]]; then die $ENVIRONMENT "$1 (access denied), expected the file. Check WEFT_TEXT_ENDPOINT and the proxy."; fi
  if [[ ${headers[x-error-code]:-} == RepoNotFound ]]; then
    die $ENVIRONMENT "$1 (no such public repository), expected the file. Check the name '$repo'; if the repository is private, set HF_TOKEN."
  fi
  local hint="then set HF_TOKEN to a token from $endpoint/settings/tokens"
  [[ -z $token ]] || hint='and check that HF_TOKEN belongs to the account that accepted it: the token was sent and refused'
  die $ENVIRONMENT "$1 (access denied), expected the file. Accept the licence at $endpoint/$repo, $hint."
}

# ---- what the server says about a file --------------------------------------------------------

remote_size=   # bytes, empty when unknown
remote_hash=   # sha256:HEX, git-sha1:HEX, or empty when the server gives none
remote_etag=   # whatever names this version of the content
remote_url=    # where the bytes are

# Asks for the metadata with HEAD requests; returns 1 when there is no such file.
# Redirects are followed here, hop by hop: those within the endpoint with the token, the first one
# that leaves it (to the content network) without. The hub puts size and hash of a large file into
# X-Linked-* headers of the answer that redirects, so that other host need not be asked at all:
# addresses signed for GET refuse HEAD.
ask() { # ask URL
  local hop=0 tries=0 linked_size='' linked_etag=''
  asked_url=$1 remote_url=$1 remote_size='' remote_hash='' remote_etag=''
  while :; do
    request "$remote_url" --head --output /dev/null --max-time "$timeout_s"
    linked_size=${linked_size:-${headers[x-linked-size]:-}}
    linked_etag=${linked_etag:-${headers[x-linked-etag]:-}}
    case $(verdict) in
      ok) break ;;
      moved)
        ((++hop <= MAX_REDIRECTS)) || die $ENVIRONMENT "$subject: got more than $MAX_REDIRECTS redirects, expected the file. Check HF_ENDPOINT."
        [[ $redirect == https://* || ($redirect == http://* && $remote_url == http://*) ]] || refuse
        remote_url=$redirect
        if [[ -n $linked_etag ]] && ! at_endpoint "$remote_url"; then break; fi
        ;;
      missing) return 1 ;;
      again) back_off $((++tries)) ;;
      *) refuse ;;
    esac
  done
  pin_commit
  remote_size=${linked_size:-${headers[content-length]:-}}
  if [[ $remote_size =~ ^[1-9][0-9]{15,}$ ]]; then remote_size=999999999999999; fi # as much as fits no disk
  [[ $remote_size =~ ^(0|[1-9][0-9]{0,14})$ ]] || remote_size=
  remote_etag=${linked_etag:-${headers[etag]:-}}
  remote_etag=${remote_etag#W/}
  remote_etag=${remote_etag//\"/}
  remote_hash=$(hash_of_name "$remote_etag")
}

# The hub names content by its hash: sha256 for large files, git's blob sha1 for the others.
hash_of_name() { # hash_of_name ETAG
  if [[ $1 =~ ^[0-9a-f]{64}$ ]]; then echo "sha256:$1"; elif [[ $1 =~ ^[0-9a-f]{40}$ ]]; then echo "git-sha1:$1"; fi
}

# A branch may move during a long download: all files come from the commit of the first answer.
pin_commit() {
  local answered=${headers[x-repo-commit]:-}
  if [[ -z $commit && $answered =~ ^[0-9a-f]{40}$ ]]; then commit=$answered; fi
}

# ---- what a file on the disk is ---------------------------------------------------------------

size_of() { stat -L -c %s -- "$1" 2>/dev/null || echo 0; }

content_hash() { # content_hash sha256|git-sha1 FILE
  case $1 in
    sha256) sha256sum <"$2" ;;
    git-sha1) { printf 'blob %s\0' "$(size_of "$2")" && cat -- "$2"; } | sha1sum ;;
  esac | cut -d ' ' -f 1
}

# Sets problem to what is wrong with FILE, as "got X, expected Y. What to do"; empty when all is well.
# What the content looks like comes first: "this is a web page" says more than two hashes.
inspect() { # inspect FILE
  local start size kind=${remote_hash%%:*} found
  problem=
  size=$(size_of "$1")
  start=$(head -c 512 -- "$1" | tr -d '\0' | tr '[:upper:]' '[:lower:]')
  start=${start#"${start%%[![:space:]]*}"}
  if ((size == 0)); then
    problem="got 0 bytes, expected ${remote_size:-some}. The server sent an empty file: try again, or another HF_ENDPOINT."
  elif [[ $start == 'version https://git-lfs'* ]]; then
    problem='got a git-lfs pointer, expected the file it points to. The server does not hold the large files: use another HF_ENDPOINT.'
  elif [[ $start == '<!doctype html'* || $start == '<html'* ]]; then
    problem='got a web page (HTML), expected the file. A login page or proxy may have answered: check the network and HF_ENDPOINT.'
  elif [[ -n $remote_size ]] && ((size != remote_size)); then
    problem="got $size bytes, expected $remote_size. Run the command again; if it stays, the server is wrong about this file."
  elif [[ -n $remote_hash ]]; then
    found=$(content_hash "$kind" "$1")
    [[ $kind:$found == "$remote_hash" ]] ||
      problem="got $kind $found, expected ${remote_hash#*:}. The content was damaged or replaced: run the command again."
  fi
}

free_bytes() { # free_bytes DIRECTORY
  local where=$1
  while [[ ! -e $where ]]; do where=$(dirname -- "$where"); done
  df -Pk -- "$where" | awk 'NR == 2 { printf "%.0f", $4 * 1024 }'
}

require_space() { # require_space DIRECTORY BYTES
  local free
  free=$(free_bytes "$1")
  ((free >= $2)) ||
    die $NO_SPACE "$1: got $(human "$free") free, expected $(human "$2") for $subject. Free space or choose another disk with --out."
}

# ---- receiving one file -----------------------------------------------------------------------

progress_file='' # the file a progress line is drawn for; empty for none

watch_progress() {
  local have
  while kill -0 "$child" 2>/dev/null; do
    have=$(size_of "$progress_file")
    printf '\r  %s of %s (%d%%)    ' "$(human "$have")" "$(human "$remote_size")" $((100 * have / remote_size)) >&2
    sleep 0.2
  done
  printf '\r%40s\r' '' >&2
}

# Receives into TARGET.part, going on from what an earlier run left there.
# The sidecar says which version that was: another one is thrown away, not continued.
receive() { # receive TARGET
  local part=$1.part address=$asked_url have=0 best=0 tries=0 resume
  while :; do
    discard_other_version "$part"
    have=$(size_of "$part")
    if [[ -n $remote_size ]]; then
      if ((have > remote_size)); then : >"$part" && have=0; fi
      if ((have == remote_size && have > 0)); then return; fi
      require_space "$dir" $((remote_size - have))
      if progress_wanted && ((remote_size >= PROGRESS_BYTES)); then progress_file=$part; fi
    fi
    resume=()
    if ((have > 0)); then resume=(--continue-at "$have"); fi
    most_bytes=${remote_size:-$(most_of_unknown "$1")}
    request "$remote_url" --output "$part" "${resume[@]}"
    progress_file=
    case $(verdict) in
      ok) return ;;
      norange)
        warn "$subject: the server cannot resume. Starting from 0."
        : >"$part"
        continue
        ;;
      range) # all of it is here already, or the part is not what it seems: inspection decides
        if [[ -z $remote_size ]] || ((have == remote_size)); then return; fi
        : >"$part"
        back_off $((++tries))
        ;;
      denied) # an address signed for an hour has expired; at the endpoint itself it is final
        ! at_endpoint "$remote_url" || refuse
        back_off $((++tries))
        ;;
      again)
        have=$(size_of "$part")
        if ((have > best)); then best=$have tries=0; fi # a poor line may take all the attempts it needs
        back_off $((++tries))
        ;;
      moved)
        rm -f -- "$part"
        refuse
        ;;
      disk)
        have=$(size_of "$part")
        ((have >= most_bytes && have > 0)) || refuse
        rm -f -- "$part" "$part.etag"
        die $BAD_CONTENT "$subject: got more than ${remote_size:+the announced }$most_bytes bytes, expected no more of this file. Check the repository and HF_ENDPOINT."
        ;;
      *) refuse ;;
    esac
    ask_again "$address"
  done
}

# The most bytes to receive of a file whose size the server does not announce: what its kind may have, and not all of the disk.
most_of_unknown() { # most_of_unknown TARGET
  local most free
  most=$(limit_of "$1")
  free=$(($(free_bytes "$dir") * 9 / 10))
  echo $((free < most ? free : most))
}

# A pinned hash outlives the question; everything else is asked anew, for a fresh signed address.
ask_again() { # ask_again URL
  local pinned=$pinned_hash size=$remote_size
  ask "$1" || refuse
  if [[ -n $pinned ]]; then remote_hash=$pinned remote_size=$size; fi
}

discard_other_version() { # discard_other_version PART
  local now="$remote_etag $remote_size $remote_hash" before=''
  if [[ -f $1.etag ]]; then before=$(<"$1.etag"); fi
  if [[ $before == "$now" ]]; then return; fi
  if [[ -s $1 ]]; then warn "$subject: the unfinished $1 is of another version. Starting from 0."; fi
  { : >"$1" && printf '%s\n' "$now" >"$1.etag"; } 2>/dev/null || die $NO_SPACE "$1.etag: got a write error, expected to save it. Free space in $dir."
}

# The one place where a final name comes to be.
publish() { # publish TARGET
  sync -- "$1.part" 2>/dev/null || true # not every file system can; the rename is atomic all the same
  mv -f -- "$1.part" "$1" || die $ENVIRONMENT "$1: got an error on rename, expected the finished file there. Check the directory."
  sync -- "$dir" 2>/dev/null || true
  rm -f -- "$1.part.etag"
}

# Receives, inspects, publishes. A part continued from an earlier run gets a second chance from 0.
deliver() { # deliver TARGET
  local target=$1 resumed=no
  if [[ -s $target.part ]]; then resumed=yes; fi
  receive "$target"
  inspect "$target.part"
  if [[ -n $problem && $resumed == yes ]]; then
    warn "$subject: $problem Starting from 0."
    rm -f -- "$target.part" "$target.part.etag"
    receive "$target"
    inspect "$target.part"
  fi
  if [[ -n $problem ]]; then
    rm -f -- "$target.part" "$target.part.etag" # bad content is not worth going on from
    die $BAD_CONTENT "$subject: $problem"
  fi
  [[ -n $remote_hash ]] || warn "$subject: the server names no hash; only the size was checked."
  publish "$target"
  note "  $target ($(human "$(size_of "$target")")${remote_hash:+, ${remote_hash%%:*} ok})"
}

# Brings the file described by remote_* to TARGET unless it is there already.
bring() { # bring TARGET
  check_announced "$1"
  if [[ $dry_run == yes ]]; then
    if [[ -f $1 ]] && (($(size_of "$1") == ${remote_size:-0})); then
      printf '%10s  %s\n' here "$1"
    else
      printf '%10s  %s\n' "$(human "${remote_size:-0}")" "$asked_url"
      planned_bytes=$((planned_bytes + ${remote_size:-0}))
    fi
    return
  fi
  if [[ -f $1 ]]; then
    inspect "$1"
    if [[ -z $problem ]]; then
      note "  $1 (already here)"
      return
    fi
    warn "$1: $problem Replacing it."
  fi
  deliver "$1"
}

# ---- the hub's own cache ----------------------------------------------------------------------

# Sets snapshot to the cached checkout of this revision, if there is one.
find_snapshot() {
  local base="$hub_cache/models--${repo/\//--}" at=$revision
  snapshot=
  if [[ -f $base/refs/$revision ]]; then at=$(<"$base/refs/$revision"); fi
  if [[ $at =~ ^[0-9a-f]{40}$ && -d $base/snapshots/$at ]]; then
    snapshot=$base/snapshots/$at
    commit=$at # what the cache lacks comes from the same commit
  fi
}

snapshot_is_whole() {
  [[ -n $snapshot && -f $snapshot/config.json && -f $snapshot/tokenizer.json ]] &&
    [[ -f $snapshot/model.safetensors || -f $snapshot/model.safetensors.index.json ]]
}

# Takes FILE from the cache to TARGET; returns 1 if it is not there or not what its name says.
# A snapshot is a directory of links to blobs that are named by their hash.
take_from_cache() { # take_from_cache FILE TARGET
  local cached=$snapshot/$1
  [[ -n $snapshot && -f $cached ]] || return 1
  if [[ $dry_run == yes ]]; then
    printf '%10s  %s\n' cached "$cached"
    return
  fi
  remote_size='' remote_hash=$(hash_of_name "$(basename -- "$(readlink -f -- "$cached")")")
  inspect "$cached"
  if [[ -n $problem ]]; then
    warn "$cached: $problem Passing over the cached file."
    return 1
  fi
  if [[ $2 -ef $cached ]] || cmp -s -- "$cached" "$2"; then
    note "  $2 (already here)"
    return
  fi
  if [[ $1 == *.safetensors ]] && ln -fL -- "$cached" "$2" 2>/dev/null; then
    note "  $2 (linked from the hub cache)" # no second copy of the weights on one file system
    return
  fi
  require_space "$dir" "$(size_of "$cached")"
  rm -f -- "$2.part" "$2.part.etag" # unlike a received part, half a copy must not be continued
  cp -L -- "$cached" "$2.part" || die $NO_SPACE "$2.part: got a write error, expected a copy of $cached. Free space in $dir."
  publish "$2"
  note "  $2 (copied from the hub cache)"
}

# ---- one file of a model, from wherever it is --------------------------------------------------

url_of() { echo "$endpoint/$repo/resolve/${commit:-$revision}/$1"; }

# Brings FILE to $dir; returns 1 if it is optional and nowhere to be found.
fetch() { # fetch FILE required|optional
  local target=$dir/$1
  subject=$repo/$1
  if take_from_cache "$1" "$target"; then return; fi
  if [[ $offline == yes ]]; then
    use_unchecked "$target" "$2"
    return
  fi
  # A whole snapshot without an optional file means that the repository has none.
  if [[ $2 == optional ]] && snapshot_is_whole; then return 1; fi
  if ! ask "$(url_of "$1")"; then
    [[ $2 == optional ]] || refuse
    return 1
  fi
  bring "$target"
}

use_unchecked() { # use_unchecked TARGET required|optional
  if [[ ! -f $1 ]]; then
    [[ $2 == required ]] || return 1
    die $ENVIRONMENT "$subject: got HF_HUB_OFFLINE and no such file in $hub_cache or $dir, expected it there. Unset HF_HUB_OFFLINE to download it."
  fi
  remote_size='' remote_hash=''
  inspect "$1"
  [[ -z $problem ]] || die $BAD_CONTENT "$1: $problem"
  note "  $1 (already here, not compared: offline)"
}

# Prints the weight files an index names, or the complaint about it with status 3.
# The index is somebody else's text, and its names become paths: plain names only.
shards_of() { # shards_of INDEX
  python3 - "$1" <<'END'
import json, os, re, sys

MAX_BYTES, MAX_SHARDS = 8 << 20, 1024

def complain(text):
    print(text)
    sys.exit(3)

def show(value):
    return json.dumps(value)[:100]

if os.path.getsize(sys.argv[1]) > MAX_BYTES:
    complain(f"got more than {MAX_BYTES} bytes, expected an index. Check the repository.")
try:
    with open(sys.argv[1], encoding="utf-8") as file:
        index = json.load(file)
except (ValueError, RecursionError):
    complain("got something that is not JSON, expected an index of weight files. Check the repository.")
weight_map = index.get("weight_map") if isinstance(index, dict) else None
if not isinstance(weight_map, dict) or not weight_map:
    complain("weight_map: got no tensors, expected tensor names with their files. Check the repository.")
for tensor, shard in weight_map.items():
    if not isinstance(shard, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,240}\.safetensors", shard):
        complain(f"weight_map[{show(tensor)}]: got {show(shard)}, expected a plain file name that ends in "
                 ".safetensors. Do not trust this repository.")
shards = sorted(set(weight_map.values()))
if len(shards) > MAX_SHARDS:
    complain(f"weight_map: got {len(shards)} files, expected at most {MAX_SHARDS}. Check the repository.")
print("\n".join(shards))
END
}

# Sets weights to the names of the weight files: one, or what the index lists.
find_weights() {
  local index=model.safetensors.index.json listed
  weights=(model.safetensors)
  subject=$repo/model.safetensors
  if [[ -n $snapshot && -f $snapshot/model.safetensors ]]; then return; fi
  if [[ $offline == yes && -f $dir/model.safetensors ]]; then return; fi
  if [[ $offline == no && ! (-n $snapshot && -f $snapshot/$index) ]] && ask "$(url_of model.safetensors)"; then return; fi

  # A dry run needs the list as well, but must not leave it behind.
  local where=$dir
  if [[ $dry_run == yes ]]; then where=$scratch; fi
  dry_run=no dir=$where fetch $index optional ||
    die $ENVIRONMENT "$repo: got neither model.safetensors nor $index, expected one of them at revision '$revision'. Older revisions have other formats only: choose another one."
  subject=$repo/$index
  if ! listed=$(shards_of "$where/$index"); then
    rm -f -- "$where/$index" # never leave a list that must not be followed
    die $BAD_CONTENT "$subject: $listed"
  fi
  mapfile -t weights <<<"$listed"
}

# All weights are asked for before the first is received: a missing shard or a disk that is too
# small shows now, not hours later.
require_space_for_weights() {
  local file needed=0 have
  if [[ $offline == yes ]]; then return; fi
  for file in "${weights[@]}"; do
    if [[ -n $snapshot && -f $snapshot/$file ]]; then continue; fi
    subject=$repo/$file
    ask "$(url_of "$file")" || refuse
    have=$(($(size_of "$dir/$file") == ${remote_size:-0} ? ${remote_size:-0} : $(size_of "$dir/$file.part")))
    needed=$((needed + (${remote_size:-0} > have ? ${remote_size:-0} - have : 0)))
  done
  subject="the weights of $repo"
  require_space "$dir" "$needed"
}

# ---- a model, a text --------------------------------------------------------------------------

# Sets repo and dir for a name of the catalogue or ORG/MODEL.
resolve_name() { # resolve_name NAME
  local name=${1,,} plain known
  plain=${name%-deduped}
  repo=$(awk -v name="$plain" '$1 == name { print $2 }' <<<"$MODELS")
  if [[ -n $repo && ($name == "$plain" || $repo == */pythia-*) ]]; then
    dir=$name
    [[ $name == "$plain" ]] || repo+=-deduped
  elif [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$ && $1 != *..* ]]; then
    repo=$1 dir=${1#*/}
  else
    mapfile -t known < <(awk 'NF { print $1 }' <<<"$MODELS")
    die $USAGE "$1: got an unknown name, expected one of --list or ORG/MODEL.$(nearest "$1" tinyshakespeare "${known[@]}")"
  fi
  dir=$out_dir/$dir
  [[ $revision == main ]] || dir+=-${revision//\//-}
}

# Two runs on one directory: the second waits, then finds everything in place.
open_directory() {
  if [[ $dry_run == yes ]]; then return; fi
  if ! mkdir -p -- "$dir" 2>/dev/null || [[ ! -w $dir ]]; then
    die $USAGE "$dir: got no directory that can be written, expected one. Choose another with --out or --data."
  fi
  exec {lock}>"$dir/.download.lock"
  if flock -n "$lock"; then return; fi
  note "$dir: another download is at work here; waiting for it."
  flock "$lock" &
  child=$!
  wait "$child"
  child=
}

close_directory() {
  if [[ $dry_run == yes ]]; then return; fi
  exec {lock}>&-
}

download_model() { # download_model NAME
  resolve_name "$1"
  commit='' pinned_hash=''
  note "$repo at $revision:"
  open_directory
  find_snapshot
  fetch config.json required
  fetch generation_config.json optional || true
  fetch tokenizer.json required
  fetch tokenizer_config.json optional || true
  fetch chat_template.jinja optional || true
  fetch special_tokens_map.json optional || true
  find_weights
  require_space_for_weights
  local file
  for file in "${weights[@]}"; do fetch "$file" required; done
  close_directory
  model_dirs+=("$dir")
}

download_text() {
  local target=$data_dir/tinyshakespeare.txt
  repo='' commit='' snapshot='' dir=$data_dir subject=tinyshakespeare.txt
  pinned_hash=sha256:$TEXT_SHA256
  note 'tinyshakespeare:'
  open_directory
  remote_size=$TEXT_SIZE remote_hash=$pinned_hash remote_etag='' asked_url=$text_endpoint/$TEXT_PATH
  if [[ -f $target ]] && inspect "$target" && [[ -z $problem ]]; then
    note "  $target (already here)" # the pin is known here: no need to ask
  elif [[ $offline == yes ]]; then
    die $ENVIRONMENT "$subject: got HF_HUB_OFFLINE and no whole $target, expected it there. Unset HF_HUB_OFFLINE to download it."
  else
    ask "$asked_url" || refuse
    remote_hash=$pinned_hash remote_size=$TEXT_SIZE
    bring "$target"
  fi
  close_directory
  text_file=$target
}

# What to do with the files, ready to paste.
print_next_steps() {
  local dir name convert='.venv/bin/python scripts/convert_hf.py' prepare='.venv/bin/python dev/prepare_data.py' infer=./infer_pythia
  if [[ $(readlink -f -- "${BASH_SOURCE[0]}") == */share/weft/dev/* ]]; then # by make install
    convert=weft-convert-hf prepare=weft-prepare-data infer=infer_pythia
  fi
  for dir in "${model_dirs[@]}"; do
    name=$(basename -- "$dir").bin
    printf '%s %q -o %q && %s --model %q --prompt "Hello"\n' "$convert" "$dir" "$name" "$infer" "$name"
  done
  if [[ -n $text_file ]]; then
    printf '%s %q --tokenizer %q -o data/mine\n' "$prepare" "$text_file" "${model_dirs[0]:-models/tiny-llama}/tokenizer.json"
  fi
}

# ---- the whole --------------------------------------------------------------------------------

stop() { # stop CODE: a signal came
  trap '' INT TERM HUP
  say "stopped: unfinished files stay as .part; run the same command again to go on."
  exit "$1"
}

clean_up() {
  local running
  mapfile -t running < <(jobs -p) # not $child: a signal may come before that is set
  if ((${#running[@]})); then kill "${running[@]}" 2>/dev/null || true; fi
  if [[ -n $scratch ]]; then rm -rf -- "$scratch"; fi
}

main() {
  local name
  parse_options "$@"
  read_settings
  require_tools
  for name in "${names[@]}"; do # a typo in the last name shows before the first download
    [[ $name == tinyshakespeare ]] || resolve_name "$name"
  done

  scratch=''
  trap clean_up EXIT
  trap 'stop 130' INT
  trap 'stop 143' TERM HUP
  scratch=$(mktemp -d)

  model_dirs=() text_file='' planned_bytes=0
  for name in "${names[@]}"; do
    if [[ $name == tinyshakespeare ]]; then download_text; else download_model "$name"; fi
  done
  if [[ $dry_run == yes ]]; then
    printf '%10s  in all\n' "$(human "$planned_bytes")"
  else
    note 'Done. Next:'
    print_next_steps
  fi
}

main "$@"

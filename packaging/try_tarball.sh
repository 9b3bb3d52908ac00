#!/usr/bin/env bash
# try_tarball.sh TARBALL: runs what make dist made in a bare Debian 12, without compiler, Python or libraries. Needs root and
# debootstrap. MIRROR= names a Debian mirror.
set -euo pipefail
tarball=$(readlink -f "$1")
root=$(mktemp -d)
trap 'umount "$root/proc" 2>/dev/null; rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase bookworm "$root" ${MIRROR:+"$MIRROR"} >/dev/null
mount -t proc proc "$root/proc" # the loader finds the libraries beside a program by /proc/self/exe
tar -C "$root/opt" -xzf "$tarball"
inside() { chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root bash -c "cd /opt/weft-*/ && PATH=\$PWD/bin:\$PATH && $1"; }
inside '! command -v g++ && ! command -v make && ! command -v python3'
inside 'train_llama --version && infer_pythia --version'
text=$(inside 'infer_pythia --model share/weft/models/tiny-llama.bin --prompt "Once upon a time" --max-tokens 40')
echo "$text"
[[ $text == "Once upon a time"?* ]] || { echo "try_tarball: no text" >&2; exit 1; }
inside 'infer_pythia --model share/weft/models/tiny-pythia.bin --bench --max-tokens 32'
inside 'train_llama --config tiny --bench --micro-batch 1 --seq-len 64'
inside 'test -s share/man/man1/train_llama.1 && ls lib/weft share/weft/licences'
echo "try_tarball: $(basename "$tarball") runs in a bare Debian"

#!/usr/bin/env bash
# pack_libraries.sh DIR: copies the shared libraries that DIR/bin's programs need into DIR/lib/weft, and their licences into
# DIR/share/weft/licences. Not those of glibc, which every system has, nor those that are loaded while the programs run.
set -euo pipefail
root=$1
die() { echo "dist: $1" >&2; exit 4; }
command -v dpkg-query >/dev/null || die "no dpkg-query, which knows the licences of the libraries. Make the tarball on Debian or Ubuntu"
mkdir -p "$root/lib/weft" "$root/share/weft/licences"
# All of them, also what a library needs in turn.
ldd "$root"/bin/train_llama "$root"/bin/infer_pythia | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  while read -r name path; do
    case $name in libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libresolv.so.* | ld-linux*) continue ;; esac
    real=$(readlink -f "$path")
    package=$(dpkg-query --search "$real" "${real#/usr}" "/usr$real" 2>/dev/null | head -n 1 | cut -d: -f1 || true)
    [ -n "$package" ] || die "$real belongs to no package: its licence is not known"
    licence=/usr/share/doc/$package/copyright
    [ -e "$licence" ] || die "$licence is missing"
    install -m 644 "$real" "$root/lib/weft/$name"
    install -m 644 "$licence" "$root/share/weft/licences/$package"
    echo "dist: packed $name of $package"
  done

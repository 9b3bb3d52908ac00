#!/usr/bin/env python3
"""Writes compile_commands.json: how each source file is compiled, for editors and clang tools. `make compile_commands.json`
calls it with the flags of the build."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAINS = ("train_llama.cu", "infer_pythia.cu")  # plain C++ in spite of their names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flags", required=True, help="of host code")
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--cuda", help="where the CUDA toolkit lies; without it GPU code is left out")
    parser.add_argument("--arch", default="90a", help="the architecture that an editor shows GPU code for (default 90a)")
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    names = subprocess.run(["git", "ls-files", "*.cpp", "*.cu"], cwd=ROOT, capture_output=True, text=True, check=True)
    host = [*shlex.split(options.compiler), *shlex.split(options.flags)]
    if options.cuda:
        host += ["-isystem", f"{options.cuda}/include"]
    commands = []
    for name in names.stdout.split("\n")[:-1]:
        if name.endswith(".cpp") or name in MAINS:
            command = [*host, *(["-x", "c++"] if name in MAINS else []), "-c", name]
        elif options.cuda:  # as clangd reads CUDA
            command = ["clang++", "-std=c++20", "-I.", "-x", "cuda", f"--cuda-gpu-arch=sm_{options.arch}",
                       f"--cuda-path={options.cuda}", "-c", name]
        else:
            continue
        commands.append({"directory": str(ROOT), "file": name, "arguments": command})
    options.output.write_text(json.dumps(commands, indent=1) + "\n")
    print(f"{options.output}: {len(commands)} files")


if __name__ == "__main__":
    main()

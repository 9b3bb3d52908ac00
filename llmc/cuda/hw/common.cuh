// The parts of this folder that kernels need on any GPU, in one include.
#pragma once

#include <cuda_runtime.h>

#include "llmc/cuda/hw/block.cuh"
#include "llmc/cuda/hw/fast_math.cuh"
#include "llmc/cuda/hw/pack.cuh"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/runtime/error.h"

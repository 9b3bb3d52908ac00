// Everything that a kernel needs of this folder whatever the GPU: one include for kernels that use most of it.
#pragma once

#include <cuda_runtime.h>

#include "llmc/cuda/hw/block.cuh"
#include "llmc/cuda/hw/fast_math.cuh"
#include "llmc/cuda/hw/pack.cuh"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/runtime/error.h"

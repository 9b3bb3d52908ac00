// Rotary position embedding on the GPU, half-split pairing, in place. The specification is llmc/cpu/rope.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/model/config.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

// weft::rope_table() on the device: cos and sin [positions, half] fp32.
struct DeviceRopeTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  std::int64_t positions = 0, half = 0;
  // In training, [B, T]: where the document of each token begins (Visibility). Its tokens have positions from 0 on. Null: one
  // document.
  const std::int32_t* document_starts = nullptr;
};

// Copies the table to cos and sin [positions, half] on the device, queued in `stream`; `table` must outlive the copy.
DeviceRopeTable upload_rope_table(const RopeTable& table, float* cos, float* sin, cudaStream_t stream);

// Rotates x in place: B x T tokens of NH heads in float, bf16 or fp16; token t has position first_position + t, less where its
// document begins, which must be below table.positions.
template <typename Storage>
void rope_forward(HeadViewOf<Storage> x, const DeviceRopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                  std::int64_t first_position, cudaStream_t stream);
// The gradient is the rotation by the opposite angle, in place on dx.
template <typename Storage>
void rope_backward(HeadViewOf<Storage> dx, const DeviceRopeTable& table, std::int64_t B, std::int64_t T,
                   std::int64_t NH, std::int64_t first_position, cudaStream_t stream);

// Queries (NH heads) and keys (NKV heads) in one launch.
template <typename Storage>
void rope_forward(HeadViewOf<Storage> q, HeadViewOf<Storage> k, const DeviceRopeTable& table, std::int64_t B,
                  std::int64_t T, std::int64_t NH, std::int64_t NKV, std::int64_t first_position, cudaStream_t stream);
template <typename Storage>
void rope_backward(HeadViewOf<Storage> dq, HeadViewOf<Storage> dk, const DeviceRopeTable& table, std::int64_t B,
                   std::int64_t T, std::int64_t NH, std::int64_t NKV, std::int64_t first_position, cudaStream_t stream);

}  // namespace weft::cuda

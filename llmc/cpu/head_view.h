// The fp32 views of attention and RoPE on the CPU.
#pragma once

#include "llmc/model/head_view.h"

namespace weft::cpu {

using HeadView = HeadViewOf<float>;
using ConstHeadView = HeadViewOf<const float>;

}  // namespace weft::cpu

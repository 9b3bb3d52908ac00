// What this GPU's memory gives to a kernel that only reads: the ceiling that decoding is compared with.
#pragma once

namespace weft::cuda {

// GB/s (10^9 bytes) of a plain read of `gigabytes` of device memory, much more than any cache; median of several passes of
// the best of a few launch shapes. Less is read where so much is not free.
double measure_read_bandwidth(double gigabytes = 4);

}  // namespace weft::cuda

// Plans the layout of one allocation, on the host or on a GPU, together with the pointers that will point to them. The
// plan needs no memory yet (--dry-run only prints it); bind() sets the pointers once the arena is allocated.
//
//   float *residual = nullptr, *logits = nullptr;
//   ArenaLayout layout("workspace");
//   layout.reserve(&residual, N * C);
//   layout.reserve(&logits, N * V);
//   const HostArena arena(layout.plan());     // or cuda::DeviceArena
//   layout.bind(arena);
//
// ArenaLayout stores the addresses of the pointers: the objects that hold them must not move or be destroyed before bind().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/checked.h"

namespace weft {

class ArenaLayout {
 public:
  explicit ArenaLayout(const std::string& name) : plan_(name) {}

  // A region of `elements` T, aligned to kRegionAlignment.
  template <typename T>
  void reserve(T** pointer, std::int64_t elements) {
    reserve_bytes(pointer, checked_mul(static_cast<std::uint64_t>(elements), sizeof(T), plan_.name()));
  }
  template <typename T>
  void reserve_bytes(T** pointer, std::uint64_t bytes) {
    wanted_.push_back({reinterpret_cast<void**>(pointer), plan_.add(bytes)});
  }

  // `pointer` will point to the region that an earlier reserve(other, ...) has planned; without one: Exit::internal.
  template <typename T>
  void share(T** pointer, T** other) {
    const auto has_other = [other](const Wanted& wanted) { return wanted.pointer == reinterpret_cast<void**>(other); };
    const auto found = std::find_if(wanted_.begin(), wanted_.end(), has_other);
    if (found == wanted_.end()) fail(Exit::internal, "%s: a shared region that nobody wanted", plan_.name().c_str());
    wanted_.push_back({reinterpret_cast<void**>(pointer), found->offset});
  }

  // For alternatives that are never in use at the same time: they share one region, as large as the largest of them.
  void reserve_one_of(std::initializer_list<const ArenaLayout*> alternatives) {
    std::uint64_t bytes = 0;
    for (const ArenaLayout* each : alternatives) bytes = std::max(bytes, each->plan_.bytes());
    const std::uint64_t begin = plan_.add(bytes);
    for (const ArenaLayout* each : alternatives) {
      for (const Wanted& wanted : each->wanted_) wanted_.push_back({wanted.pointer, begin + wanted.offset});
    }
  }

  const MemoryPlan& plan() const { return plan_; }

  // `arena`: a HostArena or DeviceArena made from plan().
  template <typename Arena>
  void bind(const Arena& arena) const {
    for (const Wanted& wanted : wanted_) *wanted.pointer = arena.template at<std::byte>(wanted.offset);
  }

 private:
  struct Wanted {
    void** pointer;
    std::uint64_t offset;
  };

  MemoryPlan plan_;
  std::vector<Wanted> wanted_;
};

}  // namespace weft

// The control groups (cgroups) of this process: where their limits are, and how much memory they allow.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// The text of /proc/self/cgroup; empty if it cannot be read.
std::string cgroup_membership();
inline constexpr const char* kCgroupRoot = "/sys/fs/cgroup";

// The directories that may hold a limit of `controller` ("cpu", "memory") for a process: that of its cgroup and those of
// all ancestors, from the innermost to the root, in every hierarchy. `membership`: see above. `root`: where the
// hierarchies (version 2, or version 1 with a directory for each controller) are mounted. Directories that do not exist
// are among them: in a container the path may be the host's, of which only a part exists there.
std::vector<std::string> cgroup_directories(std::string_view membership, std::string_view controller,
                                            const std::string& root);

// Bytes of memory that the cgroups of a process allow; the greatest number without a limit.
struct CgroupMemory {
  std::uint64_t limit = std::numeric_limits<std::uint64_t>::max();  // the smallest one
  std::uint64_t free = std::numeric_limits<std::uint64_t>::max();   // the least that one of them has left
};
// Arguments as above. File caches count as free: the kernel gives them up.
CgroupMemory cgroup_memory(std::string_view membership, const std::string& root);

}  // namespace weft

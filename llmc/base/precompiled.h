// What most host files include, parsed once for a build instead of once a file: a third of the time of a first build. Only the
// Makefile includes it. Every file still names what it needs, and `make headers` and clang-tidy, which know nothing of this
// one, hold it to that. Without `#pragma once`, of which compilers warn in a header that they precompile.
#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmc/base/json.h"

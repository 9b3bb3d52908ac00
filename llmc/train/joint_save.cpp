#include "llmc/train/joint_save.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <system_error>

#include "llmc/base/error_from.h"
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/base/parallel.h"
#include "llmc/comm/heartbeat.h"
#include "llmc/file/data_check.h"
#include "llmc/train/checkpoint.h"

namespace weft {

namespace {

constexpr unsigned kThreads = 2;                // of each rank; few, because several ranks share a machine
constexpr std::int64_t kPieceValues = 1 << 18;  // 1 MB: stays in a core's cache between conversion, hash and write

// The ranges that each rank has, by rank. Called by all ranks together.
std::vector<std::vector<Range>> gather_ranges(Communicator& ranks, const std::vector<Range>& own) {
  std::vector<Range> parts;
  std::int64_t end = 0;
  for (const std::int64_t count : ranks.gather(std::ssize(own))) {
    parts.push_back({end, end + count});
    end += count;
  }
  std::vector<Range> all(static_cast<std::size_t>(end));
  std::copy(own.begin(), own.end(), all.begin() + parts[static_cast<std::size_t>(ranks.rank())].begin);
  ranks.gather(all.data(), parts);
  std::vector<std::vector<Range>> of_rank;
  for (const Range& part : parts) of_rank.emplace_back(all.begin() + part.begin, all.begin() + part.end);
  return of_rank;
}

}  // namespace

JointSave::JointSave(Communicator& ranks, CheckpointKeeper* keeper, const Optimizer& optimizer,
                     const TensorTable& table, const std::vector<Range>& own)
    : ranks_(ranks), keeper_(keeper), optimizer_(optimizer), table_(table), state_(state_tensors(optimizer, table)) {
  const std::size_t tensors = state_.size();
  for (const std::vector<Range>& ranges : gather_ranges(ranks, own)) {
    const std::int64_t first = std::ssize(parts_);
    for (std::size_t t = 0; t < tensors; ++t) {
      const TensorSpec& spec = spec_of(t);
      for (const Range& range : ranges) {
        const Range part = common(range, elements_of(spec));
        if (part.size() > 0) parts_.push_back({t, {part.begin - spec.offset, part.end - spec.offset}});
      }
    }
    parts_of_rank_.push_back({first, std::ssize(parts_)});
  }
  hashes_.resize(parts_.size());
  tensors_.resize(tensors);

  parts_of_tensor_.resize(tensors);
  for (std::size_t p = 0; p < parts_.size(); ++p) parts_of_tensor_[parts_[p].tensor].push_back(p);
  for (std::size_t t = 0; t < tensors; ++t) {
    std::vector<std::size_t>& parts = parts_of_tensor_[t];
    const auto begin_of = [&](std::size_t p) { return parts_[p].elements.begin; };
    std::sort(parts.begin(), parts.end(), [&](std::size_t a, std::size_t b) { return begin_of(a) < begin_of(b); });
    std::int64_t end = 0;
    for (const std::size_t p : parts) end = begin_of(p) == end ? parts_[p].elements.end : -1;
    if (end != spec_of(t).elements) {
      fail(Exit::internal, "%s: the ranks do not have each element once", name_of(t).c_str());
    }
  }
  // Laid end to end the tensors have `all` elements; each is read back by the rank in whose equal share it begins.
  std::int64_t all = 0;
  for (std::size_t t = 0; t < tensors; ++t) all += spec_of(t).elements;
  std::size_t next = 0;
  std::int64_t begin_of_next = 0;
  for (std::int64_t r = 1; r <= ranks.size(); ++r) {
    const auto first = static_cast<std::int64_t>(next);
    while (next < tensors && begin_of_next < even_border(all, ranks.size(), r))
      begin_of_next += spec_of(next++).elements;
    read_by_.push_back({first, static_cast<std::int64_t>(next)});
  }
}

std::string JointSave::name_of(std::size_t tensor) const {
  return state_tensor_name(optimizer_, role_of(tensor), spec_of(tensor));
}

bool JointSave::ended() const {
  return error_from([&] { ranks_.check(); }).has_value();
}

std::string JointSave::save(const TrainState& state, const StateCopy& copy, const std::vector<float>& fp8_state) {
  std::optional<Heartbeat> at_work;  // a slow disk may take longer than the other ranks' time limit
  try {
    at_work.emplace(ranks_);
  } catch (const std::system_error&) {  // the user's limit of threads is reached: save without, within the time limit
  }
  std::optional<SharedCheckpoint> made;
  try {
    do_together(ranks_, [&] {
      if (keeper_ != nullptr) made.emplace(keeper_->begin_shared(state, table_, fp8_state));
    });
    const Files files = tell_files(made ? &*made : nullptr);
    do_together(ranks_, [&] { write_parts(files, copy); });
    ranks_.gather(hashes_.data(), parts_of_rank_);
    do_together(ranks_, [&] { read_tensors(files); });
    ranks_.gather(tensors_.data(), read_by_);
    return keeper_ != nullptr ? keeper_->commit_shared(*made, state, table_, tensors_) : std::string();
  } catch (...) {
    if (keeper_ != nullptr) keeper_->discard(state.step);
    throw;
  }
}

JointSave::Files JointSave::tell_files(const SharedCheckpoint* made) {
  Files files;
  if (made != nullptr) files = {made->model_path, made->training_path, made->offsets};
  files.model = ranks_.broadcast_text(files.model);
  files.training = ranks_.broadcast_text(files.training);
  files.offsets.resize(tensors_.size());
  ranks_.broadcast_bytes(reinterpret_cast<std::byte*>(files.offsets.data()),
                         static_cast<std::int64_t>(files.offsets.size() * sizeof files.offsets[0]), 0);
  return files;
}

void JointSave::write_parts(const Files& files, const StateCopy& copy) {
  SharedFile model(files.model), training(files.training);
  const Range mine = parts_of_rank_[rank()];
  // An injected fault counts the bytes of a save in the order of the parts, so it needs one thread.
  in_parallel(static_cast<std::size_t>(mine.size()), write_fault_armed() ? 1 : kThreads, [&](std::size_t i) {
    const std::size_t number = static_cast<std::size_t>(mine.begin) + i;
    const auto& [tensor, elements] = parts_[number];
    SharedFile& file = in_model_file(tensor) ? model : training;
    std::vector<float> buffer(static_cast<std::size_t>(std::min(kPieceValues, elements.size())));
    Xxh3Stream hash;
    for (std::int64_t begin = elements.begin; begin < elements.end; begin += kPieceValues) {
      const auto first = static_cast<std::size_t>(begin),
                 count = static_cast<std::size_t>(std::min(kPieceValues, elements.end - begin));
      const float* const values = copy.read(role_of(tensor), spec_of(tensor), first, count, buffer.data());
      hash.update(values, count * sizeof(float));
      file.write(files.offsets[tensor] + first * sizeof(float), values, count * sizeof(float));
    }
    hashes_[number] = hash.digest();
  });
  model.sync();
  training.sync();
}

void JointSave::read_tensors(const Files& files) {
  const Range mine = read_by_[rank()];
  if (mine.size() == 0) return;
  const MappedFile model(files.model), training(files.training);
  in_parallel(static_cast<std::size_t>(mine.size()), kThreads, [&](std::size_t i) {
    const std::size_t tensor = static_cast<std::size_t>(mine.begin) + i;
    const MappedFile& file = in_model_file(tensor) ? model : training;
    const std::uint64_t bytes = static_cast<std::uint64_t>(spec_of(tensor).elements) * sizeof(float);
    if (file.size() < bytes || files.offsets[tensor] > file.size() - bytes) {
      fail(Exit::bad_file, "%s: %llu bytes, too few for %s", escaped(file.path()).c_str(),
           static_cast<unsigned long long>(file.size()), name_of(tensor).c_str());
    }
    tensors_[tensor] = read_tensor({file.data() + files.offsets[tensor], bytes}, tensor, file.path());
  });
}

// Reads the tensor once: verifies the hashes of its parts, computes its own, and finds the first value that is not
// finite.
TensorRead JointSave::read_tensor(std::span<const std::byte> data, std::size_t tensor, const std::string& path) const {
  DataCheck check(data, DType::f32, true);
  for (const std::size_t number : parts_of_tensor_[tensor]) {
    const Range& elements = parts_[number].elements;
    const std::size_t end = static_cast<std::size_t>(elements.end) * sizeof(float);
    Xxh3Stream hash;
    for (std::size_t begin = static_cast<std::size_t>(elements.begin) * sizeof(float); begin < end;
         begin += DataCheck::kCachePiece) {
      const std::size_t piece_end = std::min(end, begin + DataCheck::kCachePiece);
      hash.update(data.data() + begin, piece_end - begin);
      check.process(begin, piece_end);
    }
    if (hash.digest() == hashes_[number]) continue;
    const auto writer = std::find_if(parts_of_rank_.begin(), parts_of_rank_.end(), [number](const Range& parts) {
      return static_cast<std::int64_t>(number) < parts.end;
    });
    fail(
        Exit::bad_file,
        "%s: %s: what rank %td has written did not come back (XXH3-64: got %016llx, expected %016llx). If this recurs, "
        "the file system does not let several ranks write one file: see WEFT_SAVE in doc/several_gpus.md",
        escaped(path).c_str(), name_of(tensor).c_str(), writer - parts_of_rank_.begin(),
        static_cast<unsigned long long>(hash.digest()), static_cast<unsigned long long>(hashes_[number]));
  }
  TensorRead read{check.hash(), -1, 0};
  if (const std::optional<std::size_t> bad = check.first_not_finite()) {
    read.first_bad = static_cast<std::int64_t>(*bad);
    std::memcpy(&read.bad_value, data.data() + *bad * sizeof(float), sizeof read.bad_value);
  }
  return read;
}

}  // namespace weft

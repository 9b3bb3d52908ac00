// Generation, with the host a few tokens behind the GPU. Token id, position and sampling plan are in device memory,
// each sampled id reaches the host through the mailbox, and the next steps are queued before the host has seen it: a
// few steps ahead, or in fused mode a launch of many tokens. If the host stops early, keys and values of later tokens
// are left in the cache from length() on, where nothing reads them.
#include <algorithm>

#include "llmc/cuda/inference/neox_decoder.cuh"
#include "llmc/cuda/op/sample/mailbox.cuh"
#include "llmc/cuda/op/sample/sampler.h"

namespace weft::cuda {

namespace {

constexpr std::int64_t kAhead = 2;  // steps queued beyond the id that the host waits for
static_assert(kAhead + 2 < kMailboxIds);

// Publishes the sampled id and advances to the next position.
__global__ void publish_kernel(DecodeState* state, MailboxWords* mailbox) {
  if (state->done != 0) return;
  const std::uint32_t sequence = state->sequence;
  publish(mailbox, sequence, state->token, state->error);
  bool stop = state->error != SampleError::none;
  for (int i = 0; i < state->stop_count; ++i) stop = stop || state->stop_ids[i] == state->token;
  state->done = stop ? 1 : 0;
  state->sequence = sequence + 1;
  // Also after a stop: steps that are already queued then write their keys and values at this id's position, not over
  // those of the previous id.
  state->position = state->sample_position;
  ++state->sample_position;
}

// The stop ids that the GPU checks.
std::span<const std::int32_t> device_stop_ids(const GenerationRequest& request) {
  return std::span(request.stop_ids).first(std::min(request.stop_ids.size(), kMaxStopIds));
}

}  // namespace

template <typename S>
void NeoxDecoder<S>::sample_and_publish() {
  const MaybeRange range(profiling(), "sampling");
  sample(&b_.state->token, &b_.state->error, b_.logits, 1, config_.vocab_size, config_.vocab_size, &b_.state->plan,
         &b_.state->sample_position, stream_);
  publish_kernel<<<1, 1, 0, stream_>>>(b_.state, mailbox_.words());
  check_launch("publishing a token");
}

template <typename S>
std::int32_t NeoxDecoder<S>::wait_for(std::uint32_t sequence) {
  const Mailbox::Sampled sampled = mailbox_.wait(sequence, stream_, [] { return false; }).value();
  check_sample(sampled.error);
  return sampled.id;
}

template <typename S>
std::int32_t NeoxDecoder<S>::wait_fused([[maybe_unused]] std::int64_t i) {
  if constexpr (!std::is_same_v<S, float>) {
    if (const std::optional<std::int32_t> id = fused_->wait(i); id.has_value()) return *id;
  }
  fail(Exit::internal, "fused decoding: ended before its last token");
}

template <typename S>
std::int64_t NeoxDecoder<S>::launch_fused([[maybe_unused]] std::int32_t id, std::int64_t left,
                                          [[maybe_unused]] const GenerationRequest& request) {
  const std::int64_t count = std::min(left, kFusedTokens);
  if constexpr (!std::is_same_v<S, float>) {
    const std::span<const std::int32_t> stop_ids = device_stop_ids(request);
    FusedRequest fused;
    fused.first_id = id;
    fused.position = length_;
    fused.count = count;
    fused.sampling = request.sampling;
    fused.stop_ids.assign(stop_ids.begin(), stop_ids.end());
    fused_->finish();  // ends the previous launch
    fused_->launch(fused);
  }
  return count;
}

template <typename S>
void NeoxDecoder<S>::drain() noexcept {
  if constexpr (!std::is_same_v<S, float>) {
    if (fused_ != nullptr) {
      fused_->cancel();
      try {
        fused_->finish();
      } catch (const Error&) {  // generation has ended already: with this error, or for another reason
      }
    }
  }
  cudaStreamSynchronize(stream_);
}

template <typename S>
void NeoxDecoder<S>::generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                                  const std::function<bool(std::int32_t)>& on_id) {
  const std::int64_t rows = run_prompt(prompt), first = length_;
  if (request.max_ids < 1 || request.max_ids > options_.capacity - first) {
    fail(Exit::internal, "decoder: %lld ids asked for, %lld positions are left",
         static_cast<long long>(request.max_ids), static_cast<long long>(options_.capacity - first));
  }
  // However the loop ends, even by an exception of on_id, nothing stays queued.
  struct Drain {
    NeoxDecoder& decoder;
    ~Drain() { decoder.drain(); }
  } const drain{*this};

  // The first id comes from the prompt's last row, in every mode.
  const std::uint32_t sequence = mailbox_.reserve(1);
  const std::span<const std::int32_t> stop_ids = device_stop_ids(request);
  DecodeState state;
  state.sample_position = first;
  state.sequence = sequence;
  state.plan = request.sampling;
  state.stop_count = static_cast<std::int32_t>(stop_ids.size());
  std::copy(stop_ids.begin(), stop_ids.end(), state.stop_ids);
  set_state(state);
  run_head(b_.residual + (rows - 1) * config_.hidden_size);
  sample_and_publish();

  const bool fused = options_.mode == DecodeMode::fused;
  std::int64_t queued = 1, launch_begin = 0;  // ids queued so far; index of the running fused launch's first id
  std::int32_t id = 0;
  for (std::int64_t seen = 0; seen < request.max_ids;) {
    if (fused && queued == seen) {
      launch_begin = seen;
      queued += launch_fused(id, request.max_ids - seen, request);
    }
    for (; !fused && queued < std::min(request.max_ids, seen + 1 + kAhead); ++queued) {
      mailbox_.reserve(1);
      launch_step(true, first + queued - 1);
    }
    id = fused && seen > 0 ? wait_fused(seen - launch_begin) : wait_for(sequence + static_cast<std::uint32_t>(seen));
    length_ = first + seen++;
    const bool stop = std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end();
    if (!on_id(id) || stop) return;
  }
}

template <typename S>
void NeoxDecoder<S>::start_draft([[maybe_unused]] std::int64_t kept, [[maybe_unused]] std::span<const std::int32_t> ids,
                                 [[maybe_unused]] std::int64_t count, [[maybe_unused]] const SamplingPlan& sampling,
                                 [[maybe_unused]] const DeviceDrafts& to) {
  if (fused_ == nullptr) fail(Exit::internal, "decoder: only the fused kernel drafts");
  if constexpr (!std::is_same_v<S, float>) {
    fused_->finish();  // ends the previous draft; its error was reported with its id
    length_ = kept;
    if (ids.size() > kFusedMoreIds + 1) {
      run_prompt(ids.first(ids.size() - 1));
      ids = ids.last(1);
    }
    FusedRequest request;
    request.first_id = ids[0];
    request.more_ids.assign(ids.begin() + 1, ids.end());
    request.position = length_;
    request.count = count;
    request.sampling = sampling;
    request.device_ids = to.ids;
    fused_->launch(request);
    if (to.ids != nullptr) check(cudaEventRecord(to.written, stream_), "fused decoding");
    length_ += std::ssize(ids) + count - 1;
  }
}

template class NeoxDecoder<float>;
template class NeoxDecoder<bf16>;
template class NeoxDecoder<fp16>;

}  // namespace weft::cuda

#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "usbyte/codec.h"
#include "usbyte/communicator.h"
#include "usbyte/plan.h"

namespace usbyte {

/// What coded ops send and get, and the thread that makes it: messages of gradients on the way out,
/// sums of all ranks' messages on the way back. An op's blocks are coded one by one.
///
/// Ownership: of an op's part of the arena, its memory and its buffer, this has the use from
/// `encode` until it has reported that, and from `decode` likewise; the communicator has the buffer
/// in between. Reports come from the thread, without any lock.
class Coding {
 public:
  using Report = std::function<void(int op, std::exception_ptr error)>;

  /// `plan` and `arena` outlive it; `memory` holds what codecs that want feedback have not sent,
  /// as many float32 as the arena has elements, and is null if there are none.
  Coding(const Plan& plan, std::byte* arena, float* memory, int rank, int size, uint64_t seed,
         Report encoded, Report decoded);
  ~Coding() { stop(); }
  /// Drops jobs that are not begun and those to come, and waits for the one that is.
  void stop();

  bool codes(int op) const { return ops_[static_cast<size_t>(op)].codec != nullptr; }
  /// What travels for a coded op. Its window and fence are the plan's.
  const Request& request(int op) const { return ops_[static_cast<size_t>(op)].request; }
  void encode(int op, int64_t step);
  void decode(int op, int64_t step);

 private:
  struct CodedBlock {
    Block block;
    std::byte* values;
    int64_t message_at;  // bytes from the beginning of a rank's message
  };
  struct CodedOp {
    std::shared_ptr<const Codec> codec;
    DType dtype{};
    std::vector<CodedBlock> blocks;
    int64_t message_bytes = 0;
    std::vector<std::byte> buffer;  // one message, or those of all ranks
    Request request;
  };
  struct Job {
    int op;
    bool decodes;
    int64_t step;
    auto operator<=>(const Job&) const = default;
  };

  void put(const Job& job);
  void run();
  void carry_out(const Job& job);
  void encode(CodedOp& op, int64_t step);
  void decode(CodedOp& op, int64_t step);
  std::byte* own_message(CodedOp& op) const;
  std::span<float> as_floats(const CodedOp& op, const CodedBlock& block);

  const int rank_, size_;
  const uint64_t seed_;
  float* const memory_;
  const Report encoded_, decoded_;
  std::vector<CodedOp> ops_;      // by op of the plan
  std::vector<float> converted_;  // the thread's own: a block that is not of float32

  std::mutex mutex_;  // guards what is below
  std::condition_variable work_;
  std::set<Job> jobs_;  // the first op of the plan first
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace usbyte

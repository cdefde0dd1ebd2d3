// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "coded_op.h"
#include "engine/cancellation_token.h"
#include "support/thread_annotations.h"

namespace usbyte {

/// The thread that encodes the messages of coded ops and decodes those of all ranks.
///
/// Ownership: from `encode` until its callback, and from `decode` until its callback, the worker
/// alone uses the op's part of the flat buffer, its codec state and its buffer. In between the
/// buffer belongs to the communicator. Callbacks run on the worker's thread, without any lock.
class CodecWorker {
 public:
  using Callback = std::function<void(int op, std::exception_ptr error)>;

  /// With `encodes_first`, encoding goes before all decoding: for messages on a stream, which may
  /// not be there yet. Throws UsageError if the codecs' state is missing.
  CodecWorker(CodingSpace space, bool encodes_first, Callback encoded, Callback decoded);
  ~CodecWorker() { stop(); }
  /// Ends waits for the device, which fail then. Called before the network is aborted.
  void cancel() { cancellation_.cancel(); }
  /// Drops tasks that are not begun and those to come, and waits for the one that is.
  void stop();
  /// After `stop`: whether nothing uses messages and flat buffer any more; see `CodedOp::quiesce`.
  bool quiesce();

  /// What travels for a coded op.
  const Request& request(int op) const { return ops_[static_cast<size_t>(op)]->request(); }
  /// For its rows, once it is encoded, and their sum, before it is decoded.
  CodedOp& op(int op) { return *ops_[static_cast<size_t>(op)]; }
  void encode(int op, CodingContext context) { put({op, false, std::move(context)}); }
  void decode(int op, CodingContext context) { put({op, true, std::move(context)}); }

 private:
  struct Task {
    int op;
    bool decodes;
    CodingContext context;
  };
  // The first op of the plan first.
  struct Before {
    bool encodes_first;
    bool operator()(const Task& a, const Task& b) const {
      if (encodes_first && a.decodes != b.decodes) return b.decodes;
      return std::tie(a.op, a.decodes) < std::tie(b.op, b.decodes);
    }
  };

  void put(Task task);
  void run();
  void execute(const Task& task);

  const Callback encoded_, decoded_;
  CancellationToken cancellation_;
  const std::vector<std::unique_ptr<CodedOp>> ops_;  // by op of the plan

  Mutex mutex_;
  ConditionVariable work_;
  std::set<Task, Before> tasks_ USBYTE_GUARDED_BY(mutex_);
  bool stopping_ USBYTE_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace usbyte

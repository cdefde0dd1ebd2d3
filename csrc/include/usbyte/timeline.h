// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace usbyte {

/// Seconds on the steady clock; the time base of every measurement.
double now_s();

/// What happened in a step. A `step` event marks its beginning and has no length; a `compute` event
/// is a forward or backward pass. An op is `queued` from the moment its gradients were ready until
/// it was launched, then in `communication`; a `wait` is the training thread, or its stream,
/// waiting for gradients; an `update` is the deferred optimizer step.
struct Event {
  /// In the order of their rows in a trace.
  enum class Kind : uint8_t { step, compute, queue, communication, wait, update };
  static constexpr size_t kKinds = 6;

  Kind kind;
  int64_t step;
  double start_s;
  double end_s;
  std::string label;  ///< names of the step, the pass, the op or the parameters
  int64_t bytes = 0;
  std::vector<std::pair<std::string, double>> numbers = {};  ///< more about it, by name
};

/// Events of one run: measured by the engine or predicted by a simulator.
using Timeline = std::vector<Event>;

/// Half-open range of steps to record, written "A:B"; either side may be left out.
struct StepRange {
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();

  bool contains(int64_t step) const { return begin <= step && step < end; }
  /// Throws UsageError unless the text is "A:B" with 0 <= A < B.
  static StepRange parse(std::string_view text);
};

/// Writes events as a Chrome trace, which Perfetto opens. After each `write` the file is complete,
/// valid JSON, so that a killed process leaves a readable trace. Time stamps are wall-clock, so
/// traces of several ranks line up. The engines of one process may share it.
class TimelineWriter {
 public:
  /// Creates or truncates `path`. Throws UsageError naming the path if that fails.
  TimelineWriter(const std::string& path, int rank, StepRange steps);
  ~TimelineWriter();
  TimelineWriter(const TimelineWriter&) = delete;
  TimelineWriter& operator=(const TimelineWriter&) = delete;

  const StepRange& steps() const { return steps_; }
  /// Appends the events whose step is in range. Throws UsageError if the disk refuses.
  void write(const Timeline& events);
  /// Appends a metadata event, which viewers skip. `args` is a JSON object. Throws UsageError if it
  /// is none, or if the disk refuses.
  void describe(const std::string& name, const std::string& args);

 private:
  void append(const std::string& text);

  std::mutex mutex_;  // guards the file's end and the rows
  std::string path_;
  int fd_ = -1;
  int64_t tail_ = 0;  // file position of the closing bracket
  int rank_;
  StepRange steps_;
  double to_wall_s_;  // wall clock minus steady clock
  // By kind, for each row (Chrome thread) of it in the trace: where its last event ends.
  std::array<std::vector<int64_t>, Event::kKinds> row_end_ns_;
};

}  // namespace usbyte

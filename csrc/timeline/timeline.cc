// SPDX-License-Identifier: Apache-2.0
#include "usbyte/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr std::array<const char*, Event::kKinds> kKinds = {"step",          "compute", "queue",
                                                           "communication", "wait",    "update"};
constexpr size_t kRowsPerKind = 100'000;  // thread ids of a kind's rows: kind * this + row
constexpr std::string_view kClosing = "]\n";

// Names come from users' models: invalid UTF-8 is replaced, since a trace must never stop training.
std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// Fixed notation: Perfetto does not promise to read exponents in time stamps.
std::string microseconds(int64_t ns) {
  char out[32];
  std::snprintf(out, sizeof out, "%lld.%03lld", static_cast<long long>(ns / 1000),
                static_cast<long long>(ns % 1000));
  return out;
}

std::string name_event(const char* what, int rank, size_t tid, const std::string& name) {
  return "{\"name\":\"" + std::string(what) + "\",\"ph\":\"M\",\"pid\":" + std::to_string(rank) +
         ",\"tid\":" + std::to_string(tid) + ",\"args\":{\"name\":" + quoted(name) + "}}\n";
}

int64_t parse_step(std::string_view text, int64_t if_empty, std::string_view whole) {
  if (text.empty()) return if_empty;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw UsageError("step range '" + std::string(whole) + "': '" + std::string(text) +
                     "' is not a step number; write \"A:B\", such as \"10:20\"");
  }
  return value;
}

}  // namespace

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

StepRange StepRange::parse(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) {
    throw UsageError("step range '" + std::string(text) + "' has no colon; write \"A:B\"");
  }
  StepRange range;
  range.begin = parse_step(text.substr(0, colon), range.begin, text);
  range.end = parse_step(text.substr(colon + 1), range.end, text);
  if (range.begin >= range.end) {
    throw UsageError("step range '" + std::string(text) + "' is empty; A must be below B");
  }
  return range;
}

TimelineWriter::TimelineWriter(const std::string& path, int rank, StepRange steps)
    : path_(path), rank_(rank), steps_(steps) {
  const std::chrono::duration<double> wall = std::chrono::system_clock::now().time_since_epoch();
  to_wall_s_ = wall.count() - now_s();
  fd_ = ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    throw UsageError("cannot create the timeline '" + path + "': " + std::strerror(errno) +
                     "; choose a file in a directory that exists and is writable");
  }
  try {
    append("[\n" + name_event("process_name", rank, 0, "rank " + std::to_string(rank)));
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

TimelineWriter::~TimelineWriter() { ::close(fd_); }

void TimelineWriter::write(const Timeline& events) {
  std::vector<const Event*> chosen;
  for (const Event& e : events) {
    if (steps_.contains(e.step)) chosen.push_back(&e);
  }
  if (chosen.empty()) return;
  std::lock_guard lock(mutex_);
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const Event* a, const Event* b) { return a->start_s < b->start_s; });

  std::string text;
  for (const Event* e : chosen) {
    const size_t kind = static_cast<size_t>(e->kind);
    const int64_t start = nanoseconds(e->start_s);
    const int64_t end = std::max(start, nanoseconds(e->end_s));
    // Viewers drop an event that overlaps another in its row, so each goes to the first row that
    // is free: one row for each kind while nothing overlaps.
    std::vector<int64_t>& rows = row_end_ns_.at(kind);
    auto row = std::find_if(rows.begin(), rows.end(), [&](int64_t last) { return last <= start; });
    const size_t tid = kind * kRowsPerKind + static_cast<size_t>(row - rows.begin());
    if (row == rows.end()) {
      text.append(",").append(name_event("thread_name", rank_, tid, kKinds[kind]));
      row = rows.insert(row, end);
    }
    *row = end;
    const std::string phase = e->kind == Event::Kind::step
                                  ? "\"i\",\"s\":\"t\""  // an instant on its row
                                  : "\"X\",\"dur\":" + microseconds(end - start);
    text += ",{\"name\":" + quoted(e->label) + ",\"cat\":\"" + kKinds[kind] + "\",\"ph\":" + phase +
            ",\"ts\":" + microseconds(start + nanoseconds(to_wall_s_)) +
            ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(tid) +
            ",\"args\":{\"step\":" + std::to_string(e->step) +
            ",\"bytes\":" + std::to_string(e->bytes);
    for (const auto& [name, value] : e->numbers) {
      text += "," + quoted(name) + ":" + nlohmann::json(value).dump();
    }
    text += "}}\n";
  }
  append(text);
}

void TimelineWriter::describe(const std::string& name, const std::string& args) {
  const nlohmann::json told = nlohmann::json::parse(args, nullptr, false);
  if (!told.is_object()) throw UsageError("timeline: '" + name + "' is no JSON object");
  const nlohmann::json event = {
      {"name", name}, {"ph", "M"}, {"pid", rank_}, {"tid", 0}, {"args", told}};
  const auto replace = nlohmann::json::error_handler_t::replace;
  std::lock_guard lock(mutex_);
  append("," + event.dump(-1, ' ', false, replace) + "\n");
}

// One write replaces the closing bracket by the text and a new bracket, so that no moment between
// two system calls finds the file incomplete.
void TimelineWriter::append(const std::string& text) {
  const std::string all = text + std::string(kClosing);
  size_t written = 0;
  while (written < all.size()) {
    const ssize_t n = ::pwrite(fd_, all.data() + written, all.size() - written,
                               tail_ + static_cast<off_t>(written));
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      const int error = errno;
      // What was cut off would leave the trace unreadable: end it where it ended before.
      const bool closed = ::pwrite(fd_, kClosing.data(), kClosing.size(), tail_) > 0 &&
                          ::ftruncate(fd_, tail_ + static_cast<off_t>(kClosing.size())) == 0;
      throw UsageError("cannot write the timeline '" + path_ + "': " + std::strerror(error) +
                       (closed ? "; it ends before this write" : "; its end is damaged"));
    }
  }
  tail_ += static_cast<int64_t>(text.size());
}

}  // namespace usbyte

// SPDX-License-Identifier: Apache-2.0
#include "usbyte/env.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte {
namespace {

/// What a variable is parsed into. `monostate`: read by the build or by the NCCL loader, listed so
/// that it is known.
using Field = std::variant<std::monostate, std::string Env::*, int64_t Env::*, double Env::*>;

/// Returns whether a text is acceptable.
using Check = bool (*)(std::string_view);

struct Knob {
  std::string_view name;
  Field field;
  std::string_view fallback;
  std::string_view unit;
  std::string_view accepted;  // completes "accepted: "
  std::string_view description;
  Check check = nullptr;
  int64_t least = 1;  // of whole numbers
};

bool is_log_level(std::string_view text) {
  constexpr std::array<std::string_view, 4> levels = {"debug", "info", "warning", "error"};
  return std::find(levels.begin(), levels.end(), text) != levels.end();
}

/// The whole of `text` as a number, or nothing.
template <typename Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [stop, failure] = std::from_chars(text.data(), end, value);
  if (failure != std::errc{} || stop != end) return std::nullopt;
  return value;
}

std::optional<int64_t> bytes(std::string_view text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const auto count = number<int64_t>(text.substr(0, digits));
  std::string_view suffix = text.substr(digits);
  if (suffix.size() == 3 && suffix.ends_with("iB")) suffix.remove_suffix(2);
  constexpr std::string_view suffixes = "kKmMgG";
  if (!count || suffix.size() > 1 || suffixes.find(suffix) == suffixes.npos) return std::nullopt;
  const size_t power = suffix.empty() ? 0 : 1 + suffixes.find(suffix) / 2;
  const int64_t unit = int64_t{1} << (10 * power);
  if (*count < 1 || *count > std::numeric_limits<int64_t>::max() / unit) return std::nullopt;
  return *count * unit;
}

bool is_one_shot(std::string_view text) {
  const auto value = bytes(text);
  return value && *value <= int64_t{1} << 20;  // what is large should not go this way
}

bool is_chunk(std::string_view text) {
  const auto value = bytes(text);
  return value && *value <= int64_t{1} << 30;  // two buffers of this size are allocated
}

bool is_nccl_communicators(std::string_view text) {
  const auto value = number<int64_t>(text);
  return value && *value <= 8;
}

bool is_nccl_ctas(std::string_view text) {
  const auto value = number<int64_t>(text);
  return value && *value <= 1024;
}

bool is_switch(std::string_view text) { return text == "0" || text == "1"; }

bool is_step_range(std::string_view text) {
  try {
    StepRange::parse(text);
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

constexpr std::string_view kBytesAccepted =
    "a whole number of bytes >= 1, also with k, M or G (powers of 1024), such as 8388608, 8M or "
    "8MiB";
constexpr double kMostSeconds = 1e8;  // which clocks in nanoseconds and timers can still count
constexpr std::string_view kSecondsAccepted =
    "a number of seconds > 0 and at most 1e8, such as 60 or 1.5";

// clang-format off
constexpr std::array kKnobs = {
    Knob{"USBYTE_BACKEND", &Env::backend, "", "", "nccl or a torch.distributed backend of the CPU",
         "Moves gradients; empty: NCCL for CUDA tensors where each rank has a GPU, else gloo"},
    Knob{"USBYTE_POLICY", &Env::policy, "", "", "a policy",
         "Policy that plans the communication; empty: auto"},
    Knob{"USBYTE_TOPOLOGY", &Env::topology, "", "",
         "hosts, sizes such as 2x4 with the innermost first, or a JSON file",
         "Dimensions of the network that all_reduces may be routed through; empty: none"},
    Knob{"USBYTE_PARTITION_BYTES", &Env::partition_bytes, "32M", "bytes", kBytesAccepted,
         "Largest block of policies that partition"},
    Knob{"USBYTE_CREDIT_BYTES", &Env::credit_bytes, "64M", "bytes", kBytesAccepted,
         "Bytes in flight at a time, for policies with a constant window"},
    Knob{"USBYTE_BUCKET_BYTES", &Env::bucket_bytes, "25M", "bytes", kBytesAccepted,
         "Bucket of the ddp policy"},
    Knob{"USBYTE_ONE_SHOT_BYTES", &Env::one_shot_bytes, "32K", "bytes",
         "a whole number of bytes from 1 to 1M, such as 32768 or 32K",
         "Sent by a rank for a small all_reduce that goes in one round of messages; 1: none do",
         is_one_shot},
    Knob{"USBYTE_LEARNING_STEPS", &Env::learning_steps, "5", "", "a whole number >= 1",
         "Steps that are measured before the plan is made"},
    Knob{"USBYTE_STALL_WARNING_S", &Env::stall_warning_s, "60", "s", kSecondsAccepted,
         "With none completed for so long, the operation in flight is logged, and who is behind"},
    Knob{"USBYTE_STALL_LIMIT_S", &Env::stall_limit_s, "300", "s", kSecondsAccepted,
         "With none completed for so long, every rank raises FaultError"},
    Knob{"USBYTE_START_LIMIT_S", &Env::start_limit_s, "60", "s", kSecondsAccepted,
         "init() ends with an error that names the missing ranks if they take longer to come"},
    Knob{"USBYTE_CHECK_STEPS", &Env::check_steps, "50", "", "a whole number >= 0",
         "Every how many steps ranks compare hyper-parameters and parameters; 0: never", nullptr,
         0},
    Knob{"USBYTE_TIMELINE", &Env::timeline, "", "", "a path",
         "File that the measured timeline is written to, %r for the rank, else of rank 0 alone; "
         "empty: none"},
    Knob{"USBYTE_TIMELINE_STEPS", &Env::timeline_steps, "0:", "",
         "FIRST:LAST, either may be missing, LAST is excluded, such as 0: or 100:110",
         "Steps that the timeline records", is_step_range},
    Knob{"USBYTE_REPORT", &Env::report, "", "", "a path",
         "Page that rank 0 writes once the plan is final: the step under DDP, predicted and "
         "measured; empty: none"},
    Knob{"USBYTE_FLIGHT", &Env::flight, "", "", "a path",
         "File that a rank's last operations are written to after a fault, %r for the rank; empty: "
         "none"},
    Knob{"USBYTE_JOB_TOKEN", &Env::job_token, "", "", "a text",
         "Secret that the processes of a job share; set by usbyterun, or by you on all ranks"},
    Knob{"USBYTE_LOG_LEVEL", &Env::log_level, "warning", "", "debug, info, warning or error",
         "Least severity that is logged", is_log_level},
    Knob{"USBYTE_CHUNK_BYTES", &Env::chunk_bytes, "4M", "bytes",
         "a whole number of bytes from 1 to 1G, such as 4194304 or 4M",
         "Messages that CUDA gradients are cut into where they go over the CPU's network", is_chunk},
    Knob{"USBYTE_NCCL_LIB", &Env::nccl_library, "", "", "a path",
         "NCCL library to open; empty: torch's, else the wheel's, else the system's"},
    Knob{"USBYTE_NCCL_COMMUNICATORS", &Env::nccl_communicators, "2", "",
         "a whole number from 1 to 8", "Operations that NCCL runs side by side",
         is_nccl_communicators},
    Knob{"USBYTE_NCCL_MAX_CTAS", &Env::nccl_max_ctas, "0", "",
         "a whole number from 0 to 1024",
         "Most multiprocessors that one NCCL operation takes from computing; 0: NCCL's choice",
         is_nccl_ctas, 0},
    Knob{"USBYTE_NCCL_REGISTER", &Env::nccl_register, "0", "", "0 or 1",
         "1: gradients lie in memory registered with NCCL, for networks that then copy less",
         is_switch, 0},
    Knob{"USBYTE_CUDA", {}, "AUTO", "", "AUTO, ON or OFF",
         "Whether an installation from source builds the CUDA part; no effect at run time"},
};
// clang-format on

[[noreturn]] void reject(const Knob& knob, const std::string& text) {
  throw EnvError(std::string(knob.name) + "=\"" + text +
                 "\" cannot be used; accepted: " + std::string(knob.accepted) +
                 ". Correct it or unset it (default: \"" + std::string(knob.fallback) + "\").");
}

/// Within what every clock and timeout can count, in nanoseconds too.
std::optional<double> seconds(std::string_view text) {
  const auto value = number<double>(text);
  if (!value || !(*value > 0 && *value <= kMostSeconds)) return std::nullopt;
  return value;
}

/// Sets the field of `knob` and returns the value in force as text.
struct Assign {
  Env& env;
  const Knob& knob;
  const std::string& text;

  std::string operator()(std::monostate) const { return text; }
  std::string operator()(std::string Env::* field) const {
    if (knob.check != nullptr && !knob.check(text)) reject(knob, text);
    return env.*field = text;
  }
  std::string operator()(int64_t Env::* field) const {
    const auto value = knob.unit == "bytes" ? bytes(text) : number<int64_t>(text);
    if (!value || *value < knob.least) reject(knob, text);
    if (knob.check != nullptr && !knob.check(text)) reject(knob, text);
    return std::to_string(env.*field = *value);
  }
  std::string operator()(double Env::* field) const {
    const auto value = seconds(text);
    if (!value) reject(knob, text);
    env.*field = *value;
    return text;
  }
};

/// Levenshtein's distance from `a` to `b`; 0 where `a` is a beginning of `b`.
size_t distance(std::string_view a, std::string_view b) {
  if (b.starts_with(a)) return 0;
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

void reject_unknown() {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    std::string_view name(*entry);
    name = name.substr(0, name.find('='));
    const auto is_it = [name](const Knob& knob) { return knob.name == name; };
    if (!name.starts_with("USBYTE_") || std::any_of(kKnobs.begin(), kKnobs.end(), is_it)) continue;
    const auto nearest =
        std::min_element(kKnobs.begin(), kKnobs.end(), [name](const Knob& a, const Knob& b) {
          return distance(name, a.name) < distance(name, b.name);
        });
    throw EnvError("unknown variable " + std::string(name) + ": did you mean " +
                   std::string(nearest->name) +
                   "? Rename or unset it; `usbyte doctor` lists the variables that exist.");
  }
}

}  // namespace

Env Env::read() {
  reject_unknown();
  Env env{};
  for (const Knob& knob : kKnobs) {
    const char* const found = std::getenv(knob.name.data());
    // Job scripts write NAME="${X:-}": empty means the default, as unset does.
    const bool set = found != nullptr && *found != '\0';
    const std::string text = set ? found : std::string(knob.fallback);
    std::string value = std::visit(Assign{env, knob, text}, knob.field);
    if (!env.job_token.empty() && knob.name == "USBYTE_JOB_TOKEN") value = "(secret)";
    env.variables.push_back({std::string(knob.name), std::move(value), std::string(knob.unit),
                             std::string(knob.description), set});
  }
  return env;
}

}  // namespace usbyte

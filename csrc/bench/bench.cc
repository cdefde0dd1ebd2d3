// SPDX-License-Identifier: Apache-2.0
#include "bench.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <fstream>

#include "usbyte/error.h"
#include "usbyte/timeline.h"

namespace usbyte::bench {

Options::Options(std::string about) : about_(std::move(about)) {
  flag("json", "", "write the results as JSON to this file, or to standard output if it is -");
}

Options& Options::flag(std::string name, std::string default_value, std::string help) {
  flags_.push_back({std::move(name), default_value, default_value, std::move(help)});
  return *this;
}

bool Options::parse(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      print_help(argv[0]);
      return false;
    }
    if (!argument.starts_with("--")) {
      throw UsageError("'" + argument + "' is not a flag; --help lists them");
    }
    const size_t equals = argument.find('=');
    Flag& flag = find(argument.substr(2, equals == std::string::npos ? equals : equals - 2));
    if (equals != std::string::npos) {
      flag.value = argument.substr(equals + 1);
    } else if (++i < argc) {
      flag.value = argv[i];
    } else {
      throw UsageError(argument + " needs a value");
    }
  }
  return true;
}

Options::Flag& Options::find(const std::string& name) {
  const auto it =
      std::find_if(flags_.begin(), flags_.end(), [&](const Flag& f) { return f.name == name; });
  if (it == flags_.end()) throw UsageError("unknown flag --" + name + "; --help lists them");
  return *it;
}

const std::string& Options::text(const std::string& name) const {
  return const_cast<Options*>(this)->find(name).value;
}

int64_t Options::integer(const std::string& name, int64_t low) const {
  const std::string& value = text(name);
  const char* const last = value.data() + value.size();
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), last, number);
  const std::string_view unit(end, static_cast<size_t>(last - end));
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (error != std::errc() || shift < 0 || number < 0 || number > (INT64_MAX >> shift) ||
      (number << shift) < low) {
    throw UsageError("--" + name + " '" + value + "' must be an integer of at least " +
                     std::to_string(low) + ", such as 4096 or 4K");
  }
  return number << shift;
}

double Options::real(const std::string& name) const {
  const std::string& value = text(name);
  const char* const last = value.data() + value.size();
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), last, number);
  if (error != std::errc() || end != last || !std::isfinite(number) || number < 0) {
    throw UsageError("--" + name + " '" + value + "' must be a number that is not negative");
  }
  return number;
}

std::FILE* Options::table() const { return text("json") == "-" ? stderr : stdout; }

void Options::write(nlohmann::ordered_json report) const {
  const std::string& path = text("json");
  if (path.empty()) return;
  for (const Flag& f : flags_) {
    if (f.name != "json") report["options"][f.name] = f.value;
  }
  const std::string out = report.dump(2) + "\n";
  if (path == "-") {
    std::fputs(out.c_str(), stdout);
    return;
  }
  std::ofstream file(path);
  file << out;
  if (!file.flush()) throw UsageError("cannot write the results to '" + path + "'");
}

void Options::print_help(const char* program) const {
  std::printf("usage: %s [--flag value]...\n\n%s\n\n", program, about_.c_str());
  for (const Flag& f : flags_) {
    std::printf("  --%-14s %s (default: %s)\n", f.name.c_str(), f.help.c_str(),
                f.default_value.empty() ? "none" : f.default_value.c_str());
  }
  std::printf("  --%-14s %s\n", "help", "print this and exit");
}

void print_table(std::FILE* out, const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const auto& row : rows) print_row(out, widths, row);
}

void print_row(std::FILE* out, const std::vector<size_t>& widths,
               const std::vector<std::string>& row) {
  for (size_t c = 0; c < row.size(); ++c) {
    std::fprintf(out, "%s%*s", c ? "  " : "", static_cast<int>(widths[c]), row[c].c_str());
  }
  std::fputc('\n', out);
  std::fflush(out);
}

int finish(const Options& options, const std::vector<std::vector<std::string>>& table,
           const std::string& ran, const std::string& unit, int64_t wrong,
           nlohmann::ordered_json report) {
  if (!table.empty()) print_table(options.table(), table);
  std::fprintf(options.table(), "# %s; wrong %s: %lld %s\n", ran.c_str(), unit.c_str(),
               static_cast<long long>(wrong), wrong ? "FAILED" : "OK");
  report["wrong"] = wrong;
  options.write(std::move(report));
  return wrong ? 1 : 0;
}

std::string fixed(double value, int decimals) {
  char out[64];
  std::snprintf(out, sizeof out, "%.*f", decimals, value);
  return out;
}

double percentile(std::vector<double> samples, double share) {
  if (samples.empty()) return 0;
  const auto index = static_cast<size_t>(share * static_cast<double>(samples.size() - 1) + 0.5);
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(index),
                   samples.end());
  return samples[index];
}

std::vector<double> medians_in_turns(std::span<const std::function<void()>> actions,
                                     int64_t rounds) {
  std::vector<std::vector<double>> times(actions.size());
  for (int64_t i = -1; i < rounds; ++i) {
    for (size_t a = 0; a < actions.size(); ++a) {
      const double start = now_s();
      actions[a]();
      if (i >= 0) times[a].push_back(now_s() - start);
    }
  }
  std::vector<double> out;
  for (std::vector<double>& of_one : times) out.push_back(percentile(std::move(of_one), 0.5));
  return out;
}

double process_cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

int run(Options options, int argc, char** argv, int (*body)(const Options&)) {
  try {
    return options.parse(argc, argv) ? body(options) : 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  }
}

}  // namespace usbyte::bench

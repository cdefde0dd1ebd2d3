// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

// What the benchmark binaries share: flags, a table, and a report as JSON.
namespace usbyte::bench {

/// Flags of the form `--name value`, each with a default. Every benchmark has `--json` and
/// `--help`.
class Options {
 public:
  /// `about` opens the help and says what is measured and how each printed number is defined.
  explicit Options(std::string about);

  Options& flag(std::string name, std::string default_value, std::string help);
  /// Reads the command line. Returns false if it asked for help, which has then been printed.
  /// Throws UsageError on an unknown flag or a missing value.
  bool parse(int argc, char** argv);

  const std::string& text(const std::string& name) const;
  /// A count of at least `low`; K, M and G stand for 2^10, 2^20 and 2^30. Throws UsageError.
  int64_t integer(const std::string& name, int64_t low = 0) const;
  /// A number that is not negative. Throws UsageError.
  double real(const std::string& name) const;

  /// Where the table goes: standard output, unless `--json -` claims that for the report.
  std::FILE* table() const;
  /// Writes the report, with the flags in force under "options", where `--json` says.
  void write(nlohmann::ordered_json report) const;

 private:
  struct Flag {
    std::string name, default_value, value, help;
  };
  Flag& find(const std::string& name);
  void print_help(const char* program) const;

  std::string about_;
  std::vector<Flag> flags_;
};

/// Prints rows in aligned columns. The first row holds the headings.
void print_table(std::FILE* out, const std::vector<std::vector<std::string>>& rows);

/// Prints one row, in columns of at least these widths, and does not keep it in a buffer: for
/// tables of which rows are long in coming.
void print_row(std::FILE* out, const std::vector<size_t>& widths,
               const std::vector<std::string>& row);

/// Ends a benchmark that checks its results: prints the table, unless it is empty, then what ran
/// and how many of its `unit` (words, elements) are wrong, and writes the report, "wrong" added.
/// Returns the exit code.
int finish(const Options& options, const std::vector<std::vector<std::string>>& table,
           const std::string& ran, const std::string& unit, int64_t wrong,
           nlohmann::ordered_json report);

/// Fixed-point text.
std::string fixed(double value, int decimals);

/// The value below which `share` (0 to 1) of the samples lie.
double percentile(std::vector<double> samples, double share);

/// Median seconds of each action, over `rounds` of all of them in turns; a round before is not
/// timed.
std::vector<double> medians_in_turns(std::span<const std::function<void()>> actions,
                                     int64_t rounds);

/// CPU time that all threads of this process have used, in seconds.
double process_cpu_s();

/// Calls `body(options)` after parsing; returns its exit code, 0 after --help, 2 on an error, which
/// it prints.
int run(Options options, int argc, char** argv, int (*body)(const Options&));

}  // namespace usbyte::bench

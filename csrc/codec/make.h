// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "usbyte/codec.h"

// One function for each codec; `parameter` is what follows its name, empty if nothing does. They
// throw UsageError for a parameter that they cannot take.
namespace usbyte::codecs {

using Made = std::shared_ptr<const Codec>;

Made fp16(const std::string& parameter);
Made bf16(const std::string& parameter);
Made fp8(const std::string& parameter);
Made int8(const std::string& parameter);
Made topk(const std::string& parameter);
Made randk(const std::string& parameter);
Made dct(const std::string& parameter);
Made dgc(const std::string& parameter);
Made qsgd(const std::string& parameter);
Made terngrad(const std::string& parameter);
Made signsgd(const std::string& parameter);
Made signum(const std::string& parameter);
Made efsignsgd(const std::string& parameter);
Made onebit(const std::string& parameter);
Made powersgd(const std::string& parameter);

/// For codecs without one.
void check_none(const std::string& codec, const std::string& parameter);
/// A share above 0 and not above 1.
double ratio_of(const std::string& codec, const std::string& parameter);

/// "0.001,momentum=0.9": one without a name, then those with one.
class Parameters {
 public:
  Parameters(std::string codec, const std::string& text);
  const std::string& first() const { return first_; }
  /// The named one, or `otherwise`. Throws UsageError unless it is a number from `least` to `most`.
  double number(const std::string& name, double otherwise, double least, double most);
  int64_t whole(const std::string& name, int64_t otherwise, int64_t least, int64_t most);
  /// Throws UsageError if there are names that nobody has asked for.
  void check_all_read() const;

 private:
  template <typename T>
  T take(const std::string& name, T otherwise, T least, T most);

  std::string codec_, first_;
  std::map<std::string, std::string> named_;
};

/// The shortest text that reads as `value` again.
std::string text_of(double value);

}  // namespace usbyte::codecs

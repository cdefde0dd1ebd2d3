#pragma once

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
Made qsgd(const std::string& parameter);
Made terngrad(const std::string& parameter);
Made signsgd(const std::string& parameter);
Made efsignsgd(const std::string& parameter);
Made onebit(const std::string& parameter);

/// For codecs without one.
void check_none(const std::string& codec, const std::string& parameter);
/// A share above 0 and not above 1.
double ratio_of(const std::string& codec, const std::string& parameter);
/// The shortest text that reads as `value` again.
std::string text_of(double value);

}  // namespace usbyte::codecs

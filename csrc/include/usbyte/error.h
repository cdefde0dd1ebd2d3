// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace usbyte {

/// Root of every exception this library throws. Each class maps 1:1 to a Python class of the same
/// name in `usbyte.errors`. A message names the culprit (rank, op, parameter, variable) and the
/// remedy.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The caller broke a rule of the API: wrong order of calls, argument out of range.
class UsageError : public Error {
  using Error::Error;
};

/// A plan, a profile or their JSON is invalid.
class PlanError : public Error {
  using Error::Error;
};

/// Ranks disagree about names, shapes, dtypes, operations or plans.
class MismatchError : public Error {
  using Error::Error;
};

/// Communication failed for good: a peer is lost, an operation stalled, another rank reported a
/// fault. After it the job cannot go on; restart it from the last checkpoint.
class FaultError : public Error {
  using Error::Error;
};

/// An environment variable has a value that cannot be used.
class EnvError : public Error {
  using Error::Error;
};

/// Its message, for what is passed on in another one.
inline std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace usbyte

// SPDX-License-Identifier: Apache-2.0
#include "usbyte/step_record.h"

#include <algorithm>
#include <ranges>

namespace usbyte {
namespace {

std::vector<std::pair<std::string, double>> numbers(const SparseTraffic& sum, int64_t rows) {
  const auto own = static_cast<double>(sum.own_rows), all = static_cast<double>(sum.sum_rows);
  return {{"rows", own},
          {"sum_rows", all},
          {"density", own / static_cast<double>(rows)},
          {"gamma", own > 0 ? all / own : 1},
          {"skew", sum.skew},
          {"push_imbalance", sum.push_imbalance},
          {"pull_imbalance", sum.pull_imbalance},
          {"sent_bytes", static_cast<double>(sum.sent_bytes)},
          {"received_bytes", static_cast<double>(sum.received_bytes)}};
}

}  // namespace

Timeline events(const StepRecord& record, const Plan& plan) {
  using Kind = Event::Kind;
  const auto tensor_name = [&](int t) -> std::string {
    return t == StepRecord::kEveryTensor ? "all gradients"
                                         : plan.tensors()[static_cast<size_t>(t)].name;
  };
  Timeline out;
  if (!record.passes.empty()) {
    const double first = std::ranges::min(
        record.passes | std::views::transform([](const auto& pass) { return pass.second.first; }));
    const std::string label = "step " + std::to_string(record.step);
    out.push_back({Kind::step, record.step, first, first, label});
  }
  for (const auto& [name, span] : record.passes) {
    out.push_back({Kind::compute, record.step, span.first, span.second, name});
  }
  for (size_t i = 0; i < record.done_s.size(); ++i) {
    if (record.done_s[i] == 0) continue;
    const std::string label = plan.describe(static_cast<int>(i));
    const int64_t bytes = plan.bytes(plan.ops()[i]);
    const double launched = record.launched_s[i];
    out.push_back({Kind::queue, record.step, record.queued_s[i], launched, label, bytes});
    out.push_back({Kind::communication, record.step, launched, record.done_s[i], label, bytes});
    if (const auto sum = record.sparse.find(static_cast<int>(i)); sum != record.sparse.end()) {
      out.back().numbers = numbers(sum->second, plan.shape(plan.ops()[i]).rows);
    }
  }
  for (const auto& [tensor, span] : record.waits) {
    out.push_back({Kind::wait, record.step, span.first, span.second, tensor_name(tensor)});
  }
  for (const auto& [tensors, span] : record.updates) {
    std::string label;
    for (int t : tensors) label += (label.empty() ? "" : ", ") + tensor_name(t);
    out.push_back({Kind::update, record.step, span.first, span.second, std::move(label)});
  }
  return out;
}

}  // namespace usbyte

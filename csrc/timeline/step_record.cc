#include "usbyte/step_record.h"

namespace usbyte {

Timeline events(const StepRecord& record, const Plan& plan) {
  using Kind = Event::Kind;
  const auto tensor_name = [&](int t) { return plan.tensors()[static_cast<size_t>(t)].name; };
  Timeline out;
  for (size_t i = 0; i < record.done_s.size(); ++i) {
    if (record.done_s[i] == 0) continue;
    const std::string label = plan.describe(static_cast<int>(i));
    const int64_t bytes = plan.bytes(plan.ops()[i]);
    const double launched = record.launched_s[i];
    out.push_back({Kind::queue, record.step, record.queued_s[i], launched, label, bytes});
    out.push_back({Kind::communication, record.step, launched, record.done_s[i], label, bytes});
  }
  for (const auto& [tensor, span] : record.gates) {
    out.push_back({Kind::gate, record.step, span.first, span.second, tensor_name(tensor)});
  }
  for (const auto& [tensors, span] : record.updates) {
    std::string label;
    for (int t : tensors) label += (label.empty() ? "" : ", ") + tensor_name(t);
    out.push_back({Kind::update, record.step, span.first, span.second, std::move(label)});
  }
  return out;
}

}  // namespace usbyte

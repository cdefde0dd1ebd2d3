// SPDX-License-Identifier: Apache-2.0
// What planning costs: every policy's plan for jobs of several sizes, and the simulator's rate.

#include <algorithm>
#include <cmath>
#include <random>

#include "bench.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"
#include "usbyte/simulator.h"
#include "usbyte/timeline.h"

namespace {

using namespace usbyte;
using bench::fixed;
using bench::percentile;

constexpr const char* kAbout =
    "Measures how long planning takes, for made-up jobs of many layers.\n\n"
    "  plan (ms)     time of one plan: median over the repeats\n"
    "  ops           ops of that plan\n"
    "  step / bytes  its predicted step over the bound of bytes\n"
    "  events/s      ops simulated in a second under that plan: launch, completion, and the\n"
    "                arrivals that come with it";

// Sizes log-uniform up to 4 M elements; backward takes twice as long as forward.
Profile make_job(int tensors, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> size(0, std::log(4e6)), time(0, 1e-3);
  Profile p;
  std::vector<double> forward_s;
  int64_t offset = 0;
  double now = 0;
  for (int i = 0; i < tensors; ++i) {
    const auto numel = static_cast<int64_t>(std::exp(size(rng)));
    p.tensors.push_back({"t" + std::to_string(i), numel, DType::float32, offset});
    offset += numel;
    forward_s.push_back(time(rng));
    p.need_s.push_back(now);
    now += forward_s.back();
  }
  p.ready_s.resize(p.need_s.size());
  for (size_t i = p.need_s.size(); i-- > 0;) p.ready_s[i] = now += 2 * forward_s[i];
  p.step_s = now;
  return p;
}

// Ops simulated in a second, over at least a tenth of one.
double events_per_s(Simulator& simulator, const Plan& plan) {
  const int64_t before = simulator.ops();
  const double start = now_s();
  do {
    simulator.step_s(plan);
  } while (now_s() - start < 0.1);
  return static_cast<double>(simulator.ops() - before) / (now_s() - start);
}

int bench_plan(const bench::Options& options) {
  const auto repeats = options.integer("repeats", 1);
  const auto most = options.integer("tensors", 1);
  const double ratio = options.real("ratio"), alpha_s = options.real("alpha-us") * 1e-6;
  std::vector<std::vector<std::string>> table = {
      {"tensors", "policy", "plan(ms)", "ops", "step/bytes", "events/s"}};
  auto rows = nlohmann::ordered_json::array();
  for (int64_t tensors = std::min<int64_t>(80, most); tensors <= most; tensors *= 5) {
    const Profile job = make_job(static_cast<int>(tensors), 1);
    const double beta = ratio * job.step_s / static_cast<double>(job.bytes());
    NetworkModel network{8, {{alpha_s, beta}, {1.2 * alpha_s, beta}}};
    network.one_shot = {4096, alpha_s / 2, alpha_s / 4, alpha_s};
    Simulator simulator(job, network, Overlap::forward);
    for (const auto& [name, policy] : policies()) {
      std::vector<double> ms;
      Plan plan;
      for (int64_t i = 0; i < repeats; ++i) {
        const double start = now_s();
        plan = make_plan(name, job, network);
        ms.push_back((now_s() - start) * 1e3);
      }
      const double over = simulator.step_s(plan) / simulator.bytes_bound_s();
      const double rate = events_per_s(simulator, plan);
      table.push_back({std::to_string(tensors), name, fixed(percentile(ms, 0.5), 3),
                       std::to_string(plan.ops().size()), fixed(over, 4), fixed(rate, 0)});
      rows.push_back({{"tensors", tensors},
                      {"policy", name},
                      {"plan_ms_median", percentile(ms, 0.5)},
                      {"ops", plan.ops().size()},
                      {"step_over_bytes_bound", over},
                      {"events_per_s", rate}});
    }
  }
  bench::print_table(options.table(), table);
  options.write({{"benchmark", "plan"}, {"rows", std::move(rows)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options(kAbout);
  options.flag("tensors", "2000", "tensors of the largest job; smaller ones have a fifth each")
      .flag("repeats", "3", "plans made of each kind")
      .flag("ratio", "1", "communication over computation, without startups")
      .flag("alpha-us", "200", "startup of an op, microseconds");
  return bench::run(std::move(options), argc, argv, bench_plan);
}

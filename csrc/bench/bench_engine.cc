// SPDX-License-Identifier: Apache-2.0
// What the engine itself costs: scheduling an op, reporting a gradient, and doing nothing.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "bench.h"
#include "usbyte/engine.h"
#include "usbyte/error.h"

namespace {

using namespace usbyte;
using bench::fixed;
using bench::percentile;

constexpr const char* kAbout =
    "Measures the engine's own overhead: communication costs nothing here.\n\n"
    "  communicator  inline: completes inside launch, on the engine's thread\n"
    "                thread: completes from one other thread, in launch order\n"
    "  ready order   held:   the first op's gradients come last, so that every op is launched\n"
    "                        after the last ready()\n"
    "                plan:   as the plan launches them, so that launches overlap with ready()\n"
    "  op (us)       held only: from the call of the last ready() until drain() returns, by op;\n"
    "                median and 99th percentile over the steps\n"
    "  ready() (ns)  time of one call, mean over a step; median and 99th percentile over the "
    "steps\n"
    "  CPU/op (us)   CPU time of the whole process by op, calls of this program included\n"
    "  idle (%)      CPU time over --idle-s seconds in which nothing happens, of one core";

// Communication that takes no time.
class InlineCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void launch(const Request&, Completion done) override { done(nullptr); }
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator() : thread_([this] { run(); }) {}
  ~ThreadCommunicator() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_one();
    thread_.join();
  }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void launch(const Request&, Completion done) override {
    std::lock_guard lock(mutex_);
    launched_.push_back(std::move(done));
    work_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopping_ || !launched_.empty(); });
      if (launched_.empty()) return;
      const Completion done = std::move(launched_.front());
      launched_.pop_front();
      lock.unlock();
      done(nullptr);
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards launched_ and stopping_
  std::condition_variable work_;
  std::deque<Completion> launched_;
  bool stopping_ = false;
  std::thread thread_;
};

// Equal float32 tensors, cut into ops of near-equal numbers of whole tensors.
Plan make_plan(int64_t tensors, int64_t ops, int64_t numel, int64_t window_bytes) {
  std::vector<TensorSpec> specs;
  for (int64_t t = 0; t < tensors; ++t) {
    specs.push_back({"layer" + std::to_string(t) + ".weight", numel, DType::float32, t * numel});
  }
  std::vector<Op> all;
  for (int64_t i = 0; i < ops; ++i) {
    const Block block{i * tensors / ops * numel, (i + 1) * tensors / ops * numel};
    all.push_back({Collective::all_reduce, {block}, window_bytes, false});
  }
  return Plan("bench", std::move(specs), std::move(all));
}

struct Result {
  std::vector<double> op_us;     // by step
  std::vector<double> ready_ns;  // by step
  double cpu_us_per_op = 0;
};

Result measure(const Plan& plan, Communicator& communicator, bool held, int64_t steps) {
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  std::vector<int> order(plan.tensors().size());
  std::iota(order.begin(), order.end(), 0);
  if (held) std::reverse(order.begin(), order.end());
  const auto tensors = static_cast<double>(order.size());
  const auto ops = static_cast<double>(plan.ops().size());

  Engine engine(plan, flat_buffer.data(), communicator);
  Result result;
  const int64_t warmup = steps / 10 + 1;
  double cpu = 0;
  for (int64_t step = 0; step < warmup + steps; ++step) {
    if (step == warmup) cpu = bench::process_cpu_s();
    engine.begin_step();
    const double begin = now_s();
    for (size_t i = 0; i + 1 < order.size(); ++i) engine.ready(order[i]);
    const double last = now_s();  // before the call: the engine may be done when it returns
    engine.ready(order.back());
    const double all_ready = now_s();
    engine.end_backward();
    engine.drain();
    const double drained = now_s();
    if (step < warmup) continue;
    result.ready_ns.push_back((all_ready - begin) * 1e9 / tensors);
    result.op_us.push_back((drained - last) * 1e6 / ops);
  }
  result.cpu_us_per_op = (bench::process_cpu_s() - cpu) * 1e6 / (static_cast<double>(steps) * ops);
  return result;
}

// CPU time, as % of one core, of an engine that is left alone before its first step, or inside one.
double idle_percent(const Plan& plan, bool in_step, double seconds) {
  std::vector<std::byte> flat_buffer(static_cast<size_t>(plan.flat_buffer_bytes()));
  InlineCommunicator communicator;
  Engine engine(plan, flat_buffer.data(), communicator);
  if (in_step) engine.begin_step();
  const double begin = now_s(), cpu = bench::process_cpu_s();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  return (bench::process_cpu_s() - cpu) / (now_s() - begin) * 100;
}

int bench_engine(const bench::Options& options) {
  const int64_t tensors = options.integer("tensors", 1);
  const int64_t ops = options.integer("ops") == 0 ? tensors : options.integer("ops");
  const int64_t numel = options.integer("numel", 1);
  const int64_t steps = options.integer("steps", 1);
  if (ops > tensors) throw UsageError("--ops must not exceed --tensors");
  const int64_t window = options.integer("window-bytes");
  const Plan plan = make_plan(tensors, ops, numel, window == 0 ? tensors * numel * 4 : window);

  std::vector<std::vector<std::string>> table = {
      {"communicator", "ready order", "op(us) p50", "p99", "ready()(ns) p50", "p99", "CPU/op(us)"}};
  auto rows = nlohmann::ordered_json::array();
  for (const bool threaded : {false, true}) {
    for (const bool held : {true, false}) {
      std::unique_ptr<Communicator> communicator;
      if (threaded) {
        communicator = std::make_unique<ThreadCommunicator>();
      } else {
        communicator = std::make_unique<InlineCommunicator>();
      }
      const Result r = measure(plan, *communicator, held, steps);
      const char* kind = threaded ? "thread" : "inline";
      const char* order = held ? "held" : "plan";
      const double op50 = percentile(r.op_us, 0.5), op99 = percentile(r.op_us, 0.99);
      const double ready50 = percentile(r.ready_ns, 0.5), ready99 = percentile(r.ready_ns, 0.99);
      table.push_back({kind, order, held ? fixed(op50, 3) : "-", held ? fixed(op99, 3) : "-",
                       fixed(ready50, 0), fixed(ready99, 0), fixed(r.cpu_us_per_op, 3)});
      nlohmann::ordered_json row = {{"communicator", kind},
                                    {"ready_order", order},
                                    {"ready_ns_median", ready50},
                                    {"ready_ns_p99", ready99},
                                    {"cpu_us_per_op", r.cpu_us_per_op}};
      if (held) row.update({{"op_us_median", op50}, {"op_us_p99", op99}});
      rows.push_back(std::move(row));
    }
  }
  const double idle_s = options.real("idle-s");
  const double before = idle_percent(plan, false, idle_s),
               inside = idle_percent(plan, true, idle_s);

  bench::print_table(options.table(), table);
  std::fprintf(options.table(),
               "# %lld tensors, %lld ops, %lld steps\n"
               "# idle before a step: %.3f %% of a core; idle awaiting gradients: %.3f %%\n",
               static_cast<long long>(tensors), static_cast<long long>(ops),
               static_cast<long long>(steps), before, inside);
  options.write({{"benchmark", "engine"},
                 {"rows", std::move(rows)},
                 {"idle_percent", {{"before_step", before}, {"awaiting_gradients", inside}}}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options(kAbout);
  options.flag("tensors", "200", "tensors of the plan")
      .flag("ops", "0", "ops of the plan, each of whole tensors; 0: one for each tensor")
      .flag("numel", "1K", "elements of each tensor (float32)")
      .flag("window-bytes", "0", "window of every op; 0: all ops at once")
      .flag("steps", "2000", "measured steps")
      .flag("idle-s", "1", "seconds of each idle measurement");
  return bench::run(std::move(options), argc, argv, bench_engine);
}

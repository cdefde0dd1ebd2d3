// SPDX-License-Identifier: Apache-2.0
// What a training step costs beyond its kernels when its gradients go through the engine.

#include <algorithm>
#include <memory>
#include <string>

#include "bench.h"
#include "cuda/emulation/emulated_cuda.h"
#include "cuda/nccl/nccl_communicator.h"
#include "device.h"
#include "tensor_lists.h"
#include "usbyte/engine.h"
#include "usbyte/env.h"
#include "usbyte/error.h"
#include "usbyte/policy.h"

namespace {

using namespace usbyte;
using namespace usbyte::bench;

constexpr const char* kAbout =
    "Trains a model that only has the right sizes, on one rank: kernels of a given length for "
    "each\n"
    "layer, gradients of the model's tensors, a plan, its collectives. Every other step goes\n"
    "without the engine, its gradients left where they are.\n\n"
    "  model       resnet50, gpt2: the sizes of its tensors\n"
    "  network     nccl: NCCL with one rank; none: collectives that do nothing\n"
    "  blocks      ops of the plan\n"
    "  kernels     device time of a step without the engine; median over the steps\n"
    "  step        device time of a step with it; median\n"
    "  overhead    step / kernels - 1\n"
    "  host        time that a step spends in calls of the engine, by block; median\n"
    "  CPU         CPU time of all threads that the steps with the engine take beyond those\n"
    "              without it, by step and block\n"
    "  ahead       how long before the device has done a step the host is through with it; median\n"
    "  #wrong      elements of the flat buffer that differ from the gradients\n\n"
    "Exit code: 0, 1 if anything is wrong, 2 on an error.";

// One rank: what is reduced stays as it is.
class NoNetwork final : public Communicator {
 public:
  explicit NoNetwork(std::shared_ptr<Cuda> cuda)
      : cuda_(std::move(cuda)), stream_(cuda_->create_stream(true)) {}
  ~NoNetwork() override { cuda_->destroy(stream_); }

  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool stream_ordered() const override { return true; }
  void launch(const Request& request, Completion done) override {
    std::exception_ptr error;
    try {
      for (CudaEvent event : request.order->after) cuda_->wait(stream_, event);
      cuda_->record(request.order->started, stream_);
      cuda_->record(request.order->done, stream_);
    } catch (const Error&) {
      error = std::current_exception();
    }
    done(error);
  }

 private:
  const std::shared_ptr<Cuda> cuda_;
  const CudaStream stream_;
};

// Forward takes a third of the step, backward the rest, each layer as its bytes.
Profile profile(const std::vector<int64_t>& sizes, double step_s) {
  Profile p;
  int64_t total = 0, offset = 0;
  for (int64_t size : sizes) total += size;
  const auto at = [&](int64_t elements) {
    return static_cast<double>(elements) / static_cast<double>(total);
  };
  for (int64_t size : sizes) {
    p.tensors.push_back({"t" + std::to_string(p.tensors.size()), size, DType::float32, offset});
    p.need_s.push_back(at(offset) * step_s / 3);
    p.ready_s.push_back(step_s - at(offset) * step_s * 2 / 3);
    offset += size;
  }
  p.step_s = step_s;
  return p;
}

struct Row {
  std::string model, policy;
  int64_t tensors = 0, blocks = 0, wrong = 0;
  double kernels_s = 0, step_s = 0, host_s = 0, cpu_s = 0, ahead_s = 0;

  double overhead() const { return step_s / kernels_s - 1; }
};

class Training {
 public:
  Training(std::shared_ptr<Cuda> cuda, Communicator& network, const Plan& plan, double step_s,
           int64_t scratch_bytes)
      : cuda_(std::move(cuda)),
        scratch_bytes_(scratch_bytes),
        stream_(*cuda_),
        flat_buffer_(*cuda_, plan.flat_buffer_bytes()),
        gradients_(*cuda_, plan.flat_buffer_bytes()),
        scratch_(*cuda_, scratch_bytes),
        engine_(plan, flat_buffer_.data(), network, options(cuda_)),
        plan_(engine_.plan()) {
    // How many bytes a kernel fills in a microsecond, to make kernels of a given length.
    double fastest = 1;
    for (int i = 0; i < 5; ++i) {
      stream_.mark(0);
      compute(scratch_bytes_);
      stream_.mark(1);
      cuda_->synchronize(stream_);
      fastest = std::min(fastest, stream_.between(0, 1));
    }
    bytes_per_element_ = step_s / 3 / fastest * static_cast<double>(scratch_bytes_) /
                         static_cast<double>(plan.numel());
  }

  Row measure(int64_t steps) {
    std::vector<double> kernels, with, host, ahead;
    double cpu = 0;
    for (int64_t i = -2; i < steps; ++i) {
      const Sample bare = step(false), ours = step(true);
      if (i < 0) continue;  // warm-up
      kernels.push_back(bare.device_s);
      with.push_back(ours.device_s);
      host.push_back(ours.host_s);
      ahead.push_back(ours.ahead_s);
      cpu += ours.cpu_s - bare.cpu_s;
    }
    const auto blocks = static_cast<double>(plan_.ops().size());
    Row row;
    row.tensors = std::ssize(plan_.tensors());
    row.blocks = std::ssize(plan_.ops());
    row.wrong = wrong();
    row.kernels_s = percentile(kernels, 0.5);
    row.step_s = percentile(with, 0.5);
    row.host_s = percentile(host, 0.5) / blocks;
    row.ahead_s = percentile(ahead, 0.5);
    row.cpu_s = cpu / static_cast<double>(steps) / blocks;
    return row;
  }

 private:
  struct Sample {
    double device_s = 0, host_s = 0, cpu_s = 0, ahead_s = 0;
  };

  static EngineOptions options(std::shared_ptr<Cuda> cuda) {
    EngineOptions out;
    out.device = std::move(cuda);
    return out;
  }

  void compute(int64_t bytes) {
    for (; bytes >= 4; bytes -= std::min(bytes, scratch_bytes_)) {
      cuda_->fill(scratch_.data(), DType::float32, std::min(bytes, scratch_bytes_) / 4, 1, stream_);
    }
  }

  // The time of the engine's calls only.
  template <typename Call>
  void timed(Sample& sample, Call call) {
    const double start = now_s();
    call();
    sample.host_s += now_s() - start;
  }

  // Forward, which waits for the last step's gradients layer by layer, then backward.
  Sample step(bool with_engine) {
    Sample out;
    ++value_;
    const double cpu = process_cpu_s();
    stream_.mark(0);
    for (size_t t = 0; t < plan_.tensors().size(); ++t) {
      if (with_engine) timed(out, [&] { engine_.wait(static_cast<int>(t), {}, stream_); });
      compute(length(t));
    }
    if (with_engine) {
      timed(out, [&] {
        engine_.drain({}, stream_);
        engine_.begin_step(stream_);
      });
    }
    for (size_t t = plan_.tensors().size(); t-- > 0;) {
      compute(2 * length(t));
      std::byte* const at = gradients_.data() + plan_.byte_offset(plan_.tensors()[t].offset);
      cuda_->fill(at, DType::float32, plan_.tensors()[t].numel, expected(t), stream_);
      if (with_engine) timed(out, [&] { engine_.ready(static_cast<int>(t), stream_, at); });
    }
    if (with_engine) timed(out, [&] { engine_.end_backward(); });
    stream_.mark(1);
    const double through = now_s();
    cuda_->synchronize(stream_);
    out.ahead_s = now_s() - through;
    out.device_s = stream_.between(0, 1);
    out.cpu_s = process_cpu_s() - cpu;
    return out;
  }

  int64_t length(size_t tensor) const {
    const auto numel = static_cast<double>(plan_.tensors()[tensor].numel);
    return static_cast<int64_t>(numel * bytes_per_element_);
  }
  double expected(size_t tensor) const {
    return static_cast<double>(value_ % 1000) + static_cast<double>(tensor);
  }

  int64_t wrong() {
    engine_.drain({}, stream_);
    std::vector<float> found(static_cast<size_t>(plan_.numel()));
    cuda_->copy(found.data(), flat_buffer_.data(), found.size() * sizeof(float), stream_);
    cuda_->synchronize(stream_);
    int64_t out = 0;
    for (size_t t = 0; t < plan_.tensors().size(); ++t) {
      const TensorSpec& spec = plan_.tensors()[t];
      const auto want = static_cast<float>(expected(t));
      for (int64_t i = spec.offset; i < spec.end(); ++i)
        out += found[static_cast<size_t>(i)] != want;
    }
    return out;
  }

  const std::shared_ptr<Cuda> cuda_;
  const int64_t scratch_bytes_;
  Stream stream_;
  Allocation flat_buffer_, gradients_, scratch_;
  Engine engine_;
  const Plan& plan_;
  double bytes_per_element_ = 0;  // filled in forward, for each element of a tensor
  int64_t value_ = 0;
};

std::unique_ptr<Communicator> network(const std::string& name, const std::shared_ptr<Cuda>& cuda) {
  if (name == "none") return std::make_unique<NoNetwork>(cuda);
  if (name != "nccl") throw UsageError("--network '" + name + "' must be nccl or none");
  const std::shared_ptr<NcclApi> nccl = load_nccl(Env::read().nccl_library);
  NcclId id;
  if (const NcclResult result = nccl->unique_id(&id); result != NcclResult::success) {
    throw FaultError("ncclGetUniqueId: " + nccl->error_string(result));
  }
  return std::make_unique<NcclCommunicator>(nccl, cuda, 0, 1, std::vector<NcclId>{id});
}

nlohmann::ordered_json targets(const std::vector<Row>& rows) {
  auto out = nlohmann::ordered_json::array();
  for (const Row& r : rows) {
    const std::string what =
        r.model + ", " + r.policy + ", " + std::to_string(r.blocks) + " blocks";
    out.push_back({{"what", "one rank against kernels alone, " + what},
                   {"measured", fixed(100 * r.overhead(), 2) + " %"},
                   {"wanted", "at most 1 %"},
                   {"met", r.overhead() <= 0.01}});
    out.push_back({{"what", "the engine's calls, " + what},
                   {"measured", fixed(1e6 * r.host_s, 1) + " us by block"},
                   {"wanted", "at most 15 us"},
                   {"met", r.host_s <= 15e-6}});
  }
  return out;
}

int bench_step(const Options& options) {
  const bool emulated = options.integer("emulated") != 0;
  const int64_t steps = options.integer("steps", 1);
  const double step_s = options.real("step-ms") * 1e-3;
  std::shared_ptr<Cuda> cuda;
  if (emulated) {
    cuda = make_emulated_cuda();
  } else {
    cuda = make_cuda(static_cast<int>(options.integer("device")));
  }
  const std::unique_ptr<Communicator> communicator = network(options.text("network"), cuda);
  std::vector<std::string> models = {"resnet50", "gpt2"};
  if (options.text("model") != "all") models = {options.text("model")};

  // So that a step is fewer launches than a stream takes before it makes the host wait.
  const int64_t scratch_bytes = int64_t{emulated ? 64 : 1024} << 20;
  std::vector<Row> rows;
  for (const std::string& model : models) {
    if (model != "resnet50" && model != "gpt2") {
      throw UsageError("--model '" + model + "' must be resnet50, gpt2 or all");
    }
    std::vector<int64_t> sizes = model == "gpt2" ? gpt2() : resnet50();
    if (emulated) {
      for (int64_t& size : sizes) size = std::min<int64_t>(size, 997);
    }
    const Profile job = profile(sizes, step_s);
    const double beta = step_s / 2 / static_cast<double>(job.bytes());
    for (const std::string policy : {"ddp", "auto", "wfbp"}) {
      const Plan plan = make_plan(policy, job, NetworkModel{2, {{50e-6, beta}}});
      Row row = Training(cuda, *communicator, plan, step_s, scratch_bytes).measure(steps);
      row.model = model;
      row.policy = policy;
      rows.push_back(row);
    }
  }

  std::vector<std::vector<std::string>> table = {
      {"model", "policy", "tensors", "blocks", "kernels(ms)", "step(ms)", "overhead(%)",
       "host(us/block)", "CPU(us/block)", "ahead(ms)", "#wrong"}};
  auto found = nlohmann::ordered_json::array();
  int64_t wrong = 0;
  for (const Row& r : rows) {
    wrong += r.wrong;
    table.push_back({r.model, r.policy, std::to_string(r.tensors), std::to_string(r.blocks),
                     fixed(r.kernels_s * 1e3, 3), fixed(r.step_s * 1e3, 3),
                     fixed(r.overhead() * 100, 2), fixed(r.host_s * 1e6, 2),
                     fixed(r.cpu_s * 1e6, 2), fixed(r.ahead_s * 1e3, 2), std::to_string(r.wrong)});
    found.push_back({{"model", r.model},
                     {"policy", r.policy},
                     {"tensors", r.tensors},
                     {"blocks", r.blocks},
                     {"kernels_s", r.kernels_s},
                     {"step_s", r.step_s},
                     {"overhead", r.overhead()},
                     {"host_by_block_s", r.host_s},
                     {"cpu_by_block_s", r.cpu_s},
                     {"ahead_s", r.ahead_s},
                     {"wrong", r.wrong}});
  }
  nlohmann::ordered_json report = {{"benchmark", "step"}, {"rows", found}};
  if (!emulated) report["targets"] = targets(rows);
  const std::string ran =
      emulated ? "emulated on the host: the times mean nothing" : "on the device";
  return finish(options, table, ran, "elements", wrong, std::move(report));
}

}  // namespace

int main(int argc, char** argv) {
  Options options(kAbout);
  options.flag("device", "0", "ordinal of the GPU")
      .flag("model", "all", "resnet50, gpt2 or all")
      .flag("network", "nccl", "nccl or none")
      .flag("step-ms", "50", "length of a step's kernels in milliseconds, about")
      .flag("steps", "30", "steps of each kind that count")
      .flag("emulated", "0", "1: on the host, without a GPU, with small tensors, to check this");
  return run(std::move(options), argc, argv, bench_step);
}

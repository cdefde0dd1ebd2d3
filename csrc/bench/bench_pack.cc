// SPDX-License-Identifier: Apache-2.0
// Bandwidth and correctness of the kernels: pack, unpack, cast, fill, scatter_add, gather_rows,
// fused updates, codecs.

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <regex>
#include <thread>

#include "bench.h"
#include "cuda/emulation/emulated_cuda.h"
#include "device.h"
#include "kernel_ops.h"
#include "tensor_lists.h"
#include "usbyte/error.h"

namespace {

using namespace usbyte;
using namespace usbyte::bench;

constexpr const char* kAbout =
    "Runs the kernels on blocks of growing size, cut out of a model's tensors, and checks them.\n\n"
    "  list      tensors: resnet50, gpt2; odd: resnet50 with tensors one element longer, so that\n"
    "            nothing is aligned; many: of 301 elements each, whose times are those of the\n"
    "            host, which cannot enqueue as fast as the device works; flat: one tensor\n"
    "  op        pack, pack_bf16, pack_fp16: float32 tensors into a block of float32, ...\n"
    "            unpack, unpack_bf16: back; sgd: with momentum; adam; gradients in the block,\n"
    "            parameters and state in tensors; fill; scatter_add: rows of 64 elements, each of\n"
    "            those written added to three times; gather_rows: rows as long, multiplied, in\n"
    "            pairs that change places; send: encodes the block with what a codec remembers;\n"
    "            receive: decodes and adds two messages; odd: from the second element on, so\n"
    "            that nothing is aligned\n"
    "  size      bytes of the block, if of float32\n"
    "  tensors   that the first block has parts of\n"
    "  moved     bytes that the kernel reads and writes\n"
    "  time      of one op, on the device, when one follows the other, each on another block of\n"
    "            those that the list has, so that they do not find their data in the cache;\n"
    "            median\n"
    "  GB/s      moved / time\n"
    "  copy      GB/s of device-to-device copies that move as many bytes, measured in turns with\n"
    "            the op; median\n"
    "  ratio     GB/s of the op against that of the copy, in per cent\n"
    "  alone     from an event before the launch to one after it, on an idle device; median\n"
    "  #wrong    4-byte words, around the block too, that differ from what the same kernel does "
    "on\n"
    "            the host\n\n"
    "Exit code: 0, 1 if anything is wrong, 2 on an error. 1 GB = 10^9 bytes.";

constexpr const char* kCodecs[] = {"fp16",   "bf16",      "int8",   "fp8",      "fp8:e5m2",
                                   "qsgd:2", "qsgd:4",    "qsgd:8", "terngrad", "signsgd",
                                   "signum", "efsignsgd", "onebit"};
constexpr int64_t kMostBlocks = 1024;  // of one size; more than any cache holds

// Finite as float32, and as two bfloat16 or float16; negative in part, but for what Adam takes the
// root of.
uint32_t word(size_t region, int64_t i) {
  const uint32_t mixed = static_cast<uint32_t>(i) * 2654435761U;
  const uint32_t signs = region == kSecondState ? 0 : mixed & 0x80000000U;
  return 0x3c003c00U | signs | (mixed & 0x03ff0000U) | (mixed >> 6 & 0x3ffU);
}

struct Row {
  std::string list, op;
  int64_t size_bytes = 0, segments = 0;
  double moved_bytes = 0, time_s = 0, copy_s = 0, alone_s = 0;
  int64_t wrong = 0;

  double bytes_per_s() const { return moved_bytes / time_s; }
  double copy_bytes_per_s() const { return moved_bytes / copy_s; }
  double ratio() const { return copy_s / time_s; }
};

// One list's tensors on the device.
class Job {
 public:
  Job(Cuda& cuda, std::string name, const Layout& layout, int64_t copy_bytes, int64_t iters,
      int64_t most_repeats)
      : cuda_(cuda),
        name_(std::move(name)),
        layout_(layout),
        copy_bytes_(copy_bytes),
        iters_(iters),
        most_repeats_(most_repeats),
        stream_(cuda),
        rows_on_host_(static_cast<size_t>(layout.elements / kRowWidth) + 1),
        positions_on_host_(rows_on_host_.size()),
        rows_(cuda, static_cast<int64_t>(rows_on_host_.size()) * 8),
        positions_(cuda, static_cast<int64_t>(rows_on_host_.size()) * 4),
        copy_source_(cuda, copy_bytes),
        copy_target_(cuda, copy_bytes) {
    for (size_t i = 0; i < rows_on_host_.size(); ++i) {
      rows_on_host_[i] = static_cast<int64_t>(i / 3 * 3);
      positions_on_host_[i] = static_cast<int32_t>(i ^ 1);
    }
    cuda.copy(positions_.data(), positions_on_host_.data(), positions_on_host_.size() * 4, stream_);
    cuda.copy(rows_.data(), rows_on_host_.data(), rows_on_host_.size() * 8, stream_);
    std::vector<uint32_t> words(static_cast<size_t>(layout.bytes / 4));
    for (size_t r = 0; r < kRegions; ++r) {
      for (size_t i = 0; i < words.size(); ++i) words[i] = word(r, static_cast<int64_t>(i));
      regions_.push_back(std::make_unique<Allocation>(cuda, layout.bytes));
      device_.base[r] = regions_.back()->data();
      cuda.copy(regions_.back()->data(), words.data(), words.size() * 4, stream_);
    }
    device_.rows = reinterpret_cast<const int64_t*>(rows_.data());
    device_.positions = reinterpret_cast<const int32_t*>(positions_.data());
    cuda.fill(copy_source_.data(), DType::uint8, copy_bytes, 1, stream_);
    cuda.synchronize(stream_);
  }

  int64_t elements() const { return layout_.elements; }

  Row measure(const Op& op, int64_t size) {
    std::vector<Block> blocks;
    const int64_t count = size / 4;
    for (int64_t i = 0; (i + 1) * count <= layout_.elements && i < kMostBlocks; ++i) {
      blocks.emplace_back(layout_, i * count, count);
    }
    Row row{.list = name_, .op = op.name, .size_bytes = size};
    row.segments = static_cast<int64_t>(blocks.front().parts.size());
    row.moved_bytes = op.bytes_per_element * static_cast<double>(count);
    time(op, blocks, row);
    row.wrong = wrong(op, blocks.front());
    return row;
  }

 private:
  void time(const Op& op, const std::vector<Block>& blocks, Row& row) {
    const OnDevice kernels{cuda_, stream_};
    const auto bytes = static_cast<int64_t>(row.moved_bytes / 2) / 256 * 256;
    const int64_t places = std::max<int64_t>(copy_bytes_ / bytes, 1);
    // Launches must not be waited for: the more the less they take.
    const int64_t repeats =
        std::clamp<int64_t>((int64_t{64} << 20) / row.size_bytes, 2, most_repeats_);
    std::vector<double> times, copies, alone;
    int64_t next = 0;
    const auto run_op = [&] {
      op.on_device(kernels, device_, blocks[static_cast<size_t>(next++) % blocks.size()]);
    };
    const auto copy = [&] {
      const int64_t place = next++ % places * bytes;
      cuda_.copy(copy_target_.data() + place, copy_source_.data() + place,
                 static_cast<size_t>(bytes), stream_);
    };
    // Behind as many calls of the same kind: so the cache holds as much that is not written back
    // when the first begins as when the last ends.
    const auto time_calls = [&](const auto& call, size_t first_mark) {
      for (int64_t r = 0; r < repeats; ++r) call();
      stream_.mark(first_mark);
      for (int64_t r = 0; r < repeats; ++r) call();
      stream_.mark(first_mark + 1);
    };
    for (int64_t i = -2; i < iters_; ++i) {
      // Keeps the device busy until all is enqueued.
      for (int busy = 0; busy < 4; ++busy) {
        cuda_.copy(copy_target_.data(), copy_source_.data(), static_cast<size_t>(copy_bytes_),
                   stream_);
      }
      time_calls(run_op, 0);
      time_calls(copy, 2);
      cuda_.synchronize(stream_);
      if (i < 0) continue;  // warm-up
      times.push_back(stream_.between(0, 1) / static_cast<double>(repeats));
      copies.push_back(stream_.between(2, 3) / static_cast<double>(repeats));
      stream_.mark(0);
      run_op();
      stream_.mark(1);
      cuda_.synchronize(stream_);
      alone.push_back(stream_.between(0, 1));
    }
    row.time_s = percentile(times, 0.5);
    row.copy_s = percentile(copies, 0.5);
    row.alone_s = percentile(alone, 0.5);
  }

  // Runs the op once more, on the first block, from known contents and on the host too.
  int64_t wrong(const Op& op, const Block& block) {
    std::array<std::vector<uint32_t>, kRegions> want, found;
    Regions on_host{.rows = rows_on_host_.data(), .positions = positions_on_host_.data()};
    std::array<Bytes, kRegions> ranges;
    in_parallel([&](size_t r) {
      const Bytes used = block.range(static_cast<Region>(r));
      ranges[r] = {std::max<int64_t>(used.begin - kTensorAlignment, 0),
                   std::min(used.end + kTensorAlignment, layout_.bytes)};
      want[r].resize(static_cast<size_t>(ranges[r].end - ranges[r].begin) / 4);
      for (size_t i = 0; i < want[r].size(); ++i) {
        want[r][i] = word(r, ranges[r].begin / 4 + static_cast<int64_t>(i));
      }
    });
    for (size_t r = 0; r < kRegions; ++r) {
      cuda_.copy(device_.at(static_cast<Region>(r), ranges[r].begin), want[r].data(),
                 want[r].size() * 4, stream_);
      on_host.base[r] = reinterpret_cast<std::byte*>(want[r].data());
      on_host.origin[r] = ranges[r].begin;
    }
    cuda_.synchronize(stream_);
    op.on_device({cuda_, stream_}, device_, block);
    op.on_host({}, on_host, block);
    for (size_t r = 0; r < kRegions; ++r) {
      found[r].resize(want[r].size());
      cuda_.copy(found[r].data(), device_.at(static_cast<Region>(r), ranges[r].begin),
                 found[r].size() * 4, stream_);
    }
    cuda_.synchronize(stream_);
    std::array<int64_t, kRegions> out{};
    in_parallel([&](size_t r) {
      int64_t wrong = 0;
      for (size_t i = 0; i < want[r].size(); ++i) wrong += want[r][i] != found[r][i];
      out[r] = wrong;
    });
    return std::accumulate(out.begin(), out.end(), int64_t{0});
  }

  template <typename Act>
  static void in_parallel(Act act) {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < kRegions; ++r) threads.emplace_back(act, r);
  }

  Cuda& cuda_;
  std::string name_;
  Layout layout_;
  int64_t copy_bytes_, iters_, most_repeats_;
  Stream stream_;
  std::vector<int64_t> rows_on_host_;
  std::vector<int32_t> positions_on_host_;
  Allocation rows_, positions_, copy_source_, copy_target_;
  std::vector<std::unique_ptr<Allocation>> regions_;
  Regions device_;
};

std::vector<int64_t> tensors(const std::string& list, int64_t bytes, bool small) {
  std::vector<int64_t> out;
  if (list == "flat") return {bytes / 4};
  if (list == "many") return std::vector<int64_t>(static_cast<size_t>(bytes / 4 / 301), 301);
  if (list == "gpt2") {
    out = gpt2();
  } else if (list == "resnet50" || list == "odd") {
    out = resnet50();
  } else {
    throw UsageError("--list '" + list + "' must be resnet50, gpt2, odd, many, flat or all");
  }
  for (int64_t& count : out) {
    if (list == "odd") ++count;
    if (small) count = std::min<int64_t>(count, 997);  // many to a block, and nothing aligned
  }
  return out;
}

nlohmann::ordered_json target(const std::string& what, const Row& row, bool met,
                              const std::string& measured, const std::string& wanted) {
  return {{"what", what + ", " + row.list + ", " + std::to_string(row.size_bytes >> 10) + " KiB"},
          {"measured", measured},
          {"wanted", wanted},
          {"met", met}};
}

// What the kernels have to reach, as far as the rows tell.
nlohmann::ordered_json targets(const std::vector<Row>& rows) {
  auto out = nlohmann::ordered_json::array();
  for (const Row& r : rows) {
    const bool cast = r.op == "pack_bf16" || r.op == "pack_fp16" || r.op == "unpack_bf16";
    const bool codec =
        (r.op.starts_with("send ") || r.op.starts_with("receive ")) && !r.op.ends_with("odd");
    if (((cast && r.list == "gpt2") || codec) && r.size_bytes >= 4 << 20) {
      out.push_back(target(r.op + " against copy", r, r.ratio() >= 0.8,
                           fixed(100 * r.ratio(), 1) + " %", "at least 80 %"));
    }
    if (r.op != "pack" || (r.list != "resnet50" && r.list != "gpt2")) continue;
    if (r.size_bytes >= 4 << 20) {
      out.push_back(target("pack against copy", r, r.ratio() >= 0.9,
                           fixed(100 * r.ratio(), 1) + " %", "at least 90 %"));
    } else if (r.size_bytes == 64 << 10) {
      out.push_back(target("pack, launch to finish", r, r.alone_s <= 10e-6,
                           fixed(1e6 * r.alone_s, 1) + " us", "at most 10 us"));
    }
  }
  return out;
}

const std::vector<std::string> kHeadings = {"list",     "op",        "size(B)", "tensors",
                                            "moved(B)", "time(us)",  "GB/s",    "copy(GB/s)",
                                            "ratio(%)", "alone(us)", "#wrong"};

std::vector<std::string> cells(const Row& r) {
  return {r.list,
          r.op,
          std::to_string(r.size_bytes),
          std::to_string(r.segments),
          fixed(r.moved_bytes, 0),
          fixed(r.time_s * 1e6, 2),
          fixed(r.bytes_per_s() * 1e-9, 1),
          fixed(r.copy_bytes_per_s() * 1e-9, 1),
          fixed(r.ratio() * 100, 1),
          fixed(r.alone_s * 1e6, 2),
          std::to_string(r.wrong)};
}

int bench_pack(const Options& options) {
  const bool small = options.integer("small") != 0, emulated = options.integer("emulated") != 0;
  const int64_t low = options.integer("min-bytes", 1024);
  const int64_t high = small ? 4 * low : options.integer("max-bytes", low);
  const int64_t iters = small ? 2 : options.integer("iters", 1);
  const int64_t most = small ? 2 * high : std::max(options.integer("memory"), high);
  const std::shared_ptr<Cuda> cuda = emulated
                                         ? std::shared_ptr<Cuda>(make_emulated_cuda())
                                         : make_cuda(static_cast<int>(options.integer("device")));
  std::vector<std::string> lists = {"resnet50", "gpt2", "odd", "many", "flat"};
  if (options.text("list") != "all") lists = {options.text("list")};

  const std::regex wanted(options.text("op"));

  std::vector<size_t> widths = {8, 22};
  for (size_t c = widths.size(); c < kHeadings.size(); ++c) {
    widths.push_back(std::max<size_t>(kHeadings[c].size(), 9));
  }
  print_row(options.table(), widths, kHeadings);
  std::vector<Row> rows;
  for (const std::string& list : lists) {
    std::vector<Op> ops = {pack("pack", DType::float32),
                           pack("pack_bf16", DType::bfloat16),
                           pack("pack_fp16", DType::float16),
                           unpack("unpack", DType::float32),
                           unpack("unpack_bf16", DType::bfloat16),
                           sgd(),
                           adam()};
    if (list == "flat") {
      ops = {fill(), scatter_add(), gather_rows()};
      for (const char* spec : kCodecs) {
        ops.push_back(send(spec, 0));
        ops.push_back(receive(spec, 0));
      }
      ops.push_back(send("int8", 1));
      ops.push_back(receive("efsignsgd", 1));
    }
    std::erase_if(ops, [&](const Op& op) { return !std::regex_search(op.name, wanted); });
    if (ops.empty()) continue;
    // Some of compute-sanitizer's tools take milliseconds for each launch.
    Job job(*cuda, list, Layout(tensors(list, most, small), most), 4 * high, iters, small ? 2 : 32);
    for (const Op& op : ops) {
      // Larger blocks of many small tensors are so many launches, of a table each.
      const int64_t largest = std::min(list == "many" ? int64_t{4} << 20 : high, high);
      for (int64_t size = low; size <= std::min(largest, job.elements() * 4); size *= 4) {
        rows.push_back(job.measure(op, size));
        print_row(options.table(), widths, cells(rows.back()));
      }
    }
  }

  if (rows.empty()) throw UsageError("no op of the lists matches --op " + options.text("op"));

  auto found = nlohmann::ordered_json::array();
  int64_t wrong = 0;
  for (const Row& r : rows) {
    wrong += r.wrong;
    found.push_back({{"list", r.list},
                     {"op", r.op},
                     {"size_bytes", r.size_bytes},
                     {"tensors", r.segments},
                     {"moved_bytes", r.moved_bytes},
                     {"time_s", r.time_s},
                     {"bytes_per_s", r.bytes_per_s()},
                     {"copy_bytes_per_s", r.copy_bytes_per_s()},
                     {"ratio", r.ratio()},
                     {"alone_s", r.alone_s},
                     {"wrong", r.wrong}});
  }
  nlohmann::ordered_json report = {{"benchmark", "pack"}, {"rows", found}};
  if (!small && !emulated) report["targets"] = targets(rows);
  const std::string ran =
      emulated ? "emulated on the host: the times mean nothing" : "on the device";
  return finish(options, {}, ran, "words", wrong, std::move(report));
}

}  // namespace

int main(int argc, char** argv) {
  Options options(kAbout);
  options.flag("device", "0", "ordinal of the GPU")
      .flag("list", "all", "resnet50, gpt2, odd, many, flat or all")
      .flag("op", ".*", "only ops in whose names this regular expression is found")
      .flag("min-bytes", "64K", "smallest block; K, M and G are 2^10, 2^20 and 2^30")
      .flag("max-bytes", "64M", "largest block; each is four times the one before")
      .flag("memory", "256M", "bytes of tensors over which the blocks are spread")
      .flag("iters", "20", "samples for each row")
      .flag("small", "0", "1: little of everything, as for compute-sanitizer")
      .flag("emulated", "0", "1: on the host, without a GPU, to check the program");
  return run(std::move(options), argc, argv, bench_pack);
}

// SPDX-License-Identifier: Apache-2.0
#include "usbyte/plan.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <unordered_set>

#include "json.h"
#include "usbyte/codec.h"
#include "usbyte/error.h"
#include "usbyte/sparse.h"

namespace usbyte {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kSegmentAlignment = 256;  // bytes; what CUDA allocations and NCCL like best

std::string text(Block b) {
  return "[" + std::to_string(b.begin) + ", " + std::to_string(b.end) + ")";
}

// What keeps the codec from being that of an op along a dimension; empty if nothing does. Ranks
// that gather the same shards must get the same, so that none may add what it alone remembers.
std::string dimension_problem(Collective kind, const Codec& codec) {
  const std::string spec = codec.spec(), remembers = codec.remembers();
  if (codec.matrices())
    return "codec " + spec + " needs whole matrices, and a dimension has shards";
  if (kind == Collective::reduce_scatter && !remembers.empty() && remembers != "unsent") {
    return "codec " + spec +
           " remembers more than what is unsent, and cannot scatter along a dimension";
  }
  if (kind == Collective::all_gather && codec.state_rows() > 0) {
    return "codec " + spec + " has a memory, and those that gather the same shards have none in " +
           "common: add ',feedback=off'";
  }
  return "";
}

// Who adds up shards remembers in the rows of what it has scattered.
bool share_rows(const Codec* scatter, const Codec* sum) {
  return !scatter || !sum || scatter->state_rows() == 0 || sum->state_rows() == 0 ||
         sum->remembers().starts_with("unsent");
}

// The ranges, sorted, must cover [0, numel) exactly once.
void check_tiling(std::vector<Block> blocks, int64_t numel, const std::string& what) {
  std::sort(blocks.begin(), blocks.end());
  int64_t covered = 0;
  for (Block b : blocks) {
    if (b.begin > covered) {
      throw PlanError("elements " + text({covered, b.begin}) + " are covered by no " + what);
    }
    if (b.begin < covered) {
      throw PlanError("elements " + text({b.begin, std::min(b.end, covered)}) +
                      " are covered twice by " + what);
    }
    covered = b.end;
  }
  if (covered != numel) {
    throw PlanError("elements " + text({covered, numel}) + " are covered by no " + what);
  }
}

}  // namespace

Block shard(Block block, int rank, int size) {
  const int64_t chunk = (block.numel() + size - 1) / size;
  const int64_t begin = std::min(block.begin + rank * chunk, block.end);
  return {begin, std::min(begin + chunk, block.end)};
}

Plan::Plan() : layout_(std::make_shared<Layout>()) {}

std::string policy_name(std::string_view name) {
  return std::string(name == "usbyte" ? "us-byte" : name);
}

Plan::Plan(std::string policy, std::vector<TensorSpec> tensors, std::vector<Op> ops)
    : policy_(policy_name(policy)),
      layout_(std::make_shared<Layout>(lay_out(std::move(tensors)))),
      ops_(std::move(ops)) {
  validate();
}

Plan Plan::with_ops(std::string policy, std::vector<Op> ops) const {
  Plan plan = *this;
  plan.policy_ = policy_name(policy);
  plan.ops_ = std::move(ops);
  plan.validate();
  return plan;
}

Plan::Layout Plan::lay_out(std::vector<TensorSpec> tensors) {
  int64_t end = 0;
  std::unordered_set<std::string_view> names;
  std::vector<DTypeSegment> segments;
  for (const TensorSpec& t : tensors) {
    if (t.sparse() ? t.numel != 0 : t.numel <= 0) {
      throw PlanError("tensor '" + t.name + "' has " +
                      (t.sparse() ? "elements in the flat buffer, but is sparse" : "no elements"));
    }
    if (t.offset != end) {
      throw PlanError("tensor '" + t.name + "' starts at element " + std::to_string(t.offset) +
                      ", but the one before it ends at " + std::to_string(end));
    }
    if (t.rows <= 0 || t.numel % t.rows != 0) {
      throw PlanError("tensor '" + t.name + "' of " + std::to_string(t.numel) +
                      " elements cannot have " + std::to_string(t.rows) + " rows");
    }
    if (!names.insert(t.name).second) throw PlanError("two tensors are named '" + t.name + "'");
    if (&t != tensors.data() && (&t - 1)->sparse() && !t.sparse()) {
      throw PlanError("tensor '" + t.name + "' is behind a sparse one; those come last");
    }
    end = t.end();
    if (t.sparse()) continue;
    if (segments.empty() || segments.back().dtype != t.dtype) {
      int64_t byte_begin = 0;
      if (!segments.empty()) {
        const DTypeSegment& last = segments.back();
        byte_begin = last.byte_begin + (last.end - last.begin) * itemsize(last.dtype);
        byte_begin = (byte_begin + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
      }
      segments.push_back({t.offset, end, byte_begin, t.dtype});
    } else {
      segments.back().end = end;
    }
  }
  return {std::move(tensors), std::move(segments)};
}

void Plan::validate() const {
  std::vector<Block> reduced,
      scattered;  // all_reduce and reduce_scatter must tile the flat buffer together
  struct Scattered {
    std::string codec;
    int dimension = -1;
    bool summed = false;  // along another dimension, too
    bool gathered = false;
  };
  std::map<Block, Scattered> scatters;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    const auto error = [i](const std::string& what) {
      return PlanError("op " + std::to_string(i) + ": " + what);
    };
    if (op.kind > Collective::all_gather && op.kind != Collective::sparse_all_reduce) {
      throw error("a plan cannot hold " + std::string(name(op.kind)));
    }
    if (op.window_bytes <= 0) throw error("window_bytes must be positive");
    const std::shared_ptr<const Codec> codec = make_codec(op.codec);
    if (!op.scheme.empty()) {
      if (op.kind != Collective::all_reduce || !codec || !codec->selection()) {
        throw error("scheme " + op.scheme +
                    " is for an all_reduce with a codec that picks elements, as topk does");
      }
      if (std::ranges::none_of(sparse_schemes(), [&](auto& s) { return s.name == op.scheme; })) {
        throw error("unknown scheme '" + op.scheme + "'");
      }
    }
    if (op.sparse.has_value() != (op.kind == Collective::sparse_all_reduce)) {
      throw error("a sparse tensor belongs to a sparse_all_reduce, and to nothing else");
    }
    if (op.sparse) {
      if (!op.blocks.empty() || op.codec != "none") {
        throw error("a sparse_all_reduce has neither blocks nor a codec");
      }
      continue;
    }
    if (op.blocks.empty()) throw error("no blocks");
    if (op.route) {
      if (op.kind != Collective::all_reduce || op.route->kind != op.kind || op.codec != "none") {
        throw error("a route is for an all_reduce without a codec, and of an all_reduce");
      }
      if (op.route->routes.empty()) throw error("a route needs a chunk at least");
    }
    const bool of_shards = op.kind == Collective::all_reduce && op.dimension >= 0;
    if (op.dimension < -1) throw error("a dimension is counted from 0, or -1");
    if (op.dimension >= 0 && (op.route || !op.scheme.empty())) {
      throw error("an op of one dimension has no route or scheme");
    }
    if (op.dimension >= 0 && codec) {
      if (const std::string why = dimension_problem(op.kind, *codec); !why.empty())
        throw error(why);
    }
    const bool in_parts = op.kind != Collective::all_reduce;
    const Matrices* const matrices = codec && in_parts ? codec->matrices() : nullptr;
    if (codec && in_parts && !codec->relays()) {
      throw error("codec " + op.codec + " can only be that of an all_reduce");
    }
    for (Block b : op.blocks) {
      if (b.begin < 0 || b.begin >= b.end || b.end > numel()) {
        throw error("block " + text(b) + " is empty or outside the flat_buffer " +
                    text({0, numel()}));
      }
      if (b.end > segment(b.begin).end || dtype(b) != dtype(op.blocks.front())) {
        throw error("block " + text(b) + " mixes dtypes");
      }
      if (op.codec != "none" && !is_floating(dtype(b))) {
        throw error("codec " + op.codec + " cannot code " + std::string(name(dtype(b))));
      }
      const TensorSpec* const whole = matrices ? tensor_at(b) : nullptr;
      if (matrices && !(whole && matrices->pays(whole->rows, whole->cols()))) {
        throw error("codec " + op.codec + " needs matrices that it makes less of; block " +
                    text(b) + " is none");
      }
      if (op.kind == Collective::all_gather || of_shards) {
        auto it = scatters.find(b);
        if (it == scatters.end()) {
          throw error("block " + text(b) + " was not scattered by an earlier op");
        }
        Scattered& scatter = it->second;
        if (scatter.gathered) throw error("block " + text(b) + " is gathered twice");
        if (of_shards) {
          if (scatter.dimension < 0 || scatter.dimension == op.dimension || scatter.summed) {
            throw error(
                "shards of block " + text(b) +
                " are added up along one other dimension than they were scattered along, once");
          }
          if (!share_rows(make_codec(scatter.codec).get(), codec.get())) {
            throw error("codec " + op.codec + " remembers something else than " + scatter.codec +
                        ", which has scattered block " + text(b));
          }
          scatter.summed = true;
          continue;
        }
        if (scatter.dimension != op.dimension || (op.dimension >= 0 && !scatter.summed)) {
          throw error("block " + text(b) + " is gathered along another dimension than it was " +
                      "scattered along, or before its shards are added up");
        }
        const auto first = make_codec(scatter.codec);
        if ((matrices || (first && first->matrices())) && op.codec != scatter.codec) {
          throw error("block " + text(b) + " is gathered by " + op.codec +
                      " but was scattered by " + scatter.codec);
        }
        scatter.gathered = true;
      } else {
        if (op.kind == Collective::reduce_scatter) scatters[b] = {op.codec, op.dimension};
        reduced.push_back(b);
      }
    }
  }
  check_tiling(std::move(reduced), numel(), "all_reduce or reduce_scatter");
  for (const auto& [block, scatter] : scatters) {
    if (!scatter.gathered)
      throw PlanError("block " + text(block) + " is scattered but never gathered");
  }
  check_sparse();
}

void Plan::check_sparse() const {
  std::vector<int> ops(tensors().size());
  for (const Op& op : ops_) {
    if (!op.sparse) continue;
    const auto& [tensor, scheme, bytes] = *op.sparse;
    if (tensor < 0 || tensor >= std::ssize(tensors())) {
      throw PlanError("sparse_all_reduce of tensor " + std::to_string(tensor) + ", of " +
                      std::to_string(tensors().size()));
    }
    if (bytes < 0) throw PlanError("sparse_all_reduce of a negative number of bytes");
    sparse_scheme(scheme);
    ++ops[static_cast<size_t>(tensor)];
  }
  for (size_t t = 0; t < ops.size(); ++t) {
    if (ops[t] == (tensors()[t].sparse() ? 1 : 0)) continue;
    throw PlanError("tensor '" + tensors()[t].name + "' is " +
                    (tensors()[t].sparse() ? "sparse" : "not sparse") + ", and in " +
                    std::to_string(ops[t]) + " sparse_all_reduces");
  }
}

const Plan::DTypeSegment& Plan::segment(int64_t element) const {
  auto after = std::upper_bound(layout_->segments.begin(), layout_->segments.end(), element,
                                [](int64_t e, const DTypeSegment& s) { return e < s.begin; });
  return *(after - 1);
}

int64_t Plan::flat_buffer_bytes() const {
  if (layout_->segments.empty()) return 0;
  const DTypeSegment& last = layout_->segments.back();
  return last.byte_begin + (last.end - last.begin) * itemsize(last.dtype);
}

int64_t Plan::byte_offset(int64_t element) const {
  const DTypeSegment& s = segment(element);
  return s.byte_begin + (element - s.begin) * itemsize(s.dtype);
}

DType Plan::dtype(Block block) const { return segment(block.begin).dtype; }

DType Plan::dtype(const Op& op) const {
  if (op.sparse) return tensors()[static_cast<size_t>(op.sparse->tensor)].dtype;
  return dtype(op.blocks.front());
}

int64_t Plan::bytes(const Op& op) const {
  if (op.sparse) return op.sparse->bytes;
  int64_t elements = 0;
  for (Block b : op.blocks) elements += b.numel();
  return elements * itemsize(dtype(op));
}

int64_t Plan::message_bytes(const Op& op) const {
  const std::shared_ptr<const Codec> codec = make_codec(op.codec);
  if (!codec) return bytes(op);
  if (op.kind != Collective::all_reduce && codec->matrices()) {
    int64_t numbers = 0;
    for (Block b : op.blocks) {
      const TensorSpec& matrix = *tensor_at(b);
      numbers += op.kind == Collective::reduce_scatter ? matrix.rows : matrix.cols();
    }
    return numbers * codec->matrices()->rank() * itemsize(DType::float32);
  }
  int64_t out = 0;
  for (Block b : op.blocks) out += codec->message_bytes(b.numel());
  return out;
}

std::pair<Collective, int64_t> Plan::traffic(const Op& op, int ranks) const {
  const std::shared_ptr<const Codec> codec = make_codec(op.codec);
  // What a rank receives of an all_gather is all but its own part.
  const auto gathered = [ranks](double received) {
    return std::pair(Collective::all_gather,
                     static_cast<int64_t>(received * ranks / std::max(ranks - 1, 1)));
  };
  if (op.sparse) return gathered(static_cast<double>(bytes(op)));
  if (!op.scheme.empty()) {
    const SparseScheme& scheme = sparse_scheme(op.scheme);
    return gathered(ranks > 1 ? scheme.bytes(ranks, shape(op), density(op, ranks)) : 0);
  }
  if (!codec) return {op.kind, bytes(op)};
  if (codec->matrices()) return {Collective::all_reduce, message_bytes(op)};
  if (op.kind != Collective::all_reduce) {
    int64_t shards = 0;
    for (Block b : op.blocks) shards += codec->message_bytes(shard(b, 0, ranks).numel());
    return {op.kind, ranks * shards};
  }
  if (codec->adds()) return {op.kind, message_bytes(op)};
  return {Collective::all_gather, ranks * message_bytes(op)};
}

SparseShape Plan::shape(const Op& op) const {
  if (op.sparse) {
    const TensorSpec& tensor = tensors()[static_cast<size_t>(op.sparse->tensor)];
    return {tensor.rows, tensor.width, tensor.dtype};
  }
  SparseShape out{0, 1, DType::float32};
  for (Block b : op.blocks) out.rows += b.numel();
  return out;
}

SparseDensity Plan::density(const Op& op, int ranks) const {
  const std::shared_ptr<const Codec> codec = make_codec(op.codec);
  int64_t picked = 0;
  for (Block b : op.blocks) picked += codec->selection()->selected_count(b.numel());
  return independent_density(ranks,
                             static_cast<double>(picked) / static_cast<double>(shape(op).rows));
}

const TensorSpec* Plan::tensor_at(Block block) const {
  const auto it = std::ranges::lower_bound(tensors(), block.begin, {}, &TensorSpec::offset);
  const bool same = it != tensors().end() && it->offset == block.begin && it->end() == block.end;
  return same ? &*it : nullptr;
}

std::vector<int> Plan::tensors_of(const Op& op) const {
  std::vector<int> touched;
  append_tensors_of(op, touched);
  return touched;
}

void Plan::append_tensors_of(const Op& op, std::vector<int>& out) const {
  if (op.sparse) return out.push_back(op.sparse->tensor);
  const std::vector<TensorSpec>& all = tensors();
  const auto before = static_cast<std::ptrdiff_t>(out.size());
  for (Block b : op.blocks) {
    auto it = std::upper_bound(all.begin(), all.end(), b.begin,
                               [](int64_t e, const TensorSpec& t) { return e < t.end(); });
    for (; it != all.end() && it->offset < b.end; ++it) {
      out.push_back(static_cast<int>(it - all.begin()));
    }
  }
  if (op.blocks.size() > 1) {
    std::sort(out.begin() + before, out.end());
    out.erase(std::unique(out.begin() + before, out.end()), out.end());
  }
}

std::string Plan::describe(int index) const {
  constexpr size_t kNamed = 4;
  const Op& op = ops_.at(static_cast<size_t>(index));
  const auto size = static_cast<double>(bytes(op));
  char amount[32];
  if (size < 1e3) {
    std::snprintf(amount, sizeof amount, "%.0f B", size);
  } else if (size < 1e6) {
    std::snprintf(amount, sizeof amount, "%.3g kB", size / 1e3);
  } else {
    std::snprintf(amount, sizeof amount, "%.3g MB", size / 1e6);
  }
  std::string by = op.codec == "none" ? "" : " by " + op.codec;
  if (!op.sparse_scheme().empty()) by += (by.empty() ? " by " : ", ") + op.sparse_scheme();
  if (op.route) by += ", routed";
  if (op.dimension >= 0) by += ", along dimension " + std::to_string(op.dimension);
  std::string out =
      "op " + std::to_string(index) + " (" + std::string(name(op.kind)) + ", " + amount + by + ": ";
  const std::vector<int> touched = tensors_of(op);
  for (size_t i = 0; i < std::min(touched.size(), kNamed); ++i) {
    out += (i ? ", " : "") + this->tensors()[static_cast<size_t>(touched[i])].name;
  }
  if (touched.size() > kNamed) {
    out += " and " + std::to_string(touched.size() - kNamed) + " more";
  }
  return out + ")";
}

std::string Plan::to_json() const {
  ordered_json tensors = ordered_json::array(), ops = ordered_json::array();
  for (const TensorSpec& t : this->tensors()) {
    tensors.push_back({{"name", t.name}, {"numel", t.numel}, {"dtype", name(t.dtype)}});
    if (t.rows != 1) tensors.back()["rows"] = t.rows;
    if (t.sparse()) tensors.back()["width"] = t.width;
  }
  for (const Op& op : ops_) {
    ordered_json blocks = ordered_json::array();
    for (Block b : op.blocks) blocks.push_back({b.begin, b.end});
    ops.push_back({{"kind", name(op.kind)},
                   {"blocks", std::move(blocks)},
                   {"window_bytes", op.window_bytes},
                   {"fence", op.fence}});
    if (op.codec != "none") ops.back()["codec"] = op.codec;
    if (!op.scheme.empty()) ops.back()["scheme"] = op.scheme;
    if (op.dimension >= 0) ops.back()["dimension"] = op.dimension;
    if (op.route) ops.back()["route"] = ordered_json::parse(op.route->to_json());
    if (!op.sparse) continue;
    ops.back()["sparse"] = {
        {"tensor", op.sparse->tensor}, {"scheme", op.sparse->scheme}, {"bytes", op.sparse->bytes}};
  }
  return ordered_json{{"format", "usbyte-plan-1"},
                      {"policy", policy_},
                      {"tensors", std::move(tensors)},
                      {"ops", std::move(ops)}}
      .dump();
}

Plan Plan::from_json(std::string_view json) {
  try {
    const Json root = parse_json(json);
    if (root.at("format") != "usbyte-plan-1") throw PlanError("plan: unknown format");
    std::vector<TensorSpec> tensors;
    int64_t offset = 0;
    for (const auto& t : root.at("tensors")) {
      tensors.push_back(tensor_of(t, offset));
      offset = tensors.back().end();
    }
    std::vector<Op> ops;
    for (const auto& o : root.at("ops")) {
      Op op{collective_from_name(o.at("kind").get<std::string>()),
            {},
            whole<int64_t>(o, "window_bytes"),
            o.at("fence").get<bool>(),
            o.value("codec", "none")};
      for (const auto& b : o.at("blocks")) {
        op.blocks.push_back({whole<int64_t>(b.at(0)), whole<int64_t>(b.at(1))});
      }
      if (o.contains("sparse")) {
        const auto& s = o["sparse"];
        op.sparse = {whole<int>(s, "tensor"), s.at("scheme").get<std::string>(),
                     whole<int64_t>(s, "bytes")};
      }
      if (o.contains("scheme")) op.scheme = o["scheme"].get<std::string>();
      // Older files have "line".
      op.dimension = whole<int>(o, o.contains("line") ? "line" : "dimension", -1);
      if (o.contains("route")) op.route = MeshSchedule::from_json(o["route"].dump());
      ops.push_back(std::move(op));
    }
    return Plan(root.at("policy").get<std::string>(), std::move(tensors), std::move(ops));
  } catch (const ordered_json::exception& e) {
    throw PlanError(std::string("plan: malformed JSON: ") + e.what());
  } catch (const UsageError& e) {
    throw PlanError(std::string("plan: ") + e.what());
  }
}

uint64_t Plan::hash() const {
  uint64_t h = 0xcbf29ce484222325;
  for (unsigned char c : to_json()) h = (h ^ c) * 0x100000001b3;
  return h;
}

}  // namespace usbyte

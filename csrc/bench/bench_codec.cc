// SPDX-License-Identifier: Apache-2.0
// What codecs cost: encoding and decoding on one core, against copies of the same gradients.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "bench.h"
#include "usbyte/codec.h"
#include "usbyte/timeline.h"

namespace {

using namespace usbyte;
using bench::fixed;
using bench::medians_in_turns;
using bench::percentile;

constexpr const char* kAbout =
    "Encodes and decodes made-up gradients on one core.\n\n"
    "  size      bytes of the gradients, float32\n"
    "  message   bytes of the message over those of the gradients, in per cent\n"
    "  encode, send, decode, add\n"
    "            GB/s of gradients: their size / time; median. send: encoding with what is\n"
    "            remembered, as training does; add: decode_add to gradients\n"
    "  copy      GB/s of memcpy of gradients of that size, measured in turns; median\n"
    "  read      GB/s of one pass that reads them (their largest magnitude); likewise\n\n"
    "1 GB = 10^9 bytes.";

struct Rates {
  double encode, send, decode, add, copy, read;  // bytes of gradients in a second
};

// Normal, as gradients about are.
std::vector<float> gradients(int64_t count) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(rng);
  return out;
}

uint32_t largest(const std::vector<float>& values) {
  uint32_t out = 0;
  for (float x : values) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out = std::max(out, bits & 0x7fffffff);
  }
  return out;
}

Rates measure(const Codec& codec, int64_t count, int64_t iters) {
  const std::vector<float> values = gradients(count);
  std::vector<float> decoded(values.size()), copied(values.size());
  std::vector<std::byte> message(static_cast<size_t>(codec.message_bytes(count)));
  const RngKey rng = RngKey::of(1, 1, 0, 0);
  std::vector<float> rows[2];
  CodecState memory;
  for (size_t i = 0; i < 2; ++i) {
    rows[i].resize(values.size());
    memory.rows[i] = rows[i].data();
  }
  volatile uint32_t seen = 0;
  const std::function<void()> actions[] = {
      [&] { codec.encode(values, rng, message.data()); },
      [&] { codec.send(values, memory, rng, 4, message.data()); },
      [&] { codec.decode(message.data(), rng, decoded); },
      [&] { codec.decode_add(message.data(), rng, 1, decoded); },
      [&] { std::memcpy(copied.data(), values.data(), values.size() * sizeof(float)); },
      [&] { seen = largest(values); }};
  const std::vector<double> times = medians_in_turns(actions, iters);
  const auto rate = [&](size_t a) { return static_cast<double>(count) * sizeof(float) / times[a]; };
  return {rate(0), rate(1), rate(2), rate(3), rate(4), rate(5)};
}

// Of two rounds; both encodings are `send`, and what comes of them is decoded.
Rates measure_matrices(const Matrices& codec, int64_t count, int64_t rows, int64_t iters) {
  const int64_t cols = count / rows;
  std::vector<float> values = gradients(count), decoded(values.size());
  std::vector<float> unsent(values.size()), start(values.size());
  std::vector<float> p(static_cast<size_t>(codec.rank() * rows));
  std::vector<float> q(static_cast<size_t>(codec.rank() * cols));
  CodecState memory{{unsent.data(), start.data()}};
  const RngKey rng = RngKey::of(1, 1, 0, 0);
  std::vector<double> send, decode;
  for (int64_t i = -1; i < iters; ++i) {
    const double begin = now_s();
    codec.first(values, rows, memory, rng, p);
    codec.second(rows, cols, memory, p, q);
    const double sent = now_s();
    codec.finish(rows, p, q, memory, decoded);
    if (i < 0) continue;
    send.push_back(sent - begin);
    decode.push_back(now_s() - sent);
  }
  const double bytes = static_cast<double>(count) * sizeof(float);
  const double sends = bytes / percentile(send, 0.5), decodes = bytes / percentile(decode, 0.5);
  return {sends, sends, decodes, decodes, 0, 0};
}

int bench_codec(const bench::Options& options) {
  std::vector<std::string> specs = {"fp16",      "bf16",       "fp8",       "fp8:e5m2",  "int8",
                                    "topk:0.01", "randk:0.01", "qsgd:2",    "qsgd:4",    "qsgd:8",
                                    "terngrad",  "signsgd",    "signum",    "efsignsgd", "onebit",
                                    "dct:0.01",  "dgc:0.01",   "powersgd:4"};
  if (options.text("codec") != "all") specs = {options.text("codec")};
  const int64_t low = options.integer("min-bytes", 4), high = options.integer("max-bytes", low);
  const int64_t factor = options.integer("factor", 2);
  std::vector<std::vector<std::string>> table = {{"codec", "size(B)", "message(%)", "encode(GB/s)",
                                                  "send(GB/s)", "decode(GB/s)", "add(GB/s)",
                                                  "copy(GB/s)", "read(GB/s)", "encode/copy(%)"}};
  auto rows = nlohmann::ordered_json::array();
  for (const std::string& spec : specs) {
    const auto codec = make_codec(spec);
    for (int64_t bytes = low; bytes <= high; bytes *= factor) {
      const int64_t count = bytes / 4;
      const int64_t iters = options.integer("iters", 1);
      Rates r = measure(*codec, count, iters);
      int64_t message = codec->message_bytes(count);
      const int64_t edge = std::bit_floor(static_cast<uint64_t>(std::sqrt(count)));
      if (codec->matrices() && count % edge == 0) {
        const Rates of = measure_matrices(*codec->matrices(), count, edge, iters);
        r = {of.encode, of.send, of.decode, of.add, r.copy, r.read};
        message = 4 * codec->matrices()->rank() * (edge + count / edge);
      }
      const double share = static_cast<double>(message) / static_cast<double>(4 * count);
      const auto gb = [](double rate) { return fixed(rate * 1e-9, 2); };
      table.push_back({spec, std::to_string(4 * count), fixed(100 * share, 2), gb(r.encode),
                       gb(r.send), gb(r.decode), gb(r.add), gb(r.copy), gb(r.read),
                       fixed(100 * r.encode / r.copy, 0)});
      rows.push_back({{"codec", spec},
                      {"size_bytes", 4 * count},
                      {"message_share", share},
                      {"encode_bytes_per_s", r.encode},
                      {"send_bytes_per_s", r.send},
                      {"decode_bytes_per_s", r.decode},
                      {"add_bytes_per_s", r.add},
                      {"copy_bytes_per_s", r.copy},
                      {"read_bytes_per_s", r.read}});
    }
  }
  bench::print_table(options.table(), table);
  options.write({{"benchmark", "codec"}, {"rows", std::move(rows)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options(kAbout);
  options.flag("codec", "all", "as in topk:0.01; all: every one")
      .flag("min-bytes", "64K", "smallest gradients; K, M and G are 2^10, 2^20 and 2^30")
      .flag("max-bytes", "64M", "largest gradients")
      .flag("factor", "32", "each size is this many times the one before")
      .flag("iters", "15", "timed calls for each size");
  return bench::run(std::move(options), argc, argv, bench_codec);
}

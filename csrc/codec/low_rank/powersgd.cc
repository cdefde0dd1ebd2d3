// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/make.h"
#include "codec/message.h"
#include "codec/random.h"
#include "usbyte/error.h"

namespace usbyte::codecs {
namespace {

bool finite(std::span<const float> values) {
  return loops().largest(values.data(), std::ssize(values)) < kInfinityBits;
}

// T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization", NeurIPS 2019: one step of subspace iteration, M Q and then M^T P,
// starting from the Q of the step before; error feedback. Factors are kept transposed: `rank` rows.
class PowerSgd final : public Codec, public Matrices {
 public:
  explicit PowerSgd(int rank) : rank_(rank) {}

  std::string spec() const override { return "powersgd:" + std::to_string(rank_); }
  int state_rows() const override { return 2; }
  std::string remembers() const override { return "unsent, factor"; }
  const Matrices* matrices() const override { return this; }
  int rank() const override { return rank_; }

  // What is no matrix goes as it is, and nothing is left to be remembered.
  bool adds() const override { return true; }
  DType message_dtype() const override { return DType::float32; }
  int64_t message_bytes(int64_t count) const override { return 4 * count; }
  void encode(std::span<const float> values, const RngKey&, std::byte* message) const override {
    if (!values.empty()) std::memcpy(message, values.data(), values.size_bytes());
  }
  void decode(const std::byte* message, const RngKey&, std::span<float> values) const override {
    if (!values.empty()) std::memcpy(values.data(), message, values.size_bytes());
  }
  void decode_add(const std::byte* message, const RngKey&, float factor,
                  std::span<float> values) const override {
    loops().add(at<float>(message, 0), factor, values.data(), std::ssize(values));
  }
  void send(std::span<const float> gradient, CodecState&, const RngKey& rng, int,
            std::byte* message) const override {
    encode(gradient, rng, message);
  }

  void first(std::span<const float> gradient, int64_t rows, CodecState& state, const RngKey& rng,
             std::span<float> sums) const override {
    const int64_t cols = std::ssize(gradient) / rows;
    float* const unsent = state.rows[0];
    loops().add(gradient.data(), 1, unsent, std::ssize(gradient));
    for (int64_t k = 0; k < rank_; ++k) {
      const std::span<float> q(state.rows[1] + k * cols, static_cast<size_t>(cols));
      draw_if_useless(q, rng, k);
      for (int64_t i = 0; i < rows; ++i) {
        const double dot = loops().dot(unsent + i * cols, q.data(), cols);
        sums[static_cast<size_t>(k * rows + i)] = static_cast<float>(dot);
      }
    }
  }

  void second(int64_t rows, int64_t cols, CodecState& state, std::span<float> p,
              std::span<float> sums) const override {
    float* const unsent = state.rows[0];
    if (!finite(p)) {  // all ranks have the same, and will see it
      std::fill(p.begin(), p.end(), std::numeric_limits<float>::quiet_NaN());
      std::fill(sums.begin(), sums.end(), 0.0F);
      for (int64_t i = 0; i < rows * cols; ++i) {
        if (!std::isfinite(unsent[i])) unsent[i] = 0;
      }
      return;
    }
    orthonormalise(p, rows);
    std::fill(sums.begin(), sums.end(), 0.0F);
    for (int64_t k = 0; k < rank_; ++k) {
      float* const q = sums.data() + k * cols;
      for (int64_t i = 0; i < rows; ++i) {
        loops().add(unsent + i * cols, p[static_cast<size_t>(k * rows + i)], q, cols);
      }
    }
    multiply(p, sums, rows, -1, {unsent, static_cast<size_t>(rows * cols)});
  }

  void finish(int64_t rows, std::span<const float> p, std::span<const float> sums,
              CodecState& state, std::span<float> values) const override {
    const int64_t cols = std::ssize(values) / rows;
    std::fill(values.begin(), values.end(), 0.0F);
    multiply(p, sums, rows, 1, values);
    for (int64_t k = 0; k < rank_; ++k) {
      const std::span<const float> from =
          sums.subspan(static_cast<size_t>(k * cols), static_cast<size_t>(cols));
      const double norm = std::sqrt(loops().sum_of_squares(from.data(), cols));
      const bool usable = std::isfinite(norm) && norm > kLeastScaled;
      const float scale = usable ? static_cast<float>(1 / norm) : 0.0F;
      float* const q = state.rows[1] + k * cols;
      for (int64_t j = 0; j < cols; ++j) q[j] = usable ? scale * from[static_cast<size_t>(j)] : 0;
    }
  }

 private:
  // In the first step, and where a column of P was spanned by the others.
  static void draw_if_useless(std::span<float> q, const RngKey& rng, int64_t k) {
    const uint32_t largest = loops().largest(q.data(), std::ssize(q));
    if (largest > 0 && largest < kInfinityBits) return;
    for (size_t j = 0; j < q.size(); ++j) {
      const uint64_t random = mix(mix(rng.shared + static_cast<uint64_t>(k)) + j);
      q[j] = static_cast<float>(static_cast<double>(static_cast<int64_t>(random)) * 0x1p-63);
    }
  }

  // values += factor * P Q^T
  void multiply(std::span<const float> p, std::span<const float> q, int64_t rows, float factor,
                std::span<float> values) const {
    const int64_t cols = std::ssize(values) / rows;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < rank_; ++k) {
        loops().add(q.data() + k * cols, factor * p[static_cast<size_t>(k * rows + i)],
                    values.data() + i * cols, cols);
      }
    }
  }

  // Gram-Schmidt, twice, in double: every rank must come to the same bits. What the others span
  // becomes 0.
  void orthonormalise(std::span<float> p, int64_t rows) const {
    std::vector<std::vector<double>> columns;
    for (int64_t k = 0; k < rank_; ++k) {
      const float* const from = p.data() + k * rows;
      std::vector<double>& column = columns.emplace_back(from, from + rows);
      const double before = std::sqrt(product(column, column));
      for (int pass = 0; pass < 2; ++pass) {
        for (int64_t other = 0; other < k; ++other) {
          const std::vector<double>& o = columns[static_cast<size_t>(other)];
          const double along = product(column, o);
          for (size_t i = 0; i < column.size(); ++i) column[i] -= along * o[i];
        }
      }
      const double norm = std::sqrt(product(column, column));
      const double scale = norm > 1e-6 * before ? 1 / norm : 0;
      for (size_t i = 0; i < column.size(); ++i) {
        column[i] *= scale;
        p[static_cast<size_t>(k * rows) + i] = static_cast<float>(column[i]);
      }
    }
  }
  static double product(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }

  const int rank_;
};

}  // namespace

Made powersgd(const std::string& parameter) {
  constexpr int kMost = 256;
  Parameters parameters("powersgd", parameter.empty() ? "" : "rank=" + parameter);
  const int64_t rank = parameters.whole("rank", 0, 1, kMost);
  if (rank == 0) {
    throw UsageError("codec 'powersgd': needs a rank from 1 to 256, as in powersgd:4");
  }
  parameters.check_all_read();
  return std::make_shared<PowerSgd>(static_cast<int>(rank));
}

}  // namespace usbyte::codecs

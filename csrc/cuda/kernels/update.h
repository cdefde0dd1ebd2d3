// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "arithmetic.h"
#include "table.h"

// The updates of torch.optim, one operation after the other as its foreach=True implementation
// makes them on a device (torch/optim/sgd.py and adam.py, _multi_tensor_*; torch 2.13), each
// rounded to the parameters' type: the result is the same bit for bit. What foreach reads and
// writes up to ten times is read and written once.
namespace usbyte::kernels {

/// Arithmetic on values of T, each result rounded to T.
template <typename T>
struct Rounding {
  using Compute = typename Arithmetic<T>::Type;

  USBYTE_HD static Compute round(Compute x) { return Arithmetic<T>::load(Arithmetic<T>::store(x)); }
  USBYTE_HD static Compute times(Compute a, Compute b) { return round(multiply(a, b)); }
  /// a + alpha * b: torch's add with alpha, which nvcc and torch's CPU kernels both fuse.
  USBYTE_HD static Compute add(Compute a, Compute b, Compute alpha) {
    return round(std::fma(alpha, b, a));
  }
};

template <typename T>
struct SgdEntry : Pieces<T> {
  const T* grad;
  T* momentum;
  uint64_t first;  ///< not 0: the momentum buffer is set to the gradient
};

/// A step of SGD.
template <typename T>
struct SgdRule {
  using Entry = SgdEntry<T>;
  using As = Arithmetic<T>;
  using Round = Rounding<T>;
  using Compute = typename Round::Compute;
  Compute minus_lr, momentum, one_minus_dampening, weight_decay, grad_scale;
  bool nesterov;

  USBYTE_HD void element(Compute& param, Compute grad, Compute& buffer, bool first) const {
    grad = Round::times(grad, grad_scale);
    if (weight_decay != 0) grad = Round::add(grad, param, weight_decay);
    if (momentum != 0) {
      buffer = first ? grad : Round::add(Round::times(buffer, momentum), grad, one_minus_dampening);
      grad = nesterov ? Round::add(grad, buffer, momentum) : buffer;
    }
    param = Round::add(param, grad, minus_lr);
  }

  USBYTE_HD void piece(const Entry& entry, int32_t begin) const {
    constexpr uint32_t N = Entry::kElements;
    const bool reads_momentum = momentum != 0 && !entry.first;
    Fetched<T, N> params, grads, buffers;
    params.fetch(entry.target, begin, entry.count);
    grads.fetch(entry.grad, begin, entry.count);
    if (reads_momentum) buffers.fetch(entry.momentum, begin, entry.count);
    T param[N], grad[N], buffer[N] = {};
    params.get(param);
    grads.get(grad);
    if (reads_momentum) buffers.get(buffer);
    USBYTE_UNROLL
    for (uint32_t i = 0; i < N; ++i) {
      auto x = As::load(param[i]), b = As::load(buffer[i]);
      element(x, As::load(grad[i]), b, entry.first);
      param[i] = As::store(x);
      buffer[i] = As::store(b);
    }
    put(entry.target, begin, entry.count, param);
    if (momentum != 0) put(entry.momentum, begin, entry.count, buffer);
  }
};

template <typename T>
struct AdamEntry : Pieces<T> {
  const T* grad;
  T* exp_avg;
  T* exp_avg_sq;
  // Corrected for the bias of the entry's own step.
  typename Arithmetic<T>::Type minus_step_size, bias_correction2_sqrt;
};

/// A step of Adam or AdamW.
template <typename T>
struct AdamRule {
  using Entry = AdamEntry<T>;
  using As = Arithmetic<T>;
  using Round = Rounding<T>;
  using Compute = typename Round::Compute;
  Compute one_minus_beta1, beta2, one_minus_beta2, eps, grad_scale;
  Compute weight_decay;  ///< added to the gradient; 0 if decoupled
  Compute shrink;        ///< multiplied with the parameter; 1 if not decoupled

  USBYTE_HD void element(Compute& param, Compute grad, Compute& average, Compute& average_sq,
                         Compute minus_step_size, Compute bias_correction2_sqrt) const {
    grad = Round::times(grad, grad_scale);
    param = Round::times(param, shrink);
    if (weight_decay != 0) grad = Round::add(grad, param, weight_decay);
    average = Round::round(lerp(average, grad));
    average_sq = Round::times(average_sq, beta2);
    const Compute factor = one_minus_beta2 == 1 ? grad : multiply(grad, grad);
    average_sq = Round::add(average_sq, factor, one_minus_beta2 == 1 ? grad : one_minus_beta2);
    Compute denominator = Round::round(std::sqrt(average_sq));
    denominator = Round::round(denominator / bias_correction2_sqrt);
    denominator = Round::round(denominator + eps);
    param = Round::add(param, average / denominator, minus_step_size);
  }

  /// torch's lerp, which starts from the nearer end.
  USBYTE_HD Compute lerp(Compute from, Compute to) const {
    const Compute difference = to - from;
    return one_minus_beta1 < Compute{0.5} ? std::fma(one_minus_beta1, difference, from)
                                          : std::fma(-difference, 1 - one_minus_beta1, to);
  }

  USBYTE_HD void piece(const Entry& entry, int32_t begin) const {
    constexpr uint32_t N = Entry::kElements;
    Fetched<T, N> params, grads, averages, squares;
    params.fetch(entry.target, begin, entry.count);
    grads.fetch(entry.grad, begin, entry.count);
    averages.fetch(entry.exp_avg, begin, entry.count);
    squares.fetch(entry.exp_avg_sq, begin, entry.count);
    T param[N], grad[N], average[N], square[N];
    params.get(param);
    grads.get(grad);
    averages.get(average);
    squares.get(square);
    USBYTE_UNROLL
    for (uint32_t i = 0; i < N; ++i) {
      auto x = As::load(param[i]), m = As::load(average[i]), v = As::load(square[i]);
      element(x, As::load(grad[i]), m, v, entry.minus_step_size, entry.bias_correction2_sqrt);
      param[i] = As::store(x);
      average[i] = As::store(m);
      square[i] = As::store(v);
    }
    put(entry.target, begin, entry.count, param);
    put(entry.exp_avg, begin, entry.count, average);
    put(entry.exp_avg_sq, begin, entry.count, square);
  }
};

/// A rule's step for every element of a table.
template <typename Rule, size_t Bytes>
struct UpdateKernel {
  using Entry = typename Rule::Entry;

  Rule rule;
  Table<Entry, Bytes> table;

  int64_t threads_wanted() const { return table.pieces; }

  USBYTE_HD void operator()(GridIndex at) const {
    for (uint64_t p = at.global(); p < table.pieces; p += at.global_threads()) {
      const auto piece = static_cast<uint32_t>(p);
      const Entry& entry = table.entries[table.find(piece, 0, table.size - 1)];
      rule.piece(entry, entry.element(piece));
    }
  }
};

}  // namespace usbyte::kernels
